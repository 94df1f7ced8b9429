"""What every rank of a pipeline does, in which order, and what each action waits for: read off a torch schedule.

torch keeps the order of multi-stage schedules as lists of actions. GPipe and 1F1B run loops of their own, and the list
that torch keeps for 1F1B numbers the last stage's forwards from 1, so these two are written out here as they run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose ranks have two stages each, the first rank the first and the last one."""

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SCHEDULES)
"""Schedules of torch whose order is known here, by torch's names."""


class Kind(str, Enum):
    """What an event is. Receives are waited for by the computation that needs them; sends by ``WAIT`` or not at all."""

    FORWARD = "F"
    BACKWARD = "B"
    """Of a stage's inputs; the weights' own part neither waits for anything nor is waited for."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"


class Event(NamedTuple):
    """One action of one rank: a computation, a posted exchange, or a wait for a send to be taken."""

    kind: Kind
    stage: int
    microbatch: int


_KIND_OF_ACTION = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD,
    "SEND_F": Kind.SEND_F,
    "RECV_F": Kind.RECV_F,
    "SEND_B": Kind.SEND_B,
    "RECV_B": Kind.RECV_B,
}


@dataclass(frozen=True)
class PipelineOrder:
    """The events of every rank in program order.

    Args:
        events: by pipeline rank.
        stage_ranks: pipeline rank of each stage.
        num_microbatches: of one ``step()``.
    """

    events: dict[int, tuple[Event, ...]]
    stage_ranks: dict[int, int]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    def list_forwards(self, stage: int) -> tuple[int, ...]:
        """Return the microbatches of a stage in the order of its forwards."""
        events = self.events[self.stage_ranks[stage]]
        return tuple(e.microbatch for e in events if e.kind is Kind.FORWARD and e.stage == stage)

    def find_causes(self, event: Event) -> list[Event]:
        """Return the events of other stages that must have happened before ``event`` can be over."""
        kind, stage, microbatch = event
        if kind is Kind.FORWARD and stage > 0:
            is_local = self.stage_ranks[stage - 1] == self.stage_ranks[stage]
            return [Event(Kind.FORWARD if is_local else Kind.SEND_F, stage - 1, microbatch)]
        if kind is Kind.BACKWARD and stage < self.num_stages - 1:
            is_local = self.stage_ranks[stage + 1] == self.stage_ranks[stage]
            return [Event(Kind.BACKWARD if is_local else Kind.SEND_B, stage + 1, microbatch)]
        if kind is Kind.WAIT_SEND_F:
            return [Event(Kind.RECV_F, stage + 1, microbatch)]
        if kind is Kind.WAIT_SEND_B:
            return [Event(Kind.RECV_B, stage - 1, microbatch)]
        return []


def read_order(schedule: Any) -> PipelineOrder:
    """Read the order off a schedule of ``torch.distributed.pipelining``, without any collective.

    Args:
        schedule: GPipe, 1F1B, or one that torch runs from a list of actions (Interleaved1F1B, LoopedBFS,
            InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or one loaded from a file).

    Raises:
        ValueError: a schedule whose order cannot be read.
    """
    num_microbatches = schedule._n_microbatches
    if isinstance(schedule, ScheduleGPipe | Schedule1F1B):
        num_stages = schedule._num_stages
        write = _write_gpipe if isinstance(schedule, ScheduleGPipe) else _write_1f1b
        events = {rank: write(rank, num_stages, num_microbatches) for rank in range(num_stages)}
        return PipelineOrder(events, {stage: stage for stage in range(num_stages)}, num_microbatches)
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if not actions:
        raise ValueError(
            f"schedule is {type(schedule).__name__}; allowed are GPipe, 1F1B and schedules that torch runs from a list "
            "of actions"
        )
    events = {rank: tuple(_flatten(actions[rank])) for rank in actions}
    return PipelineOrder(events, dict(schedule.stage_index_to_group_rank), num_microbatches)


def _flatten(actions: Sequence[Any]) -> list[Event]:
    events = []
    for action in actions:
        for part in action.sub_actions or (action,):
            kind = _KIND_OF_ACTION.get(part.computation_type.value)
            if kind is not None:
                events.append(Event(kind, part.stage_index, part.microbatch_index))
    return events


class _StageWriter:
    """Writes the events of a stage that has a rank of its own."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.has_previous, self.has_next = stage > 0, stage < num_stages - 1
        self.events: list[Event] = []

    def add(self, kind: Kind, microbatch: int) -> None:
        needs_previous = kind in (Kind.RECV_F, Kind.SEND_B, Kind.WAIT_SEND_B)
        needs_next = kind in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_SEND_F)
        if (self.has_previous or not needs_previous) and (self.has_next or not needs_next):
            self.events.append(Event(kind, self.stage, microbatch))


