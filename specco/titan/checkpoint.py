"""Checkpoints that are whole or not there: torch's distributed checkpoint in a folder that appears by one rename.

ROOT/step-00000010         whole
ROOT/step-00000020.part    being written, or left behind by a killed run; never read, removed by the next save
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PART_SUFFIX = ".part"


def save_checkpoint(root: str | Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write a checkpoint and drop the oldest whole ones. Collective: every rank must call.

    Args:
        root: folder of the run's checkpoints.
        step: of the state; a whole checkpoint of this step is replaced.
        state: names to ``Stateful`` objects or to what torch's distributed checkpoint takes.
        keep: number of whole checkpoints that stay.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: ``keep`` < 1.
        torch.distributed.checkpoint.api.CheckpointException: a rank could not write (a full disk), on every rank; the
            earlier checkpoints are as they were.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; allowed are integers >= 1")
    whole = Path(root) / f"step-{step:08d}"
    part = whole.with_name(whole.name + PART_SUFFIX)
    if dist.get_rank() == 0:
        for left_behind in Path(root).glob(f"step-*{PART_SUFFIX}"):
            shutil.rmtree(left_behind)
        part.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=part)
    dist.barrier()
    if dist.get_rank() == 0:
        if whole.exists():
            _remove(whole)
        os.replace(part, whole)
        for old in list_checkpoints(root)[:-keep]:
            _remove(old)
    dist.barrier()
    return whole


def list_checkpoints(root: str | Path) -> list[Path]:
    """Return the whole checkpoints under ``root``, oldest first."""
    return sorted(p for p in Path(root).glob("step-*") if p.name.removeprefix("step-").isdecimal())


def load_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Fill ``state`` from a checkpoint, in place. Collective: every rank must call.

    Raises:
        ValueError: no whole checkpoint at ``path``, or one that lacks part of the state.
    """
    if not (Path(path) / ".metadata").is_file():
        raise ValueError(f"{path} is no whole checkpoint: it has no .metadata")
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        raise ValueError(f"{path} does not hold the state that is asked for: {error}") from error


def _remove(whole: Path) -> None:
    """Remove a whole checkpoint; a kill half-way leaves a part, not a whole one with holes."""
    part = whole.with_name(whole.name + PART_SUFFIX)
    os.replace(whole, part)
    shutil.rmtree(part)
