#!/usr/bin/env bash
# Builds the wheel and uses it as somebody who has nothing else: a new environment, an empty folder, no checkout.
# Takes minutes; not part of CI. Usage: scripts/check_wheel.sh PYTHON (one with maturin: .venv/bin/python)
set -euo pipefail
python=${1:?which Python}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

(cd "$root" && "$(dirname "$python")/maturin" build --release --locked --out "$work/dist" > "$work/build.log" 2>&1) || { cat "$work/build.log" >&2; exit 1; }
wheel=$(ls "$work"/dist/*.whl)
names=$("$python" -m zipfile -l "$wheel" | awk '{print $1}')
for name in _shim/libprism_nccl.so _shim/libprism_cuda.so _shim/libprism_gpu.so _shim/libprism_nvml.so _shim/libprism_audit.so \
    page/templates/page.html page/templates/style.css page/templates/map.js page/templates/map.html py.typed _native.pyi; do
    grep -qx "prism_core/$name" <<< "$names" || { echo "not in the wheel: prism_core/$name" >&2; exit 1; }
done

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
mkdir "$work/empty" && cd "$work/empty"
prism=$work/venv/bin/prism
"$prism" --version
"$work/venv/bin/python" -c 'from prism_core import synthetic; synthetic.transformer_step(dp=2, tp=2, pp=2, microbatches=2, layers=1).save("job.prism")'
"$prism" replay job.prism > /dev/null
"$prism" report job.prism -o report.html > /dev/null
test -s report.html
# The preload is in place; torch is not installed here, which is no error.
"$prism" doctor
