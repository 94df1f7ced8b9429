"""Losses of a draft against the policy's distribution, row by row: sums by slot, never means.

Each function sees one chunk of rows; the caller divides once, by counts that it has summed over the whole batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the loss of a row is made of: the factor of each term, in nats or, for ``l1``, without unit.

    With p the policy's distribution, q the draft's and y the token that the policy wrote:

    Args:
        soft_cross_entropy: of ``-sum_v p(v) log q(v)``.
        label_cross_entropy: of ``-log q(y)``, which has the same mean over the policy's tokens and more noise.
        l1: of ``sum_v |p(v) - q(v)|``, twice the total variation.
        log_acceptance: of ``-log(1 - TV)``, the probability that a sampled draft token is accepted.

    Raises:
        ValueError: a negative factor, or none above 0.

    Source: ``log_acceptance`` is one of the LK losses (arXiv 2602.23881).
    """

    soft_cross_entropy: float = 0.0
    label_cross_entropy: float = 0.0
    l1: float = 0.0
    log_acceptance: float = 0.0

    def __post_init__(self) -> None:
        factors = asdict(self)
        if min(factors.values()) < 0 or max(factors.values()) == 0:
            raise ValueError(f"loss terms are {factors}; allowed are factors >= 0, at least one of them above 0")


class _RowLoss(torch.autograd.Function):
    """Rows' loss of a draft under a detached teacher; keeps only its gradient for the backward."""

    @staticmethod
    def forward(
        ctx: Any, draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor, terms: LossTerms
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        tiny = torch.finfo(dtype).tiny
        teacher = torch.softmax(teacher_logits, dim=-1, dtype=dtype)
        draft = torch.log_softmax(draft_logits, dim=-1, dtype=dtype)
        label_logprob = draft.gather(1, labels[:, None]).squeeze(1)
        # batched products and norms, so that few [rows, vocabulary] temporaries are needed; where the user lets float32
        # products run in TF32, the loss's value has its precision, the gradient of the cross-entropy has not
        loss = torch.zeros_like(label_logprob)
        if terms.soft_cross_entropy > 0:
            loss -= (teacher.unsqueeze(1) @ draft.unsqueeze(2)).flatten() * terms.soft_cross_entropy
        if terms.label_cross_entropy > 0:
            loss -= label_logprob * terms.label_cross_entropy
        label_teacher = teacher.gather(1, labels[:, None]).squeeze(1)
        label_acceptance = (label_logprob.exp() / label_teacher.clamp(min=tiny)).clamp(max=1.0)
        draft.exp_()
        has_tv_terms = terms.l1 > 0 or terms.log_acceptance > 0
        gradient = draft - teacher if has_tv_terms or terms.label_cross_entropy > 0 else draft.sub_(teacher)
        tv = torch.linalg.vector_norm(gradient, ord=1, dim=-1) / 2
        acceptance = (1 - tv).clamp(min=tiny)
        loss += 2 * tv * terms.l1 - acceptance.log() * terms.log_acceptance
        sign = gradient.sign() if has_tv_terms else None
        gradient *= terms.soft_cross_entropy
        if terms.label_cross_entropy > 0:
            gradient.add_(draft, alpha=terms.label_cross_entropy)
            gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), -terms.label_cross_entropy))
        if sign is not None:
            # the L1's gradient: q (s - sum(s q)) with s = sign(q - p)
            sign -= (sign.unsqueeze(1) @ draft.unsqueeze(2)).squeeze(2)
            factor = terms.l1 + terms.log_acceptance / (2 * acceptance)
            gradient.addcmul_(draft.mul_(factor.unsqueeze(1)), sign)
        ctx.save_for_backward(gradient.to(draft_logits.dtype))
        ctx.mark_non_differentiable(tv, label_acceptance)
        return loss, tv, label_acceptance

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].unsqueeze(-1).to(gradient.dtype), None, None, None


def compute_draft_loss(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor,
    weights: Tensor,
    slot_ids: Tensor,
    num_slots: int,
    terms: LossTerms,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted loss of a chunk of draft rows, summed by slot.

    The soft cross-entropy is the KL divergence plus the teacher's entropy, with the same gradient. Arithmetic is
    float32 (float64 for float64 logits). A reduced draft vocabulary restricts ``teacher_logits`` and ``labels`` to it
    before this call.

    Args:
        draft_logits: ``[r, V]``; gets a gradient.
        teacher_logits: ``[r, V]``, the policy's logits before temperature at each row's teacher row; gets none.
        labels: int64 ``[r]``, token that the policy wrote.
        weights: ``[r]``, loss weight of each row.
        slot_ids: int64 ``[r]``, ``0 .. num_slots - 1``.
        num_slots: length of the result.
        terms: what the loss of a row is made of.

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
    row_loss, tv, label_acceptance = _RowLoss.apply(draft_logits, teacher_logits.detach(), labels, terms)
    top1 = (draft_logits.argmax(-1) == teacher_logits.argmax(-1)).to(tv.dtype)
    stats = {"tv": tv, "top1": top1, "label_acceptance": label_acceptance}
    return _sum_by_slot(row_loss * weights, slot_ids, num_slots), stats


def compute_confidence_loss(
    confidence_logits: Tensor, acceptance: Tensor, *, weights: Tensor, slot_ids: Tensor, num_slots: int
) -> Tensor:
    """Compute the weighted binary cross-entropy of predicted acceptance probabilities, summed by slot.

    Args:
        confidence_logits: ``[r]``, the prediction before its sigmoid; gets a gradient.
        acceptance: ``[r]``, the probability that a draft token is accepted, ``1 - tv``; gets none.
        weights: ``[r]``, loss weight of each row.
        slot_ids: int64 ``[r]``.
        num_slots: length of the result.

    Returns:
        ``[num_slots]`` weighted loss sums, in nats.
    """
    wide = confidence_logits.to(acceptance.dtype)
    row_loss = F.binary_cross_entropy_with_logits(wide, acceptance.detach(), reduction="none")
    return _sum_by_slot(row_loss * weights, slot_ids, num_slots)


def compute_decay_weights(num_slots: int, gamma: float) -> Tensor:
    """Return float64 ``[num_slots]``: ``exp(-k / gamma)`` for prediction k of a block, from 0: the first weighs 1."""
    return torch.exp(-torch.arange(num_slots, dtype=torch.float64) / gamma)


def _sum_by_slot(row_loss: Tensor, slot_ids: Tensor, num_slots: int) -> Tensor:
    sums = torch.zeros(num_slots, dtype=row_loss.dtype, device=row_loss.device)
    return sums.index_add(0, slot_ids, row_loss)
