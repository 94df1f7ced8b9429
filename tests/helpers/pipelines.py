"""Schedules of torch.distributed.pipelining for tests: built from stand-in stages, without torch.distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from specco.distributed.pipeline_order import V_SCHEDULES


def list_stages(name: str, rank: int, num_ranks: int) -> list[int]:
    """Return the stages of a rank: one where the schedule takes one, else two."""
    if name in ("GPipe", "1F1B"):
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank if name in V_SCHEDULES else rank + num_ranks]


def build_schedule(name: str, stages: list[Any], num_microbatches: int, loss_fn: Any = None) -> Any:
    """Build a schedule by torch's name of it."""
    first = stages[0] if name in ("GPipe", "1F1B") else stages
    return get_schedule_class(name)(first, num_microbatches, loss_fn=loss_fn, scale_grads=False)


def build_stub_schedule(name: str, num_ranks: int, num_microbatches: int) -> Any:
    """Build the schedule that rank 0 would hold, from stages that can compute nothing."""
    stages = list_stages(name, 0, num_ranks)
    num_stages = num_ranks * len(stages)
    stubs = [
        SimpleNamespace(
            stage_index=i,
            num_stages=num_stages,
            group_rank=0,
            group_size=num_ranks,
            submod=nn.Identity(),
            is_first=i == 0,
            is_last=i == num_stages - 1,
        )
        for i in stages
    ]
    return build_schedule(name, stubs, num_microbatches)
