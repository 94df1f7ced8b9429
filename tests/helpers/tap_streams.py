"""Random taps over a TapChannel alone, without a pipeline: what is sent follows from the seed."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.pipelines import build_stub_schedule
from specco.distributed.pipeline_order import read_order
from specco.distributed.taps import Tap, TapChannel, TapPlan

MAX_ROWS = 40


def make_plan(num_ranks: int, num_microbatches: int, name: str = "1F1B", scale: int = 1) -> TapPlan:
    """Return a plan in which every stage but the last sends two taps, stage 0 the mask token's row as well.

    Args:
        num_ranks: of the pipeline.
        num_microbatches: of a step.
        name: of the schedule.
        scale: factor of all widths.
    """
    order = read_order(build_stub_schedule(name, num_ranks, num_microbatches))
    taps = [Tap("embedding", 0, 3 * scale, num_step_rows=1)]
    taps += [Tap(f"layers.{s}", s, (5 + s) * scale) for s in range(order.num_stages - 1)]
    taps += [Tap(f"layers.{s}.norm", s, 2 * scale) for s in range(1, order.num_stages - 1)]
    return TapPlan.build(order, taps, max_rows=MAX_ROWS)


def make_outputs(
    plan: TapPlan, stage: int, step: int, microbatch: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Return what the tapped modules of a stage return; all stages of a microbatch have equally many rows."""
    num_rows = random.Random(1000 * step + microbatch).randrange(1, MAX_ROWS + 1)
    generator = torch.Generator().manual_seed((step * 1000 + microbatch) * 100 + stage)
    source = plan.get_source(stage)
    assert source is not None
    outputs = {}
    for tap in source.taps:
        rows = torch.randn(1, num_rows, tap.width, generator=generator, dtype=torch.float64)
        step_rows = torch.randn(tap.num_step_rows, tap.width, generator=generator, dtype=torch.float64)
        rows, step_rows = rows.to(device), step_rows.to(device)
        outputs[tap.name] = (rows, step_rows) if tap.num_step_rows else rows
    return outputs


def make_channel(plan: TapPlan, group: dist.ProcessGroup | None, **options) -> TapChannel:
    return TapChannel(plan, group, dtype=torch.float64, **{"timeout_s": 20.0} | options)


def take_step(channel: TapChannel, step: int, delay_s: float = 0.0, device: torch.device | str = "cpu") -> bool:
    """Send or receive a step's microbatches in the order of GPipe's forwards; return whether all came bit-equal.

    Args:
        channel: of this rank.
        step: number of the step.
        delay_s: most that a rank sleeps before some of its microbatches, at random.
        device: of the taps.
    """
    plan, step_rows, received = channel.plan, {}, []
    rng = random.Random(7919 * step + channel.rank)
    for microbatch in plan.microbatches:
        if delay_s and rng.random() < 0.2:
            time.sleep(rng.random() * delay_s)
        for source in plan.sources:
            if source.rank == channel.rank:
                channel.send(source.stage, microbatch, make_outputs(plan, source.stage, step, microbatch, device))
        if channel.rank == plan.draft_rank:
            received.append((microbatch, channel.receive(microbatch)))
    channel.check_step_end()
    # compared at the end: what the draft holds must not change when slots are used again
    for microbatch, taps in received:
        for source in plan.sources:
            for name, output in make_outputs(plan, source.stage, step, microbatch, device).items():
                rows, extra = output if isinstance(output, tuple) else (output, None)
                if extra is not None and microbatch == plan.microbatches[0]:
                    step_rows[name] = extra
                if taps.rows[name].requires_grad or not torch.equal(taps.rows[name], rows[0]):
                    return False
        if taps.step_rows.keys() != step_rows.keys():
            return False
        if not all(torch.equal(taps.step_rows[name], extra) for name, extra in step_rows.items()):
            return False
    return True