def _write_gpipe(stage: int, num_stages: int, num_microbatches: int) -> tuple[Event, ...]:
    writer = _StageWriter(stage, num_stages)
    phases = [
        (Kind.RECV_F, Kind.FORWARD, Kind.SEND_F, Kind.WAIT_SEND_F),
        (Kind.RECV_B, Kind.BACKWARD, Kind.SEND_B, Kind.WAIT_SEND_B),
    ]
    for receive, compute, send, wait in phases:
        for microbatch in range(num_microbatches):
            for kind in (receive, compute, send):
                writer.add(kind, microbatch)
        for microbatch in range(num_microbatches):
            writer.add(wait, microbatch)
    return tuple(writer.events)


def _write_1f1b(stage: int, num_stages: int, num_microbatches: int) -> tuple[Event, ...]:
    """Write the loop of 1F1B: forwards to fill the pipeline, then one backward and one forward in turn.

    A forward's send is posted together with the receive of the next backward, a backward's together with the receive
    of the next forward, and both of a pair are waited for.
    """
    writer = _StageWriter(stage, num_stages)
    add, num_warmup = writer.add, min(num_microbatches, num_stages - stage)
    for forward in range(num_warmup):
        add(Kind.RECV_F, forward)
        add(Kind.FORWARD, forward)
        if forward > 0:
            add(Kind.WAIT_SEND_F, forward - 1)
        if forward < num_warmup - 1:
            add(Kind.SEND_F, forward)
    forward = num_warmup
    for backward in range(num_microbatches):
        has_pending_forward = forward - 1 == backward + num_warmup - 1
        if has_pending_forward:
            add(Kind.SEND_F, forward - 1)
        add(Kind.RECV_B, backward)
        if has_pending_forward:
            add(Kind.WAIT_SEND_F, forward - 1)
        add(Kind.BACKWARD, backward)
        if backward > num_microbatches - num_warmup:
            add(Kind.WAIT_SEND_B, backward - 1)
        add(Kind.SEND_B, backward)
        if forward < num_microbatches:
            add(Kind.RECV_F, forward)
            add(Kind.WAIT_SEND_B, backward)
            add(Kind.FORWARD, forward)
            forward += 1
    add(Kind.WAIT_SEND_B, num_microbatches - 1)
    return tuple(writer.events)


def sort_events(order: PipelineOrder) -> list[Event]:
    """Return all events, each after its causes.

    Raises:
        ValueError: the order cannot run to its end; names the event at which each rank stops.
    """
    waiting: dict[Event, list[int]] = defaultdict(list)
    position = dict.fromkeys(order.events, 0)
    done: set[Event] = set()
    result: list[Event] = []
    ready = list(order.events)
    while ready:
        rank = ready.pop()
        events = order.events[rank]
        while position[rank] < len(events):
            event = events[position[rank]]
            missing = next((cause for cause in order.find_causes(event) if cause not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add(event)
            result.append(event)
            position[rank] += 1
            ready.extend(waiting.pop(event, []))
    stuck = {rank: events[position[rank]] for rank, events in order.events.items() if position[rank] < len(events)}
    if stuck:
        where = ", ".join(
            f"rank {r} at {e.kind.value} of stage {e.stage}, microbatch {e.microbatch}" for r, e in stuck.items()
        )
        raise ValueError(f"the order cannot run to its end: {where}")
    return result
