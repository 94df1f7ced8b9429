#!/usr/bin/env bash
# Lint, types, import rules and all tests, on a CPU machine with 2 cores. Arguments go to the last pytest call.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

run() {
    local start=$SECONDS
    echo "== $*"
    "$@"
    echo "== $((SECONDS - start)) s"
}

run ruff check .
run ruff format --check .
run pyrefly check --summarize-errors
run lint-imports
run pytest -q -n 2 tests/unit
# two files at a time, the long ones first
run pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/e2e tests/distributed "$@"
