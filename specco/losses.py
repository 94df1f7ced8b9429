"""Losses of a draft against the policy's distribution, row by row: sums by slot, never means.

Each function sees one chunk of rows; the caller divides once, by counts that it has summed over the whole batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specco.vocab_parallel import VocabShard


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the loss of a row is made of: the factor of each term, in nats or, for ``l1``, without unit.

    With p the policy's distribution, q the draft's, y the token that the policy wrote, TV the total variation of p and
    q, and ``1 - TV`` the probability that a sampled draft token is accepted:

    Args:
        soft_cross_entropy: of ``-sum_v p(v) log q(v)``.
        label_cross_entropy: of ``-log q(y)``, which has the same mean over the policy's tokens and more noise.
        l1: of ``sum_v |p(v) - q(v)|``, twice TV.
        log_acceptance: of ``-log(1 - TV)``.
        adaptive_kl_tv: of ``a KL(p || q) + (1 - a) TV`` with ``a = exp(-3 (1 - TV))``, which gets no gradient: the KL
            leads where the draft is far from the policy and TV has next to no gradient, TV where it is near.

    Raises:
        ValueError: a negative factor, or none above 0.

    Source: the last two are the LK losses (arXiv 2602.23881), with its decay of 3.
    """

    soft_cross_entropy: float = 0.0
    label_cross_entropy: float = 0.0
    l1: float = 0.0
    log_acceptance: float = 0.0
    adaptive_kl_tv: float = 0.0

    def __post_init__(self) -> None:
        factors = asdict(self)
        if min(factors.values()) < 0 or max(factors.values()) == 0:
            raise ValueError(f"loss terms are {factors}; allowed are factors >= 0, at least one of them above 0")

    @property
    def has_tv(self) -> bool:
        """Whether a term depends on TV."""
        return self.l1 > 0 or self.log_acceptance > 0 or self.adaptive_kl_tv > 0


KL_DECAY = 3.0
"""How fast the KL's share of ``adaptive_kl_tv`` falls with the acceptance."""


class _RowLoss(torch.autograd.Function):
    """Rows' loss of a draft under a detached teacher; keeps only its gradient for the backward.

    ``outside`` ``[r]`` is the policy's probability of what is not in the draft's vocabulary (None: all is); the
    cross-entropies and the KL are then of the policy's distribution inside of it, TV is of the whole one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        outside: Tensor | None,
        terms: LossTerms,
        shard: VocabShard,
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        tiny = torch.finfo(dtype).tiny
        teacher = shard.log_softmax(teacher_logits, dtype).exp_()
        draft = shard.log_softmax(draft_logits, dtype)
        label_logprob, label_teacher = shard.pick(draft, labels), shard.pick(teacher, labels)
        has_soft_term = terms.soft_cross_entropy > 0 or terms.adaptive_kl_tv > 0
        cross_entropy = -shard.sum(_dot(teacher, draft)) if has_soft_term else torch.zeros_like(label_logprob)
        draft.exp_()
        # few [rows, vocabulary] temporaries: the difference of the distributions becomes the gradient in place
        is_draft_needed = terms.has_tv or terms.label_cross_entropy > 0
        gradient = draft - teacher if is_draft_needed else draft.sub_(teacher)
        if outside is not None:
            label_teacher = label_teacher * (1 - outside)
            gradient.addcmul_(teacher, outside.unsqueeze(1))
        label_acceptance = (label_logprob.exp() / label_teacher.clamp(min=tiny)).clamp(max=1.0)
        tv = shard.sum(torch.linalg.vector_norm(gradient, ord=1, dim=-1)) / 2
        tv = tv if outside is None else tv + outside / 2
        sign = gradient.sign() if terms.has_tv else None
        if outside is not None:
            gradient.addcmul_(teacher, outside.unsqueeze(1), value=-1)
        loss, soft_factor, tv_factor = _combine_terms(terms, cross_entropy, teacher, tv, shard)
        loss -= label_logprob * terms.label_cross_entropy
        gradient *= soft_factor.unsqueeze(1)
        if terms.label_cross_entropy > 0:
            gradient.add_(draft, alpha=terms.label_cross_entropy)
            columns, is_here = shard.locate(labels)
            gradient.scatter_add_(1, columns[:, None], is_here[:, None].to(dtype) * -terms.label_cross_entropy)
        if sign is not None:
            # TV's gradient: q (s - sum(s q)) / 2 with s = sign(q - p)
            sign -= shard.sum(_dot(sign, draft)).unsqueeze(1)
            gradient.addcmul_(draft.mul_(tv_factor.unsqueeze(1) / 2), sign)
        ctx.save_for_backward(gradient.to(draft_logits.dtype))
        ctx.mark_non_differentiable(tv, label_acceptance)
        return loss, tv, label_acceptance

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].unsqueeze(-1).to(gradient.dtype), None, None, None, None, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return ``[r]``: the sum over the columns of ``a * b``, both ``[r, V]``, without a temporary of that size.

    Where the user lets float32 products run in TF32, the loss's value has its precision; the gradient of the
    cross-entropy has not.
    """
    return (a.unsqueeze(1) @ b.unsqueeze(2)).flatten()


