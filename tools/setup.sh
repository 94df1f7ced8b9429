# Sourced by demo.sh and test.sh: an idempotent .venv with the frozen CPU list, and the environment of every run.
# shellcheck shell=bash

PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    echo "tools/requirements-cpu.txt is frozen for Python 3.11, but '$PYTHON' is $("$PYTHON" --version 2>&1)." >&2
    echo "Set PYTHON to a Python 3.11, for instance: PYTHON=python3.11 bash $0" >&2
    exit 1
fi

stamp=.venv/installed-$(sha256sum tools/requirements-cpu.txt pyproject.toml | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "Installing the frozen CPU list into .venv (once, about two minutes and 4 GB) ..."
    "$PYTHON" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r tools/requirements-cpu.txt
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
    if ! .venv/bin/python -c 'import torch'; then
        echo "The torch 2.13.0 that pip found here does not load without CUDA's libraries: it is a build for GPUs." >&2
        echo "Let pip find the CPU build (PIP_EXTRA_INDEX_URL, or pip's own configuration) and remove .venv." >&2
        exit 1
    fi
    touch "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"

# One thread a rank: two ranks fill two cores. vLLM and the tokenizers must not look for the network.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
