#!/usr/bin/env bash
# Who may use whom (docs/architecture.md), checked on the crate graph.
set -euo pipefail
forbid() {  # forbid CRATE DEPENDENCY...
  local crate=$1; shift
  local tree; tree=$(cargo tree --locked --package "$crate" --edges normal --prefix none | awk '{print $1}' | sort -u)
  for dependency in "$@"; do
    if grep -qx "$dependency" <<<"$tree"; then echo "layering: $crate must not depend on $dependency" >&2; exit 1; fi
  done
}
only() {  # only CRATE ALLOWED...
  local crate=$1; shift
  local extra; extra=$(cargo tree --locked --package "$crate" --edges normal --prefix none | awk '{print $1}' | sort -u | grep -vxF -e "$crate" $(printf -- '-e %s ' "$@") || true)
  if [ -n "$extra" ]; then echo "layering: $crate may depend on $* only, found: $extra" >&2; exit 1; fi
}
forbid prism-engine pyo3 pyo3-ffi prism-import
forbid prism-import pyo3 pyo3-ffi prism-python
only prism-wire libc
for shim in prism-nccl prism-gpu; do only "$shim" prism-wire prism-callers libc; done
# Kernels in PyTorch's libraries are compressed with zstd; ruzstd is plain Rust without dependencies.
only prism-cuda prism-wire prism-callers libc ruzstd
only prism-nvml prism-wire libc
for helper in prism-audit prism-callers; do only "$helper" libc; done
if grep -rnE 'std::env|println!|eprintln!' rust/prism-engine/src rust/prism-import/src; then
  echo "layering: prism-engine and prism-import must not read the environment or print" >&2; exit 1
fi
if grep -rn '#\[test\]' rust/prism-import/src rust/prism-python/src; then
  echo "layering: tests inside prism-import and prism-python do not run (\`test = false\`): put them in tests/" >&2; exit 1
fi
echo "layers hold"
