"""GRPO by hand: advantages of small groups, clipped losses and their gradients, the KL term, the corrections."""

from __future__ import annotations

import math

import pytest
import torch

from specco.rl.grpo import GrpoLoss, compute_advantages, summarize_rewards


class TestAdvantages:
    def test_groups_are_compared_within_themselves(self):
        rewards = torch.tensor([1.0, 10.0, 0.0, 20.0, 1.0, 0.0])
        group_ids = torch.tensor([7, 3, 7, 3, 7, 7])
        # group 7: 1, 0, 1, 0 -> mean 1/2, std 1/2; group 3: 10, 20 -> mean 15, std 5
        assert compute_advantages(rewards, group_ids).tolist() == [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
        plain = compute_advantages(rewards, group_ids, normalize_std=False)
        assert plain.tolist() == [0.5, -5.0, -0.5, 5.0, 0.5, -0.5]

    def test_uneven_group(self):
        # mean 1/3, population variance (1/9 + 1/9 + 4/9) / 3 = 2/9
        expected = [-1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)]
        advantages = compute_advantages(torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64))
        torch.testing.assert_close(advantages, torch.tensor(expected), rtol=0, atol=1e-7)

    def test_group_without_spread_gets_zeros(self):
        rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0])  # the mean of three 0.1 is not exactly 0.1
        group_ids = torch.tensor([0, 0, 0, 1, 2])
        assert compute_advantages(rewards, group_ids).tolist() == [0.0] * 5
        assert compute_advantages(rewards, group_ids, normalize_std=False).tolist() == [0.0] * 5
        pairs = summarize_rewards(rewards, group_ids)
        assert pairs["groups_without_spread"].tolist() == [3.0, 3.0]
        assert pairs["reward"].tolist() == pytest.approx([1.3, 5.0])

    def test_order_of_responses_changes_nothing(self):
        generator = torch.Generator().manual_seed(0)
        rewards = torch.rand(40, generator=generator)
        group_ids = torch.randint(6, (40,), generator=generator)
        order = torch.randperm(40, generator=generator)
        expected = compute_advantages(rewards, group_ids)[order]
        torch.testing.assert_close(compute_advantages(rewards[order], group_ids[order]), expected, rtol=0, atol=1e-6)


def run_loss(loss_fn: GrpoLoss, ratios: list[float], advantages: list[float], **values: list[float]):
    """Return loss, sums and the gradient of the logprobs for tokens with given ratios to the engine's logprobs."""
    inference = torch.linspace(-2.0, -0.5, len(ratios), dtype=torch.float64)
    logprobs = (inference + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    named = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    columns = {"inference_logprobs": inference, "advantages": torch.tensor(advantages, dtype=torch.float64), **named}
    assert set(loss_fn.row_value_names) <= set(columns)
    loss, sums = loss_fn(logprobs, columns)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), {name: value.item() for name, value in sums.items()}, gradient.tolist()


