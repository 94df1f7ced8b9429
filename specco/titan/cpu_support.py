"""Let torchtitan run on a machine without an accelerator: three patches, applied by one explicit call of ``apply``.

Each was needed and checked with the versions of ``CHECKED_VERSIONS``; on a machine with an accelerator nothing is done.

1. torchtitan takes "cuda" for its device when it finds none, when ``torchtitan.tools.utils`` is imported, and three
   other modules copy the two names from there. Both names are replaced wherever torchtitan has bound them, so that
   the order of imports does not matter.
2. torchtitan's metrics ask the device module for a name, a capacity and memory statistics, and its time-outs pass an
   integer ``current_device()`` to a barrier; ``torch.cpu`` has none of these. ``CpuDeviceModule`` adds them and leaves
   ``torch.cpu`` itself as it is.
3. torchtitan calls ``torch.distributed.set_timeout``, which torch 2.13 does not have yet. The same function is there
   under its older, private name.

Not a patch: FSDP2 asks gloo for a reduction that gloo lacks until ``set_force_sum_reduction_for_comms(True)`` is called
on every FSDP module; ``parallelize_policy`` does so where it wraps the model.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CHECKED_VERSIONS = {"torch": "2.13.0", "torchtitan": "0.3.0"}

logger = logging.getLogger(__name__)


class CpuDeviceModule:
    """``torch.cpu`` with the functions that torchtitan expects of a device module; there is one device, index 0."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        return platform.processor() or platform.machine()

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        """Return an object whose ``total_memory`` is the machine's memory, in bytes."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        """Return no statistics: torch keeps none for the CPU, and torchtitan takes absent ones as unknown."""
        return {}

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | None = None) -> None:
        """Do nothing: there are no statistics to reset."""

    @staticmethod
    def empty_cache() -> None:
        """Do nothing: the CPU allocator keeps no cache."""


def apply() -> bool:
    """Apply the patches when this machine has no accelerator; call it before torchtitan's trainer is built.

    Calling it again, before or after further imports of torchtitan, is harmless.

    Returns:
        Whether this machine needs the patches (True: they are in place).
    """
    if torch.accelerator.is_available():
        return False
    for package, checked in CHECKED_VERSIONS.items():
        found = version(package).split("+")[0]
        if found != checked:
            logger.warning("CPU support was checked with %s %s; this is %s", package, checked, found)

    import torchtitan.tools.utils as titan_utils

    stand_ins = {"device_type": "cpu", "device_module": CpuDeviceModule()}
    if isinstance(titan_utils.device_module, CpuDeviceModule):
        stand_ins["device_module"] = titan_utils.device_module
    for module_name, module in list(sys.modules.items()):
        for name, value in stand_ins.items():
            if module_name.startswith("torchtitan.") and name in vars(module):
                setattr(module, name, value)

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # pyrefly: ignore[missing-attribute]
    return True
