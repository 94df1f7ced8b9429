"""What each pass of the training-time test predicts: rows, labels, teachers, weights.

Pass d (from 1) at anchor i reads the token x[i+d] that the policy wrote, stands at position i + d - 1, and predicts
x[i+d+1]; its teacher is the policy's distribution at row i+d. For a document of 6 tokens whose last 3 are trained:

    row i           0    1    2    3    4    5
    token           x0   x1   x2   x3   x4   x5
    loss_mask       .    .    .    1    1    1
    pass 1 label    .    x3   x4   x5   .    .      teacher rows   2 3 4
    pass 2 label    x3   x4   x5   .    .    .      teacher rows   2 3 4
    pass 3 label    x4   x5   .    .    .    .      teacher rows   3 4

The mask moves with the label; no shift leaves its document. A row whose label is outside of a reduced vocabulary weighs
nothing: it counts in no loss, only in the figures.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2, whose code shifts padded batches by one a pass; here every shift is
made on the packed global ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specco.drafts.base import DraftRows
from specco.packing import PackedTokens


def find_trained_anchors(tokens: PackedTokens, ttt_pass: int) -> Tensor:
    """Return bool ``[S]``: True where pass ``ttt_pass`` (from 1) predicts a trained token of the anchor's document."""
    return tokens.shift(tokens.loss_mask, ttt_pass + 1, False)


def find_anchors(tokens: PackedTokens, ttt_steps: int) -> Tensor:
    """Return bool ``[S]``: True where any of the passes predicts a trained token."""
    return torch.stack([find_trained_anchors(tokens, d) for d in range(1, ttt_steps + 1)]).any(dim=0)


def compute_pass_weight(ttt_pass: int, loss_decay: float) -> float:
    """Return the loss weight of every row of pass ``ttt_pass`` (from 1)."""
    return loss_decay ** (ttt_pass - 1)


def sum_pass_weights(tokens: PackedTokens, ttt_steps: int, loss_decay: float, t2d: Tensor | None) -> Tensor:
    """Return float64 ``[ttt_steps]``: the sum of the rows' weights by pass, over all documents of the microbatch.

    ``t2d`` is as in ``build_pass_rows``.
    """
    is_trained = tokens.loss_mask
    if t2d is not None:
        is_trained = is_trained & t2d.to(is_trained.device)[tokens.input_ids]
    sums = [
        tokens.shift(is_trained, d + 1, False).sum(dtype=torch.float64) * compute_pass_weight(d, loss_decay)
        for d in range(1, ttt_steps + 1)
    ]
    return torch.stack(sums)


def build_pass_rows(
    hidden: Tensor, anchors: Tensor, tokens: PackedTokens, ttt_pass: int, loss_decay: float, t2d: Tensor | None
) -> DraftRows:
    """Attach labels, teachers and weights to the outputs of one pass.

    Args:
        hidden: ``[R, D]``, normalised output of the trained anchors.
        anchors: int64 ``[R]``, their global rows.
        tokens: the packed microbatch, global.
        ttt_pass: from 1.
        loss_decay: see ``compute_pass_weight``.
        t2d: bool ``[V]``, tokens of a reduced vocabulary; None: all.
    """
    weight = compute_pass_weight(ttt_pass, loss_decay)
    weights = hidden.new_full(anchors.shape, weight, dtype=torch.promote_types(hidden.dtype, torch.float32))
    labels = tokens.input_ids[anchors + ttt_pass + 1]
    if t2d is not None:
        weights = weights * t2d[labels]
    return DraftRows(
        hidden=hidden,
        teacher_rows=anchors + ttt_pass,
        labels=labels,
        previous_ids=tokens.input_ids[anchors + ttt_pass],
        slot_ids=torch.full_like(anchors, ttt_pass - 1),
        branch_ids=anchors,
        weights=weights,
    )
