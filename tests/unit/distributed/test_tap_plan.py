"""TapPlan: what is sent, and both numbers of slots against a simulation of the schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.pipelines import build_stub_schedule

from specco.distributed.pipeline_order import SCHEDULES, Event, Kind, PipelineOrder, read_order, sort_events
from specco.distributed.taps import STAGE_INPUT, Tap, TapPlan

CASES = [
    (name, num_ranks, num_microbatches)
    for name in SCHEDULES
    for num_ranks, counts in {2: (4, 6, 10), 4: (8, 12), 8: (16,), 16: (32,)}.items()
    for num_microbatches in counts
]


def build_plan(order: PipelineOrder) -> TapPlan:
    return TapPlan.build(order, [Tap(f"layer{s}", s, 8) for s in range(order.num_stages - 1)], max_rows=4)


def run_as_far_as_possible(order: PipelineOrder, slots: dict[int, int], held: set[Event]) -> set[Event]:
    """Return the events that happen if those in ``held`` never end and a source waits for a free slot.

    Slots are counted here as they are used: put in at the end of a source's forward, free from the beginning of the
    draft stage's forward on.
    """
    draft_stage = order.num_stages - 1
    happened: set[Event] = set()
    num_sent, num_taken = dict.fromkeys(slots, 0), 0
    position = dict.fromkeys(order.events, 0)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, events in order.events.items():
            while position[rank] < len(events):
                event = events[position[rank]]
                is_forward = event.kind is Kind.FORWARD
                if event in held or not happened.issuperset(order.find_causes(event)):
                    break
                if is_forward and event.stage in slots and num_sent[event.stage] - num_taken >= slots[event.stage]:
                    break
                if is_forward and event.stage in slots:
                    num_sent[event.stage] += 1
                num_taken += is_forward and event.stage == draft_stage
                happened.add(event)
                position[rank] += 1
                is_moving = True
    return happened


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), CASES)
def test_slots_against_a_simulation(name: str, num_ranks: int, num_microbatches: int):
    order = read_order(build_stub_schedule(name, num_ranks, num_microbatches))
    plan = build_plan(order)
    everything = set(sort_events(order))
    assert len(everything) == sum(map(len, order.events.values()))
    least = {source.stage: source.least_slots for source in plan.sources}
    assert run_as_far_as_possible(order, least, set()) == everything
    for source in plan.sources:
        assert source.is_local == (order.stage_ranks[source.stage] == order.stage_ranks[order.num_stages - 1])
        assert 1 <= source.least_slots <= source.free_slots <= num_microbatches
    for source in plan.sources[:: max(1, len(plan.sources) // 4)]:
        if source.least_slots > 1:
            assert run_as_far_as_possible(order, {source.stage: source.least_slots - 1}, set()) != everything
        check_free_slots(order, plan, source.stage, source.free_slots)


def check_free_slots(order: PipelineOrder, plan: TapPlan, stage: int, free: int) -> None:
    """Let the draft stage be as slow as can be: hold one forward of it back for ever, and see what the source needs."""
    needed = 0
    for i, microbatch in enumerate(plan.microbatches):
        happened = run_as_far_as_possible(order, {}, {Event(Kind.FORWARD, plan.draft_stage, microbatch)})
        num_sent = sum(e.kind is Kind.FORWARD and e.stage == stage for e in happened)
        # i microbatches are taken out; the last one put in must still have found a slot
        needed = max(needed, num_sent - i)
    assert free == needed


def test_numbers_known_by_hand():
    """1F1B: stage s is at most S - s microbatches ahead. GPipe: all forwards come first."""
    plan = build_plan(read_order(build_stub_schedule("1F1B", 4, 8)))
    assert [(s.least_slots, s.free_slots) for s in plan.sources] == [(1, 4), (1, 3), (1, 2)]
    plan = build_plan(read_order(build_stub_schedule("GPipe", 2, 6)))
    assert [(s.least_slots, s.free_slots) for s in plan.sources] == [(1, 6)]
    # two rounds of two microbatches on stages 0 and 2 of rank 0: stage 2's first waits behind stage 0's second
    plan = build_plan(read_order(build_stub_schedule("Interleaved1F1B", 2, 4)))
    assert plan.sources[0].least_slots == 2
    # all microbatches of stage 0 run before any of stage 2 on the same rank
    plan = build_plan(read_order(build_stub_schedule("LoopedBFS", 2, 6)))
    assert [s.least_slots for s in plan.sources] == [6, 6, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_least_slots_suffice_without_backwards(name: str):
    order = read_order(build_stub_schedule(name, 4, 8))
    least = {source.stage: source.least_slots for source in build_plan(order).sources}
    forwards = {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.WAIT_SEND_F}
    events = {rank: tuple(e for e in listed if e.kind in forwards) for rank, listed in order.events.items()}
    evaluation = PipelineOrder(events, order.stage_ranks, order.num_microbatches)
    assert len(run_as_far_as_possible(evaluation, least, set())) == sum(map(len, events.values()))


def test_messages_of_a_source():
    """Several taps of a stage go together; the embedding has its own width, and its extra row goes out once a step."""
    order = read_order(build_stub_schedule("1F1B", 4, 8))
    taps = [Tap("tok_embeddings", 0, 16, num_step_rows=1), Tap("layers.1", 0, 64), Tap("layers.3", 1, 64)]
    plan = TapPlan.build(order, [*taps, Tap(STAGE_INPUT, 3, 64)], max_rows=32)
    assert [(source.stage, source.rank, source.taps) for source in plan.sources] == [
        (0, 0, tuple(taps[:2])),
        (1, 1, (taps[2],)),
    ]
    assert plan.has_input_tap and (plan.draft_stage, plan.draft_rank, plan.num_microbatches) == (3, 3, 8)
    assert plan.sources[0].count_elements(10, is_first=True) == 10 * (16 + 64) + 16
    assert plan.sources[0].count_elements(10, is_first=False) == 10 * (16 + 64)
    assert plan.get_source(1) is plan.sources[1] and plan.get_source(2) is None


@pytest.mark.parametrize(
    ("taps", "max_rows", "message"),
    [
        ([], 4, "taps is empty"),
        ([Tap("a", 0, 8)], 0, "max_rows is 0"),
        ([Tap("a", 3, 8)], 4, "before the draft's, 3"),
        ([Tap("a", -1, 8)], 4, "before the draft's, 3"),
        ([Tap("a", 0, 0)], 4, "must have width >= 1"),
        ([Tap("a", 0, 8), Tap("a", 0, 8)], 4, "has the name of another tap"),
        ([Tap(STAGE_INPUT, 2, 8)], 4, "must be on the last stage, 3"),
    ],
)
def test_impossible_taps_are_refused(taps: list[Tap], max_rows: int, message: str):
    order = read_order(build_stub_schedule("1F1B", 4, 8))
    with pytest.raises(ValueError, match=message):
        TapPlan.build(order, taps, max_rows=max_rows)


def test_orders_that_cannot_serve_are_refused():
    order = read_order(build_stub_schedule("GPipe", 2, 4))
    first, second = order.events[0], order.events[1]
    crossed = PipelineOrder({0: (first[2], first[3], *first[:2], *first[4:]), 1: second}, order.stage_ranks, 4)
    with pytest.raises(ValueError, match=r"stage 0 runs its forwards in the order \(1, 0, 2, 3\)"):
        build_plan(crossed)
    # the backward's gradient is awaited before the forward's output is sent
    stuck = PipelineOrder({0: (first[-3], *first[:-3], *first[-2:]), 1: second}, order.stage_ranks, 4)
    with pytest.raises(ValueError, match="cannot run to its end: rank 0 at B of stage 0, microbatch 2"):
        build_plan(stuck)
    with pytest.raises(ValueError, match="schedule is SimpleNamespace"):
        read_order(SimpleNamespace(_n_microbatches=2))
