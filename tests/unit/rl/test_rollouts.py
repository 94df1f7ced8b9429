"""Trajectories, their batch and its packing, with an engine that is a table."""

from __future__ import annotations

import pytest
import torch

from specco.rl.batch import RolloutBatch
from specco.rl.engine import Completion, SamplingConfig
from specco.rl.environment import Trajectory, collect_rollouts


class FakeEngine:
    """Writes ``[last token + 1, seed-free sample number]`` and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], SamplingConfig]] = []

    def generate(self, prompts, sampling):
        self.calls.append(([list(p) for p in prompts], sampling))
        version = len(self.calls)
        return [
            [Completion([p[-1] + 1, 50 + j], [-0.5, -0.25], "stop", [version] * 2) for j in range(sampling.n)]
            for p in prompts
        ]


class CountingTask:
    """Prompt g is g + 1 tokens long; sample 1 of a prompt is asked back once; the reward is the number of tokens."""

    def make_prompt(self, group_id):
        return [10 * group_id] * (group_id + 1)

    def answer_turn(self, trajectory):
        is_asked = trajectory.sample_id % 2 == 1 and len(trajectory.response_ids) == 2
        return [90, 91] if is_asked else None

    def score(self, trajectory):
        return float(len(trajectory.token_ids))


@pytest.fixture
def rollouts() -> list[Trajectory]:
    return collect_rollouts(FakeEngine(), CountingTask(), [1, 3], SamplingConfig(n=2, seed=5))


class TestCollectRollouts:
    def test_turns_and_masks(self, rollouts):
        assert [t.sample_id for t in rollouts] == [2, 3, 6, 7]
        assert [t.group_id for t in rollouts] == [1, 1, 3, 3]
        assert rollouts[0].token_ids == [10, 10, 11, 50]
        assert rollouts[1].token_ids == [10, 10, 11, 51, 90, 91, 92, 50]
        assert rollouts[1].response_mask == [False, False, True, True, False, False, True, True]
        assert rollouts[1].weight_versions == [-1, -1, 1, 1, -1, -1, 2, 2]
        assert rollouts[1].inference_logprobs == [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.5, -0.25]
        assert [t.reward for t in rollouts] == [4.0, 8.0, 6.0, 10.0]

    def test_later_turns_go_on_alone_with_other_noise(self):
        engine = FakeEngine()
        collect_rollouts(engine, CountingTask(), [1, 3], SamplingConfig(n=2, seed=5))
        (_, first), (prompts, second) = engine.calls
        assert prompts == [[10, 10, 11, 51, 90, 91], [30, 30, 30, 30, 31, 51, 90, 91]]
        assert (first.n, second.n) == (2, 1)
        assert first.seed != second.seed


class TestRolloutBatch:
    def test_columns(self, rollouts):
        batch = RolloutBatch.from_trajectories(rollouts)
        assert batch["input_ids"].shape == (4, 10)
        assert batch["lengths"].tolist() == [4, 8, 6, 10]
        assert batch["input_ids"][0].tolist() == [10, 10, 11, 50, 0, 0, 0, 0, 0, 0]
        assert batch["prompt_mask"].sum(1).tolist() == [2, 2, 4, 4]
        assert batch["response_mask"].sum(1).tolist() == [2, 4, 2, 4]
        assert batch["weight_versions"][0].tolist() == [-1, -1, 1, 1] + [-1] * 6
        is_real = torch.arange(10)[None] < batch["lengths"][:, None]
        assert not (batch["response_mask"] & ~is_real).any()
        assert torch.equal(batch["inference_logprobs"] != 0, batch["response_mask"])

    def test_take_drops_padding_nobody_needs(self, rollouts):
        batch = RolloutBatch.from_trajectories(rollouts).take(torch.tensor([2, 0]))
        assert batch["input_ids"].shape == (2, 6)
        assert batch["sample_ids"].tolist() == [6, 2]

    def test_pack_keeps_values_with_their_tokens(self, rollouts):
        batch = RolloutBatch.from_trajectories(rollouts)
        advantages = torch.tensor([1.0, 2.0, 3.0, 4.0])
        column = torch.arange(40.0).view(4, 10)
        packed = batch.pack(12, {"advantages": advantages, "old_logprobs": column})
        assert [p.sample_ids.tolist() for p in packed] == [[2, 3], [6], [7]]
        assert [p.num_tokens for p in packed] == [12, 6, 10]
        assert packed[0].input_ids.tolist() == rollouts[0].token_ids + rollouts[1].token_ids
        assert packed[0].loss_mask.tolist() == rollouts[0].response_mask + rollouts[1].response_mask
        assert packed[0].row_values["advantages"].tolist() == [1.0] * 4 + [2.0] * 8
        assert packed[0].row_values["old_logprobs"].tolist() == [*range(4), *range(10, 18)]
        expected = rollouts[0].inference_logprobs + rollouts[1].inference_logprobs
        assert packed[0].row_values["inference_logprobs"].tolist() == expected

    def test_pack_refuses_values_of_other_shapes(self, rollouts):
        batch = RolloutBatch.from_trajectories(rollouts)
        with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
            batch.pack(12, {"advantages": torch.zeros(3)})

    def test_empty(self):
        batch = RolloutBatch.from_trajectories([])
        assert len(batch) == 0
        assert batch.pack(8, {"advantages": torch.zeros(0)}) == []
