"""Merging partial attention results."""

from __future__ import annotations

import torch

from specco.ops.merge import merge_partial
from specco.testing.tolerances import OP_FLOAT64, max_error


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def test_merge_equals_one_softmax():
    scores = 30 * torch.randn(5, 12, dtype=torch.float64)
    values = torch.randn(12, 4, dtype=torch.float64)
    out, lse = attend(scores[:, :7], values[:7])
    merge_partial(out, lse, *attend(scores[:, 7:], values[7:]))
    expected_out, expected_lse = attend(scores, values)
    assert max_error(out, expected_out) <= OP_FLOAT64
    assert max_error(lse, expected_lse) <= OP_FLOAT64


def test_huge_scores_do_not_overflow():
    out, lse = torch.ones(2, 3), torch.tensor([5e4, -5e4])
    merge_partial(out, lse, torch.full((2, 3), 3.0), torch.tensor([-5e4, 5e4]))
    assert out.tolist() == [[1.0] * 3, [3.0] * 3]
    assert lse.tolist() == [5e4, 5e4]


def test_sides_without_a_key_weigh_nothing():
    """Rows: key on the left alone, on the right alone, on neither side."""
    empty = float("-inf")
    out, lse = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([0.5, empty, empty])
    merge_partial(out, lse, torch.tensor([[7.0], [2.0], [0.0]]), torch.tensor([empty, 0.25, empty]))
    assert out.tolist() == [[1.0], [2.0], [0.0]]
    assert lse.tolist() == [0.5, 0.25, empty]