def _combine_terms(
    terms: LossTerms, cross_entropy: Tensor, teacher: Tensor, tv: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, each ``[r]``: the loss without its label term, and its derivatives by cross-entropy and by TV."""
    acceptance = (1 - tv).clamp(min=torch.finfo(tv.dtype).tiny)
    loss = terms.soft_cross_entropy * cross_entropy + 2 * terms.l1 * tv - terms.log_acceptance * acceptance.log()
    soft_factor = torch.full_like(tv, terms.soft_cross_entropy)
    tv_factor = 2 * terms.l1 + terms.log_acceptance / acceptance
    if terms.adaptive_kl_tv > 0:
        share = torch.exp(-KL_DECAY * acceptance)
        kl = cross_entropy - shard.sum(torch.special.entr(teacher).sum(dim=-1))
        loss = loss + terms.adaptive_kl_tv * (share * kl + (1 - share) * tv)
        soft_factor = soft_factor + terms.adaptive_kl_tv * share
        tv_factor = tv_factor + terms.adaptive_kl_tv * (1 - share)
    return loss, soft_factor, tv_factor


def compute_draft_loss(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor,
    weights: Tensor,
    slot_ids: Tensor,
    num_slots: int,
    terms: LossTerms,
    target_ids: Tensor | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted loss of a chunk of draft rows, summed by slot.

    The soft cross-entropy is the KL divergence plus the teacher's entropy, with the same gradient. Arithmetic is
    float32 (float64 for float64 logits).

    Args:
        draft_logits: ``[r, V_d]``; gets a gradient.
        teacher_logits: ``[r, V]``, the policy's logits before temperature at each row's teacher row; gets none.
        labels: int64 ``[r]``, token that the policy wrote.
        weights: ``[r]``, loss weight of each row; 0 where the label is not in the draft's vocabulary.
        slot_ids: int64 ``[r]``, ``0 .. num_slots - 1``.
        num_slots: length of the result.
        terms: what the loss of a row is made of.
        target_ids: int64 ``[V_d]``, ascending: the tokens of a reduced draft vocabulary; None: all ``V`` of them. The
            cross-entropies and the KL are of the policy's distribution inside of it, TV is of the whole one.
        shard: the tokens whose policy logits are given; None: all. The draft's vocabulary is cut the same way.
            Collective over its group: every rank must call, with the same rows; each rank's gradient is that of its own
            logits.

    Returns:
        ``[num_slots]`` weighted loss sums (zeros, still part of the graph, for no rows), and per row, detached:
        ``tv``, the total variation L1 / 2 between draft and teacher, so that ``1 - tv`` is the probability that a token
        drawn from the draft is accepted; ``top1``, 1 where both have the same most probable token;
        ``label_acceptance``, ``min(1, p_draft / p_teacher)`` of the label.

    Raises:
        ValueError: logits of other shapes.
    """
    shard = VocabShard.build(teacher_logits.shape[1]) if shard is None else shard
    draft_shard = shard if target_ids is None else VocabShard.build(target_ids.numel(), shard.group)
    if teacher_logits.shape[1] != shard.size or draft_logits.shape != (teacher_logits.shape[0], draft_shard.size):
        raise ValueError(
            f"draft_logits has shape {tuple(draft_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)}; "
            f"the two must be equal, but for a reduced vocabulary (here of {draft_shard.size} tokens)"
        )
    teacher_logits, outside, is_inside = teacher_logits.detach(), None, None
    best, best_of_teacher = draft_shard.argmax(draft_logits), shard.argmax(teacher_logits)
    if target_ids is not None:
        is_inside = torch.isin(labels, target_ids)
        labels = torch.searchsorted(target_ids, labels).clamp(max=target_ids.numel() - 1)
        best = target_ids[best]
        teacher_logits, outside = restrict_teacher(teacher_logits, target_ids, shard)
        teacher_logits = teacher_logits[:, draft_shard.start : draft_shard.start + draft_shard.size]
    row_loss, tv, label_acceptance = _RowLoss.apply(draft_logits, teacher_logits, labels, outside, terms, draft_shard)
    if is_inside is not None:
        label_acceptance = label_acceptance * is_inside
    stats = {"tv": tv, "top1": (best == best_of_teacher).to(tv.dtype), "label_acceptance": label_acceptance}
    return _sum_by_slot(row_loss * weights, slot_ids, num_slots), stats


def restrict_teacher(teacher_logits: Tensor, target_ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the logits ``[r, V_d]`` of some tokens, and the probability ``[r]`` of all others (accumulator type)."""
    columns, is_here = shard.locate(target_ids)
    inside = shard.sum(teacher_logits[:, columns].masked_fill(~is_here, 0.0))
    dtype = torch.promote_types(teacher_logits.dtype, torch.float32)
    log_inside = torch.logsumexp(inside.to(dtype), dim=1) - shard.logsumexp(teacher_logits.to(dtype))
    return inside, -torch.expm1(log_inside.clamp(max=0.0))


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
