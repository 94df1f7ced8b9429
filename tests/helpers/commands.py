"""Start the project's commands as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_python(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start Python in ``folder``, in a session of its own, with the project on its path."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_torchrun(folder: Path, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a script, or a module after ``-m``, under torchrun in ``folder``."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return start_python(folder, *torchrun, *arguments)


def run_torchrun(folder: Path, num_ranks: int, *arguments: str, timeout_s: float = 280) -> str:
    """Run a command under torchrun to its end; return its output, and fail with it."""
    process = start_torchrun(folder, num_ranks, *arguments)
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output[-6000:]
    return output
