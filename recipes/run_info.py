"""What a run was: its configuration, versions and machine, in ``run.json`` beside its metrics."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specco.rl.vllm_mends import get_vllm_version


def write_run_info(folder: str | Path, config: dict[str, Any], *, num_ranks: int, first_step: int) -> None:
    """Write ``run.json``; on one rank only. A run that resumes writes it anew, with the step after which it goes on.

    Args:
        folder: of the run.
        config: every field, as ``Configurable.Config.to_dict`` gives it; ``arm`` and ``seed`` are among them.
        num_ranks: of the job.
        first_step: the step that the run starts after; 0 for one from the start.
    """
    info = {
        "config": config,
        "arm": config["arm"],
        "seed": config["seed"],
        "first_step": first_step,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": read_versions(),
        "machine": read_machine() | {"ranks": num_ranks},
    }
    path = Path(folder) / "run.json"
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(info, indent=2) + "\n")
    os.replace(part, path)


def read_versions() -> dict[str, str]:
    """Return the versions of what decides a run's numbers."""
    versions = {name: metadata.version(name) for name in ("specco", "torch", "torchtitan")}
    return versions | {"vllm": get_vllm_version(), "python": platform.python_version()}


def read_machine() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, its OpenMP threads and its GPU, if there is one."""
    machine = {
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "omp_threads": torch.get_num_threads(),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _read_cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
