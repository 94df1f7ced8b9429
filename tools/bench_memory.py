"""How much memory a step takes, as the kernel of a Linux machine sees it: what the benchmarks of peaks share."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

MIB = 2**20


def reset_peak() -> int:
    """Let the resident peak of this process start anew, and return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def read_growth(resident: int) -> float:
    """Return in MiB how far the resident peak has passed the bytes that :func:`reset_peak` returned."""
    return (_read_status("VmHWM") - resident) / MIB


def _read_status(key: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {key}")


def map_blocks_from(num_bytes: int) -> None:
    """Tell malloc to map blocks of this size and more, each by itself; they then leave VmRSS when they are freed.

    A block that malloc finds room for in its heap is not mapped, so a small limit must be set before the heap grows.
    """
    if platform.libc_ver()[0] != "glibc":
        raise RuntimeError("peak memory is measured with glibc's mallopt; this system has another C library")
    mmap_threshold, trim_threshold = -3, -1
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, num_bytes)
    libc.mallopt(trim_threshold, 2 * num_bytes)
