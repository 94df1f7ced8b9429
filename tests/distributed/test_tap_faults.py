"""A pipeline with taps in which a rank fails, is late or is killed: every rank ends with a named error, in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.tapped_pipelines import TappedPipeline
from helpers.traces import list_abandoned

from specco.distributed.pipeline import AttachedTaps, attach_taps
from specco.distributed.pipeline_order import read_order
from specco.distributed.taps import TapChannel, TapError, TapPlan
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize

PIPELINE_TIMEOUT_S = 4.0
TAP_TIMEOUT_S = 3.0


def build(transport: str, num_microbatches: int = 8) -> tuple[TappedPipeline, AttachedTaps]:
    ranks, timeout = list(range(dist.get_world_size())), timedelta(seconds=PIPELINE_TIMEOUT_S)
    pipeline = TappedPipeline("1F1B", dist.new_group(ranks, timeout=timeout), num_microbatches, is_static=True)
    plan = TapPlan.build(read_order(pipeline.schedule), pipeline.taps, max_rows=8)
    channel = TapChannel(plan, dist.new_group(ranks), dtype=torch.float64, transport=transport, timeout_s=TAP_TIMEOUT_S)
    return pipeline, attach_taps(pipeline.schedule, pipeline.stages, channel)


def act_at(pipeline: TappedPipeline, microbatch: int, action_fn) -> None:
    """Call ``action_fn`` in the forward of a microbatch, counted over all steps, of this rank's first stage."""
    count = 0

    def hook(module, args):
        nonlocal count
        count += 1
        if count == microbatch + 1:
            action_fn()

    next(iter(pipeline.models[0].layers.values())).register_forward_pre_hook(hook)


@instantiate_parametrized_tests
class TestPipelineFaults(GlooTestCase):
    """Four stages; stage 1 is the one with the fault."""

    world_size = 4

    def _fault(self, transport: str, action_fn) -> Exception:
        """Take steps until this rank's error; return it."""
        pipeline, attached = build(transport)
        if self.rank == 1:
            action_fn(pipeline, attached)
        start = time.monotonic()
        with self.assertRaises(Exception) as caught:
            for seed in range(3):
                pipeline.step(seed)
        self.assertLess(time.monotonic() - start, 8 * PIPELINE_TIMEOUT_S)
        dist.barrier()
        attached.channel.close()
        return caught.exception

    def _check_names(self, error: Exception, microbatch: int):
        self.assertIsInstance(error, TapError)
        self.assertEqual((error.stage, error.microbatch, error.rank), (1, microbatch, 1))
        self.assertRegex(str(error), f"source stage 1, microbatch {microbatch}, rank 1: ")

    @parametrize("transport", ["shm", "p2p"])
    def test_a_stage_whose_forward_raises(self, transport: str):
        def raise_at_six(pipeline: TappedPipeline, attached: AttachedTaps):
            def fail():
                raise FloatingPointError("a stage's own error")

            act_at(pipeline, 6, fail)

        error = self._fault(transport, raise_at_six)
        if self.rank == 1:
            self.assertIn("failed to run forward", str(error))  # torch's words around the stage's own error
            self.assertIsInstance(error.__cause__, FloatingPointError)
        else:
            self._check_names(error, 6)
            self.assertIn("the computation failed on rank 1", str(error))

    def test_a_stage_that_is_late(self):
        error = self._fault("shm", lambda pipeline, attached: act_at(pipeline, 6, lambda: time.sleep(7.0)))
        self.assertIsInstance(error, TapError)
        self.assertRegex(str(error), r"source stage \d, microbatch \d, rank \d: ")

    @parametrize("transport", ["shm", "p2p"])
    def test_taps_that_are_lost(self, transport: str):
        """The stage goes on, and its message of microbatch 5 never leaves."""

        def lose(pipeline: TappedPipeline, attached: AttachedTaps):
            sender = attached.channel._ends.senders[1]
            put = sender.put
            sender.put = lambda stamp, taps: put(stamp, taps) if stamp.microbatch < 5 else 0

        self._check_names(self._fault(transport, lose), 5)


def run_until_killed(rank: int, world_size: int, path: str, transport: str, killed: int, answer: Connection) -> None:
    """Run a pipeline in a child process; rank ``killed`` dies in microbatch 2 of its second step."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    pipeline, _ = build(transport)
    if rank == killed:
        act_at(pipeline, 10, lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for seed in range(3):
            pipeline.step(seed)
    except TapError as error:
        answer.send((error.stage, error.microbatch, error.rank, str(error)))
    else:
        answer.send("no error")
    answer.close()
    # without a farewell to a group that has lost a rank
    os._exit(0)


@pytest.mark.parametrize("killed", [0, 1, 3])
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_a_killed_rank(tmp_path: Path, transport: str, killed: int):
    """kill -9 of the first stage, a middle one, or the draft's: the others end by themselves, and nothing is left."""
    context, world_size = multiprocessing.get_context("fork"), 4
    before = set(os.listdir("/dev/shm"))
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=run_until_killed, args=(rank, world_size, str(tmp_path), transport, killed, pipes[rank][1])
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    answers = {}
    for rank, (receiver, sender) in enumerate(pipes):
        sender.close()
        if rank != killed:
            assert receiver.poll(120), f"rank {rank} hangs"
            answers[rank] = receiver.recv()
    for process in processes:
        process.join(30)
    assert processes[killed].exitcode == -signal.SIGKILL
    assert not list_abandoned(before)
    for rank, (stage, microbatch, source_rank, text) in answers.items():
        assert stage == source_rank and f"source stage {stage}, microbatch {microbatch}, rank {stage}: " in text, rank
    if killed < 3 and transport == "shm":
        assert {answer[:3] for answer in answers.values()} <= {(killed, m, killed) for m in (1, 2, 3)}, answers
