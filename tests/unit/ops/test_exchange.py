"""Fetching rows on one rank; several ranks: tests/distributed/ops."""

from __future__ import annotations

import pytest
import torch

from specco.ops.exchange import fetch_rows
from specco.ops.layout import PackedLayout

LAYOUT = PackedLayout.build([0, 2, 6])


def test_rows_and_gradient_on_one_rank():
    x = torch.randn(6, 3, requires_grad=True)
    rows = torch.tensor([5, 0, 5])
    out = fetch_rows(x, rows, LAYOUT)
    assert torch.equal(out, x[rows])
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]


def test_no_rows():
    x = torch.randn(6, 3, requires_grad=True)
    out = fetch_rows(x, torch.empty(0, dtype=torch.int64), LAYOUT)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(6, 3))


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (torch.zeros(6), torch.tensor([6]), "rows spans 6 to 6; allowed are global rows 0 to 5"),
        (torch.zeros(6), torch.tensor([-1, 2]), "rows spans -1 to 2"),
        (torch.zeros(5), torch.tensor([0]), "x has 5 rows, but the layout has num_rows=6"),
        (torch.zeros(6), torch.tensor([0], dtype=torch.int32), "dtype torch.int32; it must be int64"),
    ],
)
def test_bad_requests_are_refused(x: torch.Tensor, rows: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        fetch_rows(x, rows, LAYOUT)
