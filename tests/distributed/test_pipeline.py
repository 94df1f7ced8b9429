"""Taps attached to every schedule: the schedule untouched, the draft's gradients those of the unpipelined model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.tapped_pipelines import P2PRecorder, TappedPipeline, run_unpipelined

from specco.distributed.pipeline import attach_taps
from specco.distributed.pipeline_order import SCHEDULES, Kind, read_order
from specco.distributed.taps import TapChannel, TapPlan
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize
from specco.testing.tolerances import STEP_FLOAT64, relative_error

WAITS = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)


@instantiate_parametrized_tests
class PipelineTests:
    """The tests themselves; the classes below set the number of ranks."""

    def _group(self) -> dist.ProcessGroup:
        return dist.new_group(list(range(self.world_size)))

    def _attach(self, pipeline: TappedPipeline, **options):
        plan = TapPlan.build(read_order(pipeline.schedule), pipeline.taps, max_rows=8)
        channel = TapChannel(plan, self._group(), dtype=torch.float64, timeout_s=30, **options)
        return attach_taps(pipeline.schedule, pipeline.stages, channel)

    def _run(self, name: str, has_taps: bool, **options):
        """Take two steps, gradients adding up; return all that the pipeline did."""
        group = self._group()
        num_microbatches = 2 * self.world_size + (name == "GPipe")
        with P2PRecorder(group) as recorder:
            pipeline = TappedPipeline(name, group, num_microbatches, **options)
            attached = self._attach(pipeline) if has_taps else None
            for seed in (0, 1):
                pipeline.step(seed)
        if attached is not None:
            attached.channel.close()
        return pipeline, recorder.calls, attached

    @parametrize("name", SCHEDULES)
    def test_schedule_is_untouched_and_the_draft_learns_as_unpipelined(self, name: str):
        is_static = name == "1F1B"
        plain, plain_calls, _ = self._run(name, has_taps=False, is_static=is_static)
        tapped, calls, attached = self._run(name, has_taps=True, is_static=is_static)
        # the very order that the plan was computed from
        order = read_order(plain.schedule)
        events = [e for e in order.events[self.rank] if e.kind not in WAITS]
        self.assertEqual(plain.log, 2 * events)
        self.assertEqual(tapped.log, plain.log)
        self.assertEqual(calls, plain_calls)
        self.assertGreater(len(calls), 4 * plain.num_microbatches)
        grads, plain_grads = tapped.get_grads(), plain.get_grads()
        for key, grad in plain_grads.items():
            self.assertTrue(torch.equal(grads[key], grad), key)
        expected, expected_losses = run_unpipelined(tapped, [0, 1])
        own = {key for model in tapped.models for key, _ in model.named_parameters()}
        self.assertEqual(own, grads.keys())
        for key, grad in grads.items():
            self.assertLessEqual(relative_error(grad, expected[key]), STEP_FLOAT64, key)
        if tapped.stages[-1].is_last:
            self.assertEqual(tapped.models[-1].num_draft_runs, 2 * tapped.num_microbatches)
            self._check_losses(tapped, plain, expected_losses, attached.channel.plan.microbatches)
        self._check_bytes(attached.channel, num_steps=2)

    def test_evaluation_and_recomputed_activations(self):
        """Evaluation between steps gets its taps too; a recomputed layer sends nothing."""
        num_microbatches = 2 * self.world_size
        pipeline = TappedPipeline("1F1B", self._group(), num_microbatches, is_checkpointed=True)
        attached = self._attach(pipeline, num_slots=1)
        pipeline.step(0)
        pipeline.step(1)
        pipeline.evaluate(5)
        pipeline.step(2)
        self._check_bytes(attached.channel, num_steps=4)
        expected, _ = run_unpipelined(pipeline, [0, 1, 2])
        for key, grad in pipeline.get_grads().items():
            self.assertLessEqual(relative_error(grad, expected[key]), STEP_FLOAT64, key)
        if pipeline.stages[-1].is_last:
            self.assertEqual(pipeline.models[-1].num_draft_runs, 4 * num_microbatches)
            # what was taken in the first step is still what it was, though the second received into the same buffers
            self.assertTrue(all(torch.equal(rows, copy) for rows, copy in pipeline.models[-1].kept))
            self.assertEqual(len(pipeline.models[-1].kept), len(pipeline.taps))
        attached.remove()
        pipeline.step(3)
        self._check_bytes(attached.channel, num_steps=4)
        attached.channel.close()

    def test_what_does_not_fit_is_refused(self):
        group = self._group()
        pipeline = TappedPipeline("1F1B", group, 2 * self.world_size)
        plan = TapPlan.build(read_order(pipeline.schedule), pipeline.taps, max_rows=8)
        channel = TapChannel(plan, group, dtype=torch.float64)
        with self.assertRaisesRegex(ValueError, "group of the channel is the pipeline's"):
            attach_taps(pipeline.schedule, pipeline.stages, channel)
        other = TappedPipeline("1F1B", self._group(), 3 * self.world_size)
        with self.assertRaisesRegex(ValueError, f"schedule has {3 * self.world_size} microbatches; the plan"):
            attach_taps(other.schedule, other.stages, channel)
        channel.close()

    def _check_losses(self, tapped: TappedPipeline, plain: TappedPipeline, expected, microbatches: tuple[int, ...]):
        """The policy's are those without taps to the bit, the draft's those of the unpipelined model."""
        order = [step * len(microbatches) + m for step in (0, 1) for m in microbatches]
        # torch's shape inference computes a loss as well, before the first step
        losses, plain_losses = tapped.losses[-len(order) :], plain.losses[-len(order) :]
        for i, (policy, draft), (plain_policy, _) in zip(order, losses, plain_losses, strict=True):
            self.assertTrue(torch.equal(policy, plain_policy))
            self.assertLessEqual(relative_error(draft, expected[i][1]), STEP_FLOAT64)

    def _check_bytes(self, channel: TapChannel, num_steps: int):
        rows = 5
        for source in channel.plan.sources:
            if source.rank == self.rank:
                width = sum(tap.width for tap in source.taps)
                extra = sum(tap.width * tap.num_step_rows for tap in source.taps)
                count = num_steps * channel.plan.num_microbatches
                num_bytes = 8 * (rows * width * count + extra * num_steps)
                self.assertEqual(channel.stats.num_messages[source.stage], count)
                self.assertEqual(channel.stats.num_bytes[source.stage], 0 if source.is_local else num_bytes)


class TestPipelineTwoRanks(PipelineTests, GlooTestCase):
    world_size = 2


class TestPipelineFourRanks(PipelineTests, GlooTestCase):
    world_size = 4
