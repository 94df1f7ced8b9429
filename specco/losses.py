"""Losses of a draft against the policy's distribution, row by row: sums by slot, never means.

Each function sees one chunk of rows; the caller divides once, by counts that it has summed over the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Rows' cross-entropy of a draft under a detached teacher; keeps only ``p_draft - p_teacher`` for the backward."""

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        teacher = torch.softmax(teacher_logits, dim=-1, dtype=dtype)
        draft = torch.log_softmax(draft_logits, dim=-1, dtype=dtype)
        # a batched product and a norm, so that these two stay the only [rows, vocabulary] temporaries; where the user
        # lets float32 products run in TF32, the loss's value has its precision, the gradient has not
        loss = -(teacher.unsqueeze(1) @ draft.unsqueeze(2)).flatten()
        label_teacher = teacher.gather(1, labels[:, None]).squeeze(1)
        label_draft = draft.gather(1, labels[:, None]).squeeze(1).exp()
        label_acceptance = (label_draft / label_teacher.clamp(min=torch.finfo(dtype).tiny)).clamp(max=1.0)
        difference = draft.exp_().sub_(teacher)
        tv = torch.linalg.vector_norm(difference, ord=1, dim=-1) / 2
        ctx.save_for_backward(difference.to(draft_logits.dtype))
        ctx.mark_non_differentiable(tv, label_acceptance)
        return loss, tv, label_acceptance

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad_outputs[0].unsqueeze(-1).to(difference.dtype), None, None


def compute_draft_loss(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor,
    weights: Tensor,
    slot_ids: Tensor,
    num_slots: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted soft cross-entropy of a chunk of draft rows, summed by slot.

    A row's loss is ``-sum_v p_teacher(v) log p_draft(v)`` in nats, over the whole vocabulary: the KL divergence plus
    the teacher's entropy, with the same gradient. Arithmetic is float32 (float64 for float64 logits). A reduced draft
    vocabulary restricts ``teacher_logits`` and ``labels`` to it before this call.

    Args:
        draft_logits: ``[r, V]``; gets a gradient.
        teacher_logits: ``[r, V]``, the policy's logits before temperature at each row's teacher row; gets none.
        labels: int64 ``[r]``, token that the policy wrote.
        weights: ``[r]``, loss weight of each row.
        slot_ids: int64 ``[r]``, ``0 .. num_slots - 1``.
        num_slots: length of the result.

    Returns:
        ``[num_slots]`` weighted loss sums (zeros, still part of the graph, for no rows), and per row, detached:
        ``tv``, the total variation L1 / 2 between draft and teacher, so that ``1 - tv`` is the probability that a token
        drawn from the draft is accepted; ``top1``, 1 where both have the same most probable token;
        ``label_acceptance``, ``min(1, p_draft / p_teacher)`` of the label.

    Raises:
        ValueError: logits of different shapes.
    """
    if draft_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"draft_logits has shape {tuple(draft_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)}; "
            "the two must be equal"
        )
    row_loss, tv, label_acceptance = _SoftCrossEntropy.apply(draft_logits, teacher_logits.detach(), labels)
    loss_sums = torch.zeros(num_slots, dtype=row_loss.dtype, device=row_loss.device)
    loss_sums = loss_sums.index_add(0, slot_ids, row_loss * weights)
    top1 = (draft_logits.argmax(-1) == teacher_logits.argmax(-1)).to(tv.dtype)
    return loss_sums, {"tv": tv, "top1": top1, "label_acceptance": label_acceptance}
