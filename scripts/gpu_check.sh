#!/usr/bin/env bash
# What only a machine with a GPU can show, in a few minutes: held streams, their times, what holding costs the compute
# beside it; with PyTorch also training as rank 0 of 8,192. Needs `make build`. Prints one JSON line per check.
# Says "not run" for what is missing, and fails if a check that ran failed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    echo '{"check": "all", "result": "not run", "reason": "no GPU: there is no /dev/nvidia0"}'
    exit 0
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" scripts/gpu_check.py
