"""TapChannel alone: taps arrive bit-equal over every transport, and every fault is a named error on every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from helpers.tap_streams import MAX_ROWS, make_channel, make_outputs, make_plan, take_step

from specco.distributed.taps import TapChannel, TapError
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize


def list_mailboxes() -> list[str]:
    """Return the shared-memory files that this process has open or mapped, and those with a name."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return sorted([f for f in fds if "specco" in f] + mapped) + sorted(
        n for n in os.listdir("/dev/shm") if "specco" in n
    )


def make_group() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


@instantiate_parametrized_tests
class StreamTests:
    """The tests themselves; the classes below set the number of ranks."""

    @parametrize("transport", ["shm", "p2p"])
    def test_random_microbatches_arrive_bit_equal(self, transport: str):
        """1,000 microbatches of random rows, random delays on all ranks; few and many slots."""
        plan, group = make_plan(self.world_size, 2 * self.world_size), make_group()
        for num_slots in (1, None):  # 1F1B needs one
            channel = make_channel(plan, group, transport=transport, num_slots=num_slots)
            num_steps = 500 // plan.num_microbatches
            equal = [take_step(channel, step, delay_s=2e-3) for step in range(num_steps)]
            self.assertEqual(equal, [True] * num_steps)
            self._check_counters(channel, num_steps)
            channel.close()

    def _check_counters(self, channel: TapChannel, num_steps: int):
        plan, stats = channel.plan, channel.stats
        for source in (s for s in plan.sources if s.rank == self.rank):
            num_bytes = 0
            for step in range(num_steps):
                for microbatch in plan.microbatches:
                    outputs = make_outputs(plan, source.stage, step, microbatch)
                    for output in outputs.values():
                        rows, extra = output if isinstance(output, tuple) else (output, None)
                        num_bytes += rows.nbytes + (extra.nbytes if extra is not None and microbatch == 0 else 0)
            self.assertEqual(stats.num_messages, {source.stage: num_steps * plan.num_microbatches})
            self.assertEqual(stats.num_bytes, {source.stage: num_bytes})
            self.assertGreater(stats.slot_wait_s[source.stage], 0)
        if self.rank == plan.draft_rank:
            keys = {(s.stage, m) for s in plan.sources for m in plan.microbatches}
            self.assertEqual(stats.slack_s.keys(), keys)
            self.assertEqual(stats.tap_wait_s.keys(), {s.stage for s in plan.sources})

    @parametrize("transport", ["shm", "p2p"])
    def test_several_stages_on_a_rank(self, transport: str):
        """Two sources that share a rank, and one on the draft's rank, by reference."""
        plan, group = make_plan(self.world_size, 4, "Interleaved1F1B"), make_group()
        channel = make_channel(plan, group, transport=transport)
        self.assertEqual([link.transport == "local" for link in channel.links], [s.is_local for s in plan.sources])
        self.assertEqual([take_step(channel, step, delay_s=1e-3) for step in range(50)], [True] * 50)
        channel.close()

    def test_auto_takes_shared_memory_here(self):
        channel = make_channel(make_plan(self.world_size, 4), make_group())
        self.assertEqual({link.transport for link in channel.links}, {"shm"})
        channel.close()

    @parametrize("transport", ["shm", "p2p"])
    def test_memory_does_not_grow(self, transport: str):
        """In 100 steps, by less than one message in 16 of those that this rank sends or takes."""
        before = list_mailboxes()
        plan, group = make_plan(self.world_size, 4, scale=64), make_group()
        channel = make_channel(plan, group, transport=transport)
        process, sizes = psutil.Process(), []
        for step in range(150):
            self.assertTrue(take_step(channel, step))
            if step in (49, 149):
                sizes.append(process.memory_info().rss)
        is_draft = self.rank == plan.draft_rank
        mine = [source for source in plan.sources if is_draft or source.rank == self.rank]
        half_full = sum(source.count_elements(MAX_ROWS // 2, False) * 8 for source in mine)
        self.assertLess(sizes[1] - sizes[0], 100 * plan.num_microbatches * half_full / 16)
        channel.close()
        del channel
        self.assertEqual(list_mailboxes(), before)

    def test_a_group_serves_a_second_channel_after_the_first_is_closed(self):
        plan, group = make_plan(self.world_size, 4), make_group()
        for transport in ("p2p", "shm", "p2p"):
            channel = make_channel(plan, group, transport=transport)
            self.assertTrue(take_step(channel, 0))
            channel.close()

    def test_two_channels_on_one_group(self):
        plan, group = make_plan(self.world_size, 4), make_group()
        channel = make_channel(plan, group)
        with self.assertRaisesRegex(ValueError, f"has a TapChannel on rank {self.rank}"):
            make_channel(plan, group)
        self.assertTrue(take_step(channel, 0))
        channel.close()

    def test_ranks_that_disagree(self):
        group = make_group()
        with self.assertRaisesRegex(ValueError, "the ranks disagree"):
            make_channel(make_plan(self.world_size, 4 + 2 * (self.rank == 0)), group)
        channel = make_channel(make_plan(self.world_size, 4), group)
        channel.close()

    def test_too_few_slots_and_transports_that_cannot_be(self):
        plan, group = make_plan(self.world_size, 4, "LoopedBFS"), make_group()
        few = r"num_slots is 3; with fewer than 4 .* source stage 0 \(rank 0\), its microbatch 3"
        with self.assertRaisesRegex(ValueError, few):
            make_channel(plan, group, num_slots=3)
        with self.assertRaisesRegex(ValueError, "transport is 'pigeon'"):
            make_channel(plan, group, transport="pigeon")
        with self.assertRaisesRegex(ValueError, "transport is 'cuda_ipc'; allowed .* are auto, p2p and shm"):
            make_channel(plan, group, transport="cuda_ipc")
        make_channel(plan, group).close()


class TestStreamsTwoRanks(StreamTests, GlooTestCase):
    world_size = 2


class TestStreamsFourRanks(StreamTests, GlooTestCase):
    world_size = 4


@instantiate_parametrized_tests
class TestFaults(GlooTestCase):
    """Rank 0 is the source, rank 1 the draft's; both end with the same names, well within their patience."""

    world_size = 2

    def _fault(self, transport: str, source_fn, draft_fn, microbatch: int, message: str) -> None:
        plan = make_plan(2, 4)
        channel = make_channel(plan, make_group(), transport=transport, timeout_s=2.0, num_slots=1)
        start = time.monotonic()
        with self.assertRaises(TapError) as caught:
            (source_fn, draft_fn)[self.rank](channel)
        self.assertLess(time.monotonic() - start, 20.0)
        error = caught.exception
        self.assertEqual((error.stage, error.microbatch, error.rank), (0, microbatch, 0))
        self.assertRegex(str(error), f"source stage 0, microbatch {microbatch}, rank 0: .*{message}")
        # broken for good, and closed without waiting
        with self.assertRaises(TapError):
            channel.receive(0) if self.rank else channel.send(0, 0, {})
        channel.close()
        dist.barrier()

    @staticmethod
    def _take_steps(channel: TapChannel) -> None:
        for step in range(3):
            take_step(channel, step)

    @parametrize("transport", ["shm", "p2p"])
    def test_a_source_that_is_late(self, transport: str):
        def be_late(channel: TapChannel):
            channel.send(0, 0, make_outputs(channel.plan, 0, 0, 0))
            time.sleep(3.0)
            for microbatch in (1, 2, 3):
                channel.send(0, microbatch, make_outputs(channel.plan, 0, 0, microbatch))

        # gloo's sends end when the draft's posted receives are used up
        self._fault(transport, be_late, self._take_steps, 1, "they have not come: .*imed out|waited 2 s for its taps")

    @parametrize("transport", ["shm", "p2p"])
    def test_a_draft_that_is_late(self, transport: str):
        def be_late(channel: TapChannel):
            channel.receive(0)
            time.sleep(3.5)
            channel.receive(1)
            channel.receive(2)
            channel.receive(3)

        # besides the source's one slot, the receives posted ahead hold one message, and the next one's stamp
        first_without_slot = 2 if transport == "shm" else 3
        self._fault(transport, self._take_steps, be_late, first_without_slot, "no slot for them")

    @parametrize("transport", ["shm", "p2p"])
    def test_a_wrong_stamp(self, transport: str):
        def skip(channel: TapChannel):
            channel._num_sent[0] = 1
            for place in range(1, 12):
                step, microbatch = divmod(place, channel.plan.num_microbatches)
                channel.send(0, microbatch, make_outputs(channel.plan, 0, step, microbatch))

        message = r"expected the stamp .* = \(0, 0, 0\), found \(0, 1, 0\)"
        self._fault(transport, skip, self._take_steps, 0, message)

    @parametrize("transport", ["shm", "p2p"])
    def test_more_rows_than_the_maximum(self, transport: str):
        def send_too_many(channel: TapChannel):
            rows = {tap.name: torch.zeros(MAX_ROWS + 1, tap.width).double() for tap in channel.plan.sources[0].taps}
            channel.send(0, 0, {name: (x, x[:1]) if name == "embedding" else x for name, x in rows.items()})

        self._fault(transport, send_too_many, self._take_steps, 0, "has 41 rows; the plan allows max_rows=40")

    @parametrize("transport", ["shm", "p2p"])
    def test_a_draft_that_skips_a_microbatch(self, transport: str):
        def skip(channel: TapChannel):
            channel.receive(0)
            channel.receive(2)

        self._fault(transport, self._take_steps, skip, 1, "the draft asks for microbatch 2 in its place")

    @parametrize("transport", ["shm", "p2p"])
    def test_a_draft_that_ends_its_step_early(self, transport: str):
        def end_early(channel: TapChannel):
            channel.receive(0)
            channel.check_step_end()

        self._fault(transport, self._take_steps, end_early, 1, "the step has ended before they were taken")

    @parametrize("transport", ["shm", "p2p"])
    def test_outputs_that_are_not_the_plans(self, transport: str):
        def send_wrong(channel: TapChannel):
            outputs = make_outputs(channel.plan, 0, 0, 0)
            channel.send(0, 0, outputs | {"layers.0": outputs["layers.0"].float()})

        self._fault(transport, send_wrong, self._take_steps, 0, "returned 5 columns of torch.float32")