class TestGrpoLoss:
    def test_each_side_clips_by_its_own_bound(self):
        loss_fn = GrpoLoss(clip_low=0.2, clip_high=0.5)
        ratios = [1.0, 2.0, 2.0, 0.5, 0.5, 1.4]
        advantages = [3.0, 1.0, -1.0, 1.0, -1.0, 2.0]
        # kept, cut at 1.5, kept, kept, cut at 0.8, kept
        expected = [-3.0, -1.5, 2.0, -0.5, 0.8, -2.8]
        loss, sums, gradient = run_loss(loss_fn, ratios, advantages)
        assert loss == pytest.approx(sum(expected))
        assert gradient == pytest.approx([-3.0, 0.0, 2.0, -0.5, 0.0, -2.8])
        assert sums["policy_loss"] == pytest.approx(sum(expected))
        assert (sums["clipped_low"], sums["clipped_high"]) == (1.0, 1.0)
        assert sums["importance_ratio"] == pytest.approx(sum(ratios))

    def test_sums_add_up_over_any_split(self):
        loss_fn = GrpoLoss()
        ratios, advantages = [0.5, 1.0, 1.7, 1.1], [1.0, -2.0, 0.5, 3.0]
        inference = torch.tensor([-1.0, -2.0, -0.5, -0.1])
        columns = {"inference_logprobs": inference, "advantages": torch.tensor(advantages)}
        logprobs = inference + torch.tensor(ratios).log()
        whole, sums = loss_fn(logprobs, columns)
        parts = [loss_fn(logprobs[c], {k: v[c] for k, v in columns.items()}) for c in (slice(0, 1), slice(1, 4))]
        assert whole.item() == pytest.approx(sum(loss.item() for loss, _ in parts), rel=1e-6)
        for name, value in sums.items():
            assert value.item() == pytest.approx(sum(s[name].item() for _, s in parts), rel=1e-6)

    def test_no_rows_give_zeros_under_the_same_names(self):
        loss_fn = GrpoLoss(ratio_base="current", importance_cap=2.0)
        empty = torch.zeros(0, requires_grad=True)
        values = {"inference_logprobs": torch.zeros(0), "advantages": torch.zeros(0)}
        loss, sums = loss_fn(empty, values)
        (gradient,) = torch.autograd.grad(loss, empty)
        assert loss.item() == 0.0
        assert gradient.numel() == 0
        assert sums.keys() == loss_fn(torch.zeros(2), {k: torch.zeros(2) for k in values})[1].keys()
        assert all(value.item() == 0.0 for value in sums.values())

    def test_mismatch_is_the_k3_estimate(self):
        _, sums, _ = run_loss(GrpoLoss(), [1.25, 0.8], [0.0, 0.0])
        expected = (1.25 - 1 - math.log(1.25)) + (0.8 - 1 - math.log(0.8))
        assert sums["mismatch_kl"] == pytest.approx(expected)

    def test_current_base_is_truncated_reinforce(self):
        loss_fn = GrpoLoss(ratio_base="current", importance_cap=2.0)
        loss, sums, gradient = run_loss(loss_fn, [0.5, 1.5, 4.0], [1.0, -1.0, 1.0])
        assert loss == pytest.approx(-0.5 + 1.5 - 2.0)
        assert gradient == pytest.approx([-0.5, 1.5, -2.0])
        assert sums["importance_ratio"] == pytest.approx(3.0)
        assert sums["importance_truncated"] == 1.0

    def test_old_base_clips_the_update_and_corrects_the_engine_apart(self):
        loss_fn = GrpoLoss(clip_low=0.2, clip_high=0.2, ratio_base="old", importance_cap=2.0)
        inference = torch.linspace(-2.0, -0.5, 2, dtype=torch.float64)
        old = inference + torch.tensor([4.0, 0.5], dtype=torch.float64).log()
        # ratios to the engine 6 and 0.45: to the old policy 1.5 (cut at 1.2) and 0.9; corrections 4 (cut at 2) and 0.5
        loss, sums, gradient = run_loss(loss_fn, [6.0, 0.45], [1.0, 1.0], old_logprobs=old.tolist())
        assert loss == pytest.approx(-1.2 * 2.0 - 0.9 * 0.5)
        assert gradient == pytest.approx([0.0, -0.9 * 0.5])
        assert sums["importance_ratio"] == pytest.approx(2.4)
        assert (sums["clipped_high"], sums["importance_truncated"]) == (1.0, 1.0)

    def test_kl_term_pulls_towards_the_reference(self):
        loss_fn = GrpoLoss(kl_coef=0.1)
        inference = torch.linspace(-2.0, -0.5, 2, dtype=torch.float64)
        reference = inference + torch.tensor([2.0, 0.5], dtype=torch.float64).log()
        loss, sums, gradient = run_loss(loss_fn, [1.0, 1.0], [0.0, 0.0], reference_logprobs=reference.tolist())
        expected = (2.0 - 1 - math.log(2.0)) + (0.5 - 1 - math.log(0.5))
        assert loss == pytest.approx(0.1 * expected)
        assert sums["reference_kl"] == pytest.approx(expected)
        # d/dx of exp(ref - x) - (ref - x) - 1 is 1 - exp(ref - x)
        assert gradient == pytest.approx([0.1 * (1 - 2.0), 0.1 * (1 - 0.5)])

    @pytest.mark.parametrize(
        "fields",
        [
            {"clip_low": 1.5},
            {"clip_high": -0.1},
            {"kl_coef": -1.0},
            {"importance_cap": 2.0},
            {"importance_cap": 0.5, "ratio_base": "current"},
        ],
    )
    def test_bad_fields_are_refused(self, fields):
        with pytest.raises(ValueError, match="allowed"):
            GrpoLoss(**fields)
