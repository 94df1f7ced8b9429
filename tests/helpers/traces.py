"""What a job leaves behind: processes, and files in shared memory. Either may take a moment to go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

PATIENCE_S = 10


def list_abandoned(before: set[str]) -> set[str]:
    """Return the files in shared memory that are not of ``before``, that no process has mapped or open, and that stay.

    Other tests may run meanwhile: what they use, and what they are about to remove, is not abandoned.
    """
    abandoned, deadline = _list_unused(before), time.monotonic() + PATIENCE_S
    while abandoned and time.monotonic() < deadline:
        time.sleep(0.2)
        abandoned &= _list_unused(before)
    return abandoned


def _list_unused(before: set[str]) -> set[str]:
    new = set(os.listdir("/dev/shm")) - before
    used = set()
    for process in psutil.process_iter() if new else ():
        try:
            files = (*process.memory_maps(), *process.open_files())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
        used |= {Path(file.path).name for file in files}
    return (new - used) & set(os.listdir("/dev/shm"))


def has_no_trace(folder: Path, before: set[str]) -> bool:
    """Whether no process of a job in ``folder`` is left, and nothing is abandoned in shared memory."""
    processes = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return not alive and not list_abandoned(before)
