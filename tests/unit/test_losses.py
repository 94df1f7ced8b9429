"""The soft cross-entropy of a draft: values, gradient, statistics, no rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specco.losses import LossTerms, compute_confidence_loss, compute_decay_weights, compute_draft_loss


def make_rows(num_rows: int, vocab_size: int = 13, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | int]:
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "draft_logits": 2 * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64).to(dtype),
        "teacher_logits": 2 * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64).to(dtype),
        "labels": torch.randint(vocab_size, (num_rows,), generator=generator),
        "weights": torch.rand(num_rows, generator=generator, dtype=torch.promote_types(dtype, torch.float32)),
        "slot_ids": torch.randint(3, (num_rows,), generator=generator),
        "num_slots": 4,
    }


def compute(rows: dict, **terms: float) -> tuple[Tensor, dict[str, Tensor]]:
    rest = {name: rows[name] for name in ("labels", "weights", "slot_ids", "num_slots", "target_ids") if name in rows}
    terms = LossTerms(**(terms or {"soft_cross_entropy": 1.0}))
    return compute_draft_loss(rows["draft_logits"], rows["teacher_logits"], terms=terms, **rest)


class TestValues:
    def test_sums_and_statistics_row_by_row(self):
        rows = make_rows(20)
        loss_sums, stats = compute(rows)
        expected = [0.0] * 4
        for i in range(20):
            p, q = rows["teacher_logits"][i].softmax(0), rows["draft_logits"][i].softmax(0)
            expected[rows["slot_ids"][i]] += float(rows["weights"][i] * -(p * q.log()).sum())
            label = rows["labels"][i]
            assert float(stats["tv"][i]) == pytest.approx(float((p - q).abs().sum() / 2), abs=1e-12)
            assert float(stats["tv"][i]) == pytest.approx(1 - float(torch.minimum(p, q).sum()), abs=1e-12)
            assert float(stats["label_acceptance"][i]) == pytest.approx(min(1.0, float(q[label] / p[label])), abs=1e-12)
            assert float(stats["top1"][i]) == float(p.argmax() == q.argmax())
        assert loss_sums.tolist() == pytest.approx(expected, abs=1e-12)
        assert loss_sums[3] == 0
        assert {0.0, 1.0} == set(stats["top1"].tolist()), "the case must hold both outcomes"

    def test_a_draft_equal_to_the_teacher(self):
        rows = make_rows(5)
        rows["draft_logits"] = rows["teacher_logits"] + 3.0
        loss_sums, stats = compute(rows)
        entropy = torch.distributions.Categorical(logits=rows["teacher_logits"]).entropy()
        assert float(loss_sums.sum()) == pytest.approx(float((entropy * rows["weights"]).sum()), abs=1e-12)
        assert float(stats["tv"].max()) < 1e-14
        assert stats["top1"].tolist() == [1] * 5
        assert float(stats["label_acceptance"].min()) > 1 - 1e-12

    def test_splitting_the_rows_changes_no_sum(self):
        rows = make_rows(20)
        parts = [
            {name: value[part] if isinstance(value, Tensor) else value for name, value in rows.items()}
            for part in (slice(0, 7), slice(7, 7), slice(7, 20))
        ]
        total = sum(compute(part)[0] for part in parts)
        torch.testing.assert_close(total, compute(rows)[0], rtol=0, atol=1e-12)

    def test_impossible_tokens_of_the_teacher_give_no_nan(self):
        rows = make_rows(4, dtype=torch.float32)
        rows["teacher_logits"][:, rows["labels"]] = -1e9
        rows["draft_logits"][:, rows["labels"]] = -1e9
        rows["draft_logits"].requires_grad_()
        loss_sums, stats = compute(rows)
        loss_sums.sum().backward()
        assert all(bool(x.isfinite().all()) for x in (loss_sums, rows["draft_logits"].grad, *stats.values()))


class TestGradient:
    def test_gradcheck(self):
        rows = make_rows(6)
        draft_logits = rows["draft_logits"].requires_grad_()

        def loss(logits: Tensor) -> Tensor:
            return compute({**rows, "draft_logits": logits})[0]

        assert torch.autograd.gradcheck(loss, (draft_logits,), atol=1e-8)

    def test_the_teacher_and_the_statistics_have_no_gradient(self):
        rows = make_rows(6)
        rows["draft_logits"].requires_grad_()
        rows["teacher_logits"].requires_grad_()
        loss_sums, stats = compute(rows)
        assert not any(value.requires_grad for value in stats.values())
        loss_sums.sum().backward()
        assert rows["teacher_logits"].grad is None

    def test_no_rows_still_give_a_graph(self):
        rows = make_rows(0)
        rows["draft_logits"].requires_grad_()
        loss_sums, stats = compute(rows)
        assert loss_sums.tolist() == [0, 0, 0, 0]
        loss_sums.sum().backward()
        assert rows["draft_logits"].grad.shape == (0, 13)
        assert all(value.shape == (0,) for value in stats.values())

    def test_bfloat16_logits_are_reduced_in_float32(self):
        rows = make_rows(50, vocab_size=500, dtype=torch.bfloat16)
        rows["draft_logits"].requires_grad_()
        loss_sums, stats = compute(rows)
        assert loss_sums.dtype == stats["tv"].dtype == torch.float32
        loss_sums.sum().backward()
        wide = {**rows, "draft_logits": rows["draft_logits"].detach().double().requires_grad_()}
        wide["teacher_logits"], wide["weights"] = rows["teacher_logits"].double(), rows["weights"].double()
        expected, expected_stats = compute(wide)
        expected.sum().backward()
        torch.testing.assert_close(loss_sums.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(stats["tv"].double(), expected_stats["tv"], rtol=1e-5, atol=0)
        # bfloat16 keeps 8 bits: two roundings, of the difference and of its product with the weight
        gradient, exact = rows["draft_logits"].grad.double(), wide["draft_logits"].grad
        torch.testing.assert_close(gradient, exact, rtol=2**-6, atol=1e-12)


TERMS = {
    "label_cross_entropy": lambda p, q, label: -q[label].log(),
    "l1": lambda p, q, label: (p - q).abs().sum(),
    "log_acceptance": lambda p, q, label: -torch.minimum(p, q).sum().log(),
    "soft_cross_entropy": lambda p, q, label: -(p * q.log()).sum(),
    "adaptive_kl_tv": lambda p, q, label: blend_kl_and_tv(p, q),
}


def blend_kl_and_tv(p: Tensor, q: Tensor) -> Tensor:
    share = torch.exp(-3 * torch.minimum(p, q).sum()).detach()
    return share * (p * (p / q).log()).sum() + (1 - share) * (p - q).abs().sum() / 2


class TestTerms:
    @pytest.mark.parametrize(
        "terms",
        [{name: 1.0} for name in TERMS]
        + [{"label_cross_entropy": 0.1, "l1": 0.9}, dict.fromkeys(TERMS, 0.7), {"soft_cross_entropy": 0.5}],
        ids=str,
    )
    def test_value_and_gradient_of_plain_autograd(self, terms):
        rows = make_rows(20)
        logits = rows["draft_logits"].requires_grad_()
        expected = torch.zeros(4, dtype=torch.float64)
        for i in range(20):
            p, q = rows["teacher_logits"][i].softmax(0), logits[i].softmax(0)
            loss = sum(factor * TERMS[name](p, q, rows["labels"][i]) for name, factor in terms.items())
            expected = expected.index_add(0, rows["slot_ids"][i : i + 1], (rows["weights"][i] * loss)[None])
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        (expected_gradient,) = torch.autograd.grad((expected * factors).sum(), logits)
        loss_sums, stats = compute(rows, **terms)
        (gradient,) = torch.autograd.grad((loss_sums * factors).sum(), logits)
        torch.testing.assert_close(loss_sums, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
        for name, value in compute(make_rows(20))[1].items():
            torch.testing.assert_close(stats[name], value, rtol=0, atol=1e-12)

    def test_distributions_apart_give_no_nan(self):
        rows = make_rows(4, dtype=torch.float32)
        rows["teacher_logits"] = torch.zeros(4, 13).index_fill(1, torch.tensor([0]), 1e4)
        rows["draft_logits"] = torch.zeros(4, 13).index_fill(1, torch.tensor([1]), 1e4).requires_grad_()
        loss_sums, _ = compute(rows, log_acceptance=1.0, l1=1.0, adaptive_kl_tv=1.0)
        loss_sums.sum().backward()
        assert bool(loss_sums.isfinite().all())
        assert bool(rows["draft_logits"].grad.isfinite().all())

    @pytest.mark.parametrize("terms", [{}, {"l1": -0.5, "label_cross_entropy": 1.0}], ids=str)
    def test_no_term_and_negative_ones_are_refused(self, terms):
        with pytest.raises(ValueError, match="loss terms are"):
            LossTerms(**terms)


class TestReducedVocabulary:
    target_ids = torch.tensor([1, 2, 5, 6, 9, 12])

    def make_rows(self) -> dict[str, Tensor | int]:
        rows = make_rows(20)
        rows["draft_logits"] = rows["draft_logits"][:, :6].clone()
        rows["labels"][:6] = self.target_ids
        rows["teacher_logits"][0, 5], rows["draft_logits"][0, 2] = 9.0, 9.0  # one row's most probable token is the same
        rows["weights"] = rows["weights"] * torch.isin(rows["labels"], self.target_ids)
        assert bool((rows["weights"] == 0).any())
        return rows

    @pytest.mark.parametrize("name", list(TERMS))
    def test_value_gradient_and_statistics(self, name):
        """Cross-entropies and KL under the policy inside of the vocabulary, TV under the whole policy."""
        rows = self.make_rows()
        logits = rows["draft_logits"].requires_grad_()
        expected, tv, acceptance, top1 = torch.zeros(4, dtype=torch.float64), [], [], []
        for i in range(20):
            p = rows["teacher_logits"][i].softmax(0)
            q = torch.zeros_like(p).index_add(0, self.target_ids, logits[i].softmax(0))
            label = rows["labels"][i]
            tv.append((p - q).abs().sum().item() / 2)
            acceptance.append(min(1.0, (q[label] / p[label]).item()))
            top1.append(float(p.argmax() == q.argmax()))
            if rows["weights"][i] > 0:
                inside, drafted = p[self.target_ids] / p[self.target_ids].sum(), logits[i].softmax(0)
                distance = (p - q).abs().sum() / 2
                share = torch.exp(-3 * (1 - distance)).detach()
                loss = {
                    "label_cross_entropy": -q[label].log(),
                    "l1": 2 * distance,
                    "log_acceptance": -torch.minimum(p, q).sum().log(),
                    "soft_cross_entropy": -(inside * drafted.log()).sum(),
                    "adaptive_kl_tv": share * (inside * (inside / drafted).log()).sum() + (1 - share) * distance,
                }[name]
                expected = expected.index_add(0, rows["slot_ids"][i : i + 1], (rows["weights"][i] * loss)[None])
        (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
        loss_sums, stats = compute(rows | {"target_ids": self.target_ids}, **{name: 1.0})
        (gradient,) = torch.autograd.grad(loss_sums.sum(), logits)
        torch.testing.assert_close(loss_sums, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
        assert stats["tv"].tolist() == pytest.approx(tv, abs=1e-12)
        assert stats["label_acceptance"].tolist() == pytest.approx(acceptance, abs=1e-12)
        assert stats["top1"].tolist() == top1 and {0.0, 1.0} == set(top1)

    def test_a_vocabulary_of_everything_changes_nothing(self):
        rows = make_rows(20)
        expected, expected_stats = compute(rows, **dict.fromkeys(TERMS, 0.7))
        actual, stats = compute(rows | {"target_ids": torch.arange(13)}, **dict.fromkeys(TERMS, 0.7))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        for name, value in expected_stats.items():
            torch.testing.assert_close(stats[name], value, rtol=0, atol=1e-12)


class TestConfidence:
    def test_value_and_gradient(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
        acceptance = torch.rand(9, generator=generator, dtype=torch.float64, requires_grad=True)
        weights, slot_ids = torch.rand(9, generator=generator, dtype=torch.float64), torch.arange(9) % 3
        sums = compute_confidence_loss(logits, acceptance, weights=weights, slot_ids=slot_ids, num_slots=4)
        c, a = logits.detach().sigmoid(), acceptance.detach()
        rows = -weights * (a * c.log() + (1 - a) * (1 - c).log())
        assert sums.tolist() == pytest.approx([float(rows[slot::3].sum()) for slot in range(3)] + [0.0], abs=1e-12)
        sums.sum().backward()
        torch.testing.assert_close(logits.grad, weights * (c - a), rtol=0, atol=1e-12)
        assert acceptance.grad is None


def test_decay_starts_at_one():
    assert compute_decay_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.7788007830714049, 0.6065306597126334])


def test_shapes_that_differ_are_refused():
    rows = make_rows(3)
    rows["teacher_logits"] = rows["teacher_logits"][:, :-1]
    with pytest.raises(ValueError, match=r"\(3, 13\).*\(3, 12\)"):
        compute(rows)
