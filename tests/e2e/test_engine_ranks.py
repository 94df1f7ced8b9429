"""Two gloo ranks with an engine each, beside the process group of a learner."""

from __future__ import annotations

import gc
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.engine_models import make_draft, sample_stream, save_policy, train_policy

from specco.drafts.export import save_draft
from specco.rl.batch import RolloutBatch
from specco.rl.engine import Completion, EngineConfig, RolloutEngine, SamplingConfig
from specco.rl.environment import Trajectory
from specco.testing.distributed import GlooTestCase


def save_models(path: Path) -> EngineConfig:
    """Write untrained models, the same on every rank."""
    save_policy(train_policy(num_steps=0), path / "policy")
    if dist.get_rank() == 0:
        save_draft(make_draft(seed=1), path / "draft")
    dist.barrier()
    return EngineConfig(policy_path=str(path / "policy"), draft_path=str(path / "draft"), max_model_len=128)


def agree_on(value: object) -> list[object]:
    """Return every rank's value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def test_groups_of_vllm_go_with_its_last_engine(tmp_path):
    """Without a learner, vLLM makes a default group of one; it must not stay in the way of the next one."""
    config = EngineConfig(policy_path=save_policy(train_policy(num_steps=0), tmp_path), max_model_len=64)
    first, second = RolloutEngine(config), RolloutEngine(config)
    first.close()
    assert second.generate([[1, 2]], SamplingConfig(max_tokens=4))[0][0].token_ids
    second.close()
    assert not dist.is_initialized()


class TestEngineRanks(GlooTestCase):
    world_size = 2

    def assert_group_works(self) -> None:
        total = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(total)
        self.assertEqual(total.item(), 3.0)
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(total, group=group)
        self.assertEqual(total.item(), 6.0)
        dist.destroy_process_group(group)

    def test_engines_come_and_go_beside_the_learners_group(self):
        (directory, _) = agree_on(tempfile.mkdtemp() if self.rank == 0 else None)
        config = save_models(Path(str(directory)))
        torch.manual_seed(3)
        random.seed(3)
        expected = torch.rand(4), random.random()
        torch.manual_seed(3)
        random.seed(3)
        num_threads = torch.get_num_threads()
        engine = RolloutEngine(config)
        self.assertEqual((torch.rand(4), random.random()), expected)
        self.assertEqual(torch.get_num_threads(), num_threads)
        self.assert_group_works()

        # each rank its own prompts, and its own number of them: no collective is made in generate
        prompts = sample_stream(2 + 3 * self.rank, 8, seed=self.rank).tolist()
        sampling = SamplingConfig(n=2, max_tokens=16, seed=1)
        first = engine.generate(prompts, sampling)
        self.assertEqual(engine.generate(prompts, sampling), first)
        self.assertGreater(engine.stats().num_drafts, 0)
        tokens = agree_on([c.token_ids for group in first for c in group])
        self.assertEqual([len(t) for t in tokens], [4, 10])
        self.assertNotEqual(tokens[0], tokens[1][:4])

        engine.close()
        self.assert_group_works()
        again = RolloutEngine(config)
        self.assertEqual(again.generate(prompts, sampling), first)
        del again, engine  # forgotten, not closed
        gc.collect()
        self.assert_group_works()

    def test_batches_of_uneven_ranks_are_gathered(self):
        trajectories = []
        for index in range(2 * self.rank):  # rank 0 has none
            trajectory = Trajectory.start(group_id=7, sample_id=14 + index, prompt=[1] * (index + 1))
            trajectory.add_completion(Completion([2, 3], [-0.5, -1.5], "stop", [4, 4]))
            trajectory.reward = float(index)
            trajectories.append(trajectory)
        batch = RolloutBatch.from_trajectories(trajectories).gather()
        expected = {
            "input_ids": [[1, 2, 3, 0], [1, 1, 2, 3]],
            "response_mask": [[False, True, True, False], [False, False, True, True]],
            "inference_logprobs": [[0.0, -0.5, -1.5, 0.0], [0.0, 0.0, -0.5, -1.5]],
            "weight_versions": [[-1, 4, 4, -1], [-1, -1, 4, 4]],
            "lengths": [3, 4],
            "rewards": [0.0, 1.0],
            "sample_ids": [14, 15],
        }
        for name, values in expected.items():
            self.assertEqual(batch[name].tolist(), values)
