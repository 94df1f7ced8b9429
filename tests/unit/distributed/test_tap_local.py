"""The transport `local`: sources on the draft's own rank, by reference, with as many slots as the plan says."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.tap_streams import make_channel, make_outputs, make_plan

from specco.distributed.taps import TapError


@pytest.mark.parametrize(("name", "num_slots"), [("Interleaved1F1B", 1), ("LoopedBFS", 8)])
def test_random_microbatches_are_handed_over(name: str, num_slots: int) -> None:
    """1,000 microbatches of random rows; the source runs ahead of the draft by a random number of slots."""
    plan = make_plan(1, 8, name)
    channel, rng = make_channel(plan, None), random.Random(0)
    (link,), stage = channel.links, channel.links[0].source.stage
    assert (link.transport, link.num_slots) == ("local", num_slots)
    stream = [(step, microbatch) for step in range(125) for microbatch in plan.microbatches]
    sent, num_taken, most_ahead = [], 0, 0
    while num_taken < len(stream):
        is_full = len(sent) - num_taken == num_slots
        if len(sent) < len(stream) and not is_full and (len(sent) == num_taken or rng.random() < 0.6):
            sent.append(make_outputs(plan, stage, *stream[len(sent)]))
            channel.send(stage, stream[len(sent) - 1][1], sent[-1])
            most_ahead = max(most_ahead, len(sent) - num_taken)
            continue
        taps, outputs = channel.receive(stream[num_taken][1]), sent[num_taken]
        num_taken += 1
        for tap in plan.sources[0].taps:
            output = outputs[tap.name]
            rows = output[0] if isinstance(output, tuple) else output
            assert torch.equal(taps.rows[tap.name], rows[0])
            assert taps.rows[tap.name].data_ptr() == rows.data_ptr()
    assert most_ahead == num_slots
    assert channel.stats.num_messages == {stage: 1000} and channel.stats.num_bytes == {stage: 0}
    channel.check_step_end()
    channel.close()


def test_a_full_and_an_empty_queue_are_errors_at_once() -> None:
    plan = make_plan(1, 8, "LoopedBFS")
    channel = make_channel(plan, None)
    stage, num_slots = channel.links[0].source.stage, channel.links[0].num_slots
    for microbatch in range(num_slots):
        channel.send(stage, microbatch, make_outputs(plan, stage, 0, microbatch))
    # the eight microbatches of a step fill all slots; the next step's first has none
    with pytest.raises(TapError, match=rf"all {num_slots} slots are full"):
        channel.send(stage, 0, make_outputs(plan, stage, 1, 0))
    other = make_channel(plan, None)
    with pytest.raises(TapError, match="there is no message"):
        other.receive(0)
