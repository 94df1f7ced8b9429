"""(sum, count) pairs: what they hold, how they add up, and the figures built on them."""

from __future__ import annotations

import math

import pytest
import torch

from specco.metrics import (
    all_reduce_pairs,
    build_acceptance_pairs,
    compute_acceptance_length,
    compute_means,
    compute_standard_error,
    make_pair,
    sum_acceptance_length_estimates,
    sum_mismatch_kl,
    sum_rows,
    sum_rows_by_slot,
)


class TestAcceptanceLength:
    def test_counts_the_bonus_token(self):
        assert compute_acceptance_length(10, 0) == 1.0
        assert compute_acceptance_length(10, 25) == 3.5
        assert math.isnan(compute_acceptance_length(0, 0))

    def test_engine_counters(self):
        pairs = build_acceptance_pairs(10, 16, [8, 5, 3])
        means = compute_means(pairs)
        assert means == {
            "acceptance_length": compute_acceptance_length(10, 16),
            "acceptance_rate_0": 0.8,
            "acceptance_rate_1": 0.5,
            "acceptance_rate_2": 0.3,
        }

    def test_engines_add_up_by_verifications(self):
        """Two engines of unlike load: the mean of their means would be 2.5."""
        one, two = build_acceptance_pairs(30, 30, [30]), build_acceptance_pairs(10, 20, [20])
        assert compute_means({"a": one["acceptance_length"] + two["acceptance_length"]}) == {"a": 90 / 40}

    def test_positions_that_do_not_add_up_are_refused(self):
        with pytest.raises(ValueError, match=r"num_accepted_tokens is 16.*add up to 15"):
            build_acceptance_pairs(10, 16, [8, 5, 2])


class TestStandardError:
    def test_is_that_of_the_mean(self):
        values = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        stderr = compute_standard_error(sum_rows(values), sum_rows(values.square()))
        assert stderr == pytest.approx(float(values.std() / math.sqrt(7)))

    def test_needs_two_values(self):
        assert math.isnan(compute_standard_error(make_pair(1.0, 1), make_pair(1.0, 1)))
        assert compute_standard_error(make_pair(2.0, 2), make_pair(2.0, 2)) == 0.0


class TestAcceptanceLengthEstimate:
    def test_by_hand(self):
        # branch 4 is whole, branch 9 lacks slot 2, branch 2 lacks slot 0; rows come in no order
        tv = torch.tensor([0.1, 0.9, 0.2, 0.5, 0.4, 0.9, 0.9])
        slot_ids = torch.tensor([0, 0, 1, 2, 1, 2, 1])
        branch_ids = torch.tensor([4, 9, 4, 4, 9, 2, 2])
        total, count = sum_acceptance_length_estimates(tv, 1 - tv, slot_ids, branch_ids, 3).tolist()
        assert count == 1
        assert total == pytest.approx(1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.5)
        reach = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])
        total, _ = sum_acceptance_length_estimates(tv, reach, slot_ids, branch_ids, 3).tolist()
        assert total == pytest.approx(1 + 0.9 + 1.0 * 0.8 + 1.0 * 0.5 * 0.5)

    def test_no_rows(self):
        none = torch.zeros(0)
        ids = torch.zeros(0, dtype=torch.int64)
        assert sum_acceptance_length_estimates(none, none, ids, ids, 3).tolist() == [0, 0]

    def test_bias_against_an_engine_on_a_markov_chain(self):
        """On drafts that tokens steer, the label's acceptance ratio is unbiased and the product of 1 - TV is low."""
        generator = torch.Generator().manual_seed(0)
        policy = torch.rand(4, 4, generator=generator).double().softmax(-1)
        # the draft knows the row after an even token, and not the one after an odd token
        draft = policy.clone()
        draft[1::2] = draft[1::2].flip(-1) ** 4
        draft[:, 1::2] *= 0.2
        draft /= draft.sum(-1, keepdim=True)
        tv = (policy - draft).abs().sum(-1) / 2
        kept = torch.minimum(policy, draft)  # kept[a, b]: the draft proposes b after a, and it is accepted
        served = 1 + kept[0].sum() + kept[0] @ kept.sum(-1)
        exact = {}
        for name, reach in (("low", (1 - tv)[:, None].expand(4, 4)), ("label", (draft / policy).clamp(max=1))):
            exact[name] = float(1 + (1 - tv[0]) + (policy[0] * reach[0] * (1 - tv)).sum())
        assert exact["label"] == pytest.approx(float(served), abs=1e-12)
        assert exact["low"] < float(served) - 0.01

        first = torch.zeros(20000, dtype=torch.int64)
        second = torch.multinomial(policy[0], 20000, replacement=True, generator=generator)
        tokens_tv = torch.cat([tv[first], tv[second]])
        label = (draft / policy).clamp(max=1)[0, second]
        slot_ids = torch.arange(2).repeat_interleave(20000)
        branch_ids = torch.arange(20000).repeat(2)
        for name, reach in (("low", 1 - tokens_tv), ("label", torch.cat([label, label]))):
            pair = sum_acceptance_length_estimates(tokens_tv, reach, slot_ids, branch_ids, 2)
            assert float(pair[0] / pair[1]) == pytest.approx(exact[name], abs=0.01)


class TestPairs:
    def test_rows(self):
        values = torch.tensor([1.0, 2.0, 4.0])
        assert sum_rows(values).tolist() == [7, 3]
        assert sum_rows(values, torch.tensor([True, False, True])).tolist() == [5, 2]
        assert sum_rows(values, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0]
        by_slot = sum_rows_by_slot(values, torch.tensor([2, 0, 2]), 3)
        assert by_slot.tolist() == [[2, 1], [0, 0], [5, 2]]

    def test_means(self):
        means = compute_means({"a": make_pair(6, 4), "b": make_pair(0, 0)})
        assert means["a"] == 1.5
        assert math.isnan(means["b"])

    def test_one_process_reduces_to_itself(self):
        pairs = {"a": make_pair(6, 4)}
        assert all_reduce_pairs(pairs) == pairs


class TestMismatchKl:
    def test_equal_logprobs_give_zero(self):
        logprobs = torch.log(torch.rand(10))
        assert sum_mismatch_kl(logprobs, logprobs).tolist() == [0, 10]

    def test_is_unbiased_and_never_negative(self):
        inference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        trainer = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
        by_token = [float(sum_mismatch_kl(trainer.log()[i : i + 1], inference.log()[i : i + 1])[0]) for i in range(3)]
        expected = float((inference * (inference / trainer).log()).sum())
        assert sum(p * k for p, k in zip(inference.tolist(), by_token, strict=True)) == pytest.approx(expected)
        assert min(by_token) > 0

    def test_only_masked_tokens_count(self):
        trainer, inference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
        assert sum_mismatch_kl(trainer, inference, torch.tensor([True, False])).tolist() == [0, 1]
