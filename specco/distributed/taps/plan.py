"""TapPlan: which stage sends which layers' outputs to the draft, for each microbatch, and through how many slots.

The draft sits on the last stage D. With s a source stage and m a microbatch (1F1B, two stages, draft on stage 1):

    stage 0   F0 T0  F1 T1           B0  F2 T2  B1 ...      T: the taps of m are put into a slot, or wait for one
                 \\      \\                   \\
    stage 1       C0 F0  B0 C1 F1  B1         C2 F2 ...     C: the taps of m are taken out, which frees the slot

A wait at T(s, m) adds the edge C(m - k) -> T(s, m) to what the schedule orders already, k being the number of slots.

Note [Slots]. All T of a source happen in the order of the draft's C, so both numbers come from one pass over the
events, without timing:

- ``least_slots``: fewer close a circle: some T(s, i) happens before C(m) although i >= m + k. So the least is 1 + the
  largest i - m with T(s, i) before C(m). Sources do not disturb each other: in a circle through a and b, T(a, i) before
  C(j - k_b) and T(b, j) before C(i - k_a) give i - j + k_b < k_a and j - i + k_a < k_b, which contradict each other.
- ``free_slots``: with that many, C(m - k) has happened before T(s, m) in the schedule's own order, so no source waits,
  however fast or slow the stages are. So it is the largest m - (latest C before T(s, m)).

Evaluation drops the backwards. Fewer edges close no circle, but a source may then run ahead and wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specco.distributed.pipeline_order import Event, Kind, PipelineOrder, sort_events

STAGE_INPUT = "stage input"
"""Name of a tap that is the draft stage's own input: the output of the layer right before the stage boundary."""


@dataclass(frozen=True)
class Tap:
    """One tapped module.

    Args:
        name: of the module within its stage's model, as ``get_submodule`` takes it, different for each tap;
            ``STAGE_INPUT`` on the last stage.
        stage: that holds the module.
        width: columns of its output.
        num_step_rows: rows of its second output, ``[rows, width]``, which goes out once a step (the mask token's
            embedding); 0: the module has one output.
    """

    name: str
    stage: int
    width: int
    num_step_rows: int = 0


@dataclass(frozen=True)
class TapSource:
    """What one stage sends to the draft.

    Args:
        stage: of the tapped modules.
        rank: pipeline rank of the stage.
        taps: sent together, in this order, one message a microbatch.
        is_local: whether the draft is on the same rank, so that tensors are handed over by reference.
        least_slots: fewer deadlock.
        free_slots: with these no stage waits for a slot in training.
    """

    stage: int
    rank: int
    taps: tuple[Tap, ...]
    is_local: bool
    least_slots: int
    free_slots: int

    def count_elements(self, num_rows: int, is_first: bool) -> int:
        """Return the numbers in one message.

        Args:
            num_rows: token rows of the microbatch.
            is_first: whether it is the step's first, which carries the rows that go out once a step.
        """
        return sum((num_rows + is_first * tap.num_step_rows) * tap.width for tap in self.taps)


@dataclass(frozen=True)
class TapPlan:
    """What every stage sends to the draft stage; the same on every rank, computed without torch.distributed.

    Args:
        sources: stages that send, ascending.
        draft_stage: the last stage.
        draft_rank: its pipeline rank.
        microbatches: in the order in which the draft stage, and each source, runs their forwards.
        max_rows: most token rows of a microbatch.
        has_input_tap: whether ``STAGE_INPUT`` is tapped.
    """

    sources: tuple[TapSource, ...]
    draft_stage: int
    draft_rank: int
    microbatches: tuple[int, ...]
    max_rows: int
    has_input_tap: bool

    @classmethod
    def build(cls, order: PipelineOrder, taps: Sequence[Tap], *, max_rows: int) -> TapPlan:
        """Compute the plan.

        Args:
            order: what each rank does; see ``read_order``.
            taps: all tapped modules but those that the draft's own stage hands to the draft by itself.
            max_rows: most token rows of a microbatch.

        Raises:
            ValueError: taps that this pipeline cannot have, or an order that cannot run, or under which a source and
                the draft see the microbatches in different orders.
        """
        draft_stage = order.num_stages - 1
        _check_taps(taps, order, max_rows)
        sent = [tap for tap in taps if tap.name != STAGE_INPUT]
        stages = sorted({tap.stage for tap in sent})
        microbatches = order.list_forwards(draft_stage)
        for stage in stages:
            if order.list_forwards(stage) != microbatches:
                raise ValueError(
                    f"stage {stage} runs its forwards in the order {order.list_forwards(stage)}, the draft's stage "
                    f"{draft_stage} in the order {microbatches}; the two must be equal"
                )
        slots = _count_slots(order, stages, microbatches)
        draft_rank = order.stage_ranks[draft_stage]
        sources = tuple(
            TapSource(
                stage=stage,
                rank=order.stage_ranks[stage],
                taps=tuple(tap for tap in sent if tap.stage == stage),
                is_local=order.stage_ranks[stage] == draft_rank,
                least_slots=slots[stage][0],
                free_slots=slots[stage][1],
            )
            for stage in stages
        )
        return cls(sources, draft_stage, draft_rank, microbatches, max_rows, len(sent) < len(taps))

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    def get_source(self, stage: int) -> TapSource | None:
        """Return what a stage sends; None: nothing."""
        return next((source for source in self.sources if source.stage == stage), None)


def _check_taps(taps: Sequence[Tap], order: PipelineOrder, max_rows: int) -> None:
    draft_stage = order.num_stages - 1
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; allowed is >= 1")
    if not taps:
        raise ValueError("taps is empty; a plan needs at least one tap")
    seen = set()
    for tap in taps:
        if tap.name == STAGE_INPUT and (tap.stage != draft_stage or draft_stage == 0 or tap.num_step_rows):
            raise ValueError(f"{tap} must be on the last stage, {draft_stage}, of several, without num_step_rows")
        if tap.name != STAGE_INPUT and not 0 <= tap.stage < draft_stage:
            raise ValueError(f"{tap} must be on a stage before the draft's, {draft_stage}, which keeps its own taps")
        if tap.width < 1 or tap.num_step_rows < 0:
            raise ValueError(f"{tap} must have width >= 1 and num_step_rows >= 0")
        if tap.name in seen:
            raise ValueError(f"{tap} has the name of another tap")
        seen.add(tap.name)


def _count_slots(
    order: PipelineOrder, stages: Sequence[int], microbatches: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Return (least, free) slots of each source stage; see Note [Slots]."""
    place = {microbatch: i for i, microbatch in enumerate(microbatches)}
    columns = {stage: column for column, stage in enumerate([*stages, order.num_stages - 1])}
    # of each event, the latest forward of each source and, last, of the draft stage that is not after it
    latest: dict[Event, list[int]] = {}
    least, free = dict.fromkeys(stages, 1), dict.fromkeys(stages, 1)
    before = {rank: [-1] * len(columns) for rank in order.events}
    for event in sort_events(order):
        rank = order.stage_ranks[event.stage]
        seen = [
            max(values) for values in zip(before[rank], *(latest[c] for c in order.find_causes(event)), strict=True)
        ]
        if event.kind is Kind.FORWARD and event.stage in columns:
            i = place[event.microbatch]
            if event.stage in free:
                free[event.stage] = max(free[event.stage], i - seen[-1])
            else:
                least = {stage: max(least[stage], 1 + seen[columns[stage]] - i) for stage in stages}
            seen[columns[event.stage]] = max(seen[columns[event.stage]], i)
        latest[event] = before[rank] = seen
    return {stage: (least[stage], free[stage]) for stage in stages}
