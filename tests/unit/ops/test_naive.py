"""The oracle itself, against a mask drawn by hand."""

from __future__ import annotations

import torch

from specco.ops.naive import naive_branch_attention, trunk_visibility
from specco.testing.tolerances import OP_FLOAT64, max_error

CU_SEQLENS = torch.tensor([0, 4, 7])


def draw_mask(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[mark == "#" for mark in row] for row in rows])


def test_hand_drawn_prefixes():
    """Documents of 4 and 3 rows; anchors at rows 2, 4 and 6."""
    anchors, offset = torch.tensor([2, 4, 6]), torch.tensor([0])
    strict = trunk_visibility(CU_SEQLENS, anchors, offset, trunk_inclusive=False, window=None)
    assert torch.equal(strict[:, 0], draw_mask(["##.....", ".......", "....##."]))
    inclusive = trunk_visibility(CU_SEQLENS, anchors, offset, trunk_inclusive=True, window=None)
    assert torch.equal(inclusive[:, 0], draw_mask(["###....", "....#..", "....###"]))


def test_hand_drawn_window():
    """Query g stands g tokens after its anchor, and sees rows of position > its own - 3."""
    visible = trunk_visibility(CU_SEQLENS, torch.tensor([3]), torch.arange(4), trunk_inclusive=True, window=3)
    assert torch.equal(visible[0], draw_mask([".###...", "..##...", "...#...", "......."]))


def test_hand_computed_softmax_over_trunk_branch_and_sink():
    """Equal scores: each of 2 trunk rows, 1 own key and the sink weighs a quarter."""
    q = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    k = torch.zeros(7, 1, 2, dtype=torch.float64)
    v = torch.arange(14, dtype=torch.float64).view(7, 1, 2)
    own = torch.full((1, 1, 1, 2), 8.0, dtype=torch.float64)
    out, lse = naive_branch_attention(
        q, k, v, torch.zeros_like(own), own, cu_seqlens=CU_SEQLENS, anchors=torch.tensor([6]), trunk_inclusive=False,
        sinks=torch.zeros(1, dtype=torch.float64),
    )  # fmt: skip
    assert max_error(out.flatten(), (v[4] + v[5] + 8.0).flatten() / 4) <= OP_FLOAT64
    assert abs(float(lse) - torch.tensor(4.0).log().item()) <= 1e-6
