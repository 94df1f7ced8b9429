#!/usr/bin/env bash
# Run tests/gpu and the benchmark's GPU cases on this machine, in under 6 minutes; say why where they cannot run.
#
#   tools/gpu_check.sh [OUT_DIR]      figures go to OUT_DIR/bench_gpu.json (default: runs/gpu_check)
#
# Needs torch >= 2.11 with CUDA, triton and pytest; nothing has to be installed from this repository. PYTHON names the
# interpreter (default: .venv/bin/python, else python3). Exit status: 0 = passed or skipped with a reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out_dir=${1:-runs/gpu_check}

reason=$("$PYTHON" - <<'PY'
import importlib.util

missing = [name for name in ("torch", "triton", "pytest") if importlib.util.find_spec(name) is None]
if missing:
    print("not installed: " + ", ".join(missing))
else:
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}, torch.cuda.is_available() is False)")
PY
)
if [[ -n "$reason" ]]; then
    echo "gpu_check: skipped: $reason"
    exit 0
fi

mkdir -p "$out_dir"
began=$SECONDS
# The benchmark gets what the tests leave of 330 s, and runs also after a failed test: its figures stand on their own.
status=0
timeout 210 "$PYTHON" -m pytest tests/gpu -q --durations=10 2>&1 | tee "$out_dir/tests.log" || status=$?
budget=$((240 - (SECONDS - began)))
((budget > 20)) || budget=20
timeout $((330 - (SECONDS - began))) "$PYTHON" tools/bench_gpu.py --budget-s "$budget" --out "$out_dir/bench_gpu.json" \
    || status=$?
echo "gpu_check: $((SECONDS - began)) s, status $status"
exit "$status"
