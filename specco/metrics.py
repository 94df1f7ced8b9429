"""Figures of training and serving as (sum, count) pairs, and their reduction over ranks.

A pair is a float64 tensor ``[2]``. Pairs of one figure add up over chunks, microbatches and ranks; the one division
comes last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def make_pair(total: Tensor | float, count: Tensor | float) -> Tensor:
    """Return float64 ``[2]``, (sum, count), on the device of ``total``."""
    total = torch.as_tensor(total, dtype=torch.float64)
    return torch.stack([total, torch.as_tensor(count, dtype=torch.float64, device=total.device)])


def sum_rows(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the pair of ``values`` ``[R]`` over all rows, or over those where ``mask`` is True."""
    if mask is not None:
        values = values[mask]
    return make_pair(values.sum(dtype=torch.float64), values.numel())


def sum_rows_by_slot(values: Tensor, slot_ids: Tensor, num_slots: int) -> Tensor:
    """Return float64 ``[num_slots, 2]``: the pair of ``values`` ``[R]`` of each slot."""
    pairs = torch.zeros(num_slots, 2, dtype=torch.float64, device=values.device)
    return pairs.index_add_(0, slot_ids, torch.stack([values.double(), torch.ones_like(values).double()], dim=1))


def compute_means(pairs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return sum / count by name; NaN where the count is 0."""
    return {name: float(pair[0] / pair[1]) for name, pair in pairs.items()}


def compute_standard_error(pair: Tensor, square_pair: Tensor) -> float:
    """Return the standard error of a mean, from the pairs of independent values and of their squares.

    NaN for fewer than two values.
    """
    (total, count), square_total = pair.tolist(), float(square_pair[0])
    if count < 2:
        return float("nan")
    variance = max(square_total - total * total / count, 0.0) / (count - 1)
    return math.sqrt(variance / count)


def all_reduce_pairs(pairs: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Add up pairs over the ranks of ``group`` (None: the default group, or this process alone if there is none).

    Collective over the group: every rank must call with the same number of names. Each row must have been counted on
    one rank of the group only.

    Raises:
        ValueError: names that differ between ranks, on every rank.
    """
    if not dist.is_initialized():
        return dict(pairs)
    names = sorted(pairs)
    # ranks agree on the names if the digest's variance over them is zero; its square is exact in float64
    digest = float(int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:2], "big"))
    check = torch.tensor([[digest, digest * digest], [1.0, 0.0]], dtype=torch.float64)
    device = pairs[names[0]].device if names else check.device
    flat = torch.cat([check.to(device), *(pairs[name].double().reshape(1, 2) for name in names)])
    dist.all_reduce(flat, group=group)
    (digest_sum, square_sum), (num_ranks, _) = flat[:2].tolist()
    if square_sum * num_ranks != digest_sum * digest_sum:
        raise ValueError(f"ranks reduce different figures; this one has {names}")
    return dict(zip(names, flat[2:], strict=True))


def compute_acceptance_length(num_drafts: float, num_accepted_tokens: float) -> float:
    """Return tokens per verification, ``1 + accepted / drafts``: the bonus token counts, so it is >= 1.

    NaN without drafts.
    """
    return 1.0 + num_accepted_tokens / num_drafts if num_drafts else float("nan")


def build_acceptance_pairs(
    num_drafts: float, num_accepted_tokens: float, num_accepted_tokens_per_pos: Sequence[float]
) -> dict[str, Tensor]:
    """Turn differences of an engine's counters into pairs.

    Args:
        num_drafts: verifications.
        num_accepted_tokens: draft tokens accepted in them, without bonus tokens.
        num_accepted_tokens_per_pos: the same by draft position, from 0.

    Returns:
        ``acceptance_length`` (``compute_acceptance_length`` is its mean) and ``acceptance_rate_{k}``, the share of
        verifications that accepted the token at position k, and so all before it.

    Raises:
        ValueError: positions that do not add up to the total.
    """
    if sum(num_accepted_tokens_per_pos) != num_accepted_tokens:
        raise ValueError(
            f"num_accepted_tokens is {num_accepted_tokens}, but its positions {list(num_accepted_tokens_per_pos)} "
            f"add up to {sum(num_accepted_tokens_per_pos)}"
        )
    pairs = {"acceptance_length": make_pair(num_drafts + num_accepted_tokens, num_drafts)}
    for k, accepted in enumerate(num_accepted_tokens_per_pos):
        pairs[f"acceptance_rate_{k}"] = make_pair(accepted, num_drafts)
    return pairs


def sum_acceptance_rate_estimates(
    tv: Tensor, reach: Tensor, slot_ids: Tensor, branch_ids: Tensor, num_slots: int
) -> Tensor:
    """Estimate the rate of each draft position from training rows: sums and counts ``[num_slots, 2]`` of branches.

    The rate of position k is the share of verifications that accept it; a branch's estimate of it is
    ``(1 - tv_k) * prod_{j<k} reach_j``. It is an estimate: the rows follow the
    policy's own tokens, whereas an engine verifies after each rejection anew and goes on from accepted draft tokens
    only.

    - ``reach = 1 - tv``: the usual one. Biased low: tokens of the policy that the draft likes are accepted more
      often, and their continuations are the easier ones.
    - ``reach = label_acceptance`` of ``losses.compute_draft_loss``: without that bias for tokens sampled from the
      teacher itself (temperature 1), noisier.

    Only whole branches count, those with a row in every slot, so that all slots speak of the same branches.

    Args:
        tv: ``[R]``, total variation (L1 / 2) of each row.
        reach: ``[R]``, probability of going on past the row.
        slot_ids: int64 ``[R]``.
        branch_ids: int64 ``[R]``, rows of one branch share it.
        num_slots: slots of a branch.
    """
    branches, inverse = torch.unique(branch_ids, return_inverse=True)
    shape = (branches.numel(), num_slots)
    accept, go_on, has_row = (torch.zeros(shape, dtype=torch.float64, device=tv.device) for _ in range(3))
    accept[inverse, slot_ids] = 1 - tv.double()
    go_on[inverse, slot_ids] = reach.double()
    has_row[inverse, slot_ids] = 1.0
    reached = torch.cat([torch.ones_like(go_on[:, :1]), go_on[:, :-1].cumprod(dim=1)], dim=1)
    is_whole = has_row.all(dim=1)
    sums = (reached * accept)[is_whole].sum(dim=0)
    return torch.stack([sums, is_whole.sum().expand_as(sums)], dim=1)


def sum_acceptance_length_estimates(
    tv: Tensor, reach: Tensor, slot_ids: Tensor, branch_ids: Tensor, num_slots: int
) -> Tensor:
    """Estimate the acceptance length, bonus token included, from training rows: sum over branches and their number.

    One more than the sum of ``sum_acceptance_rate_estimates``, which says what the arguments are and how it errs.
    """
    rates = sum_acceptance_rate_estimates(tv, reach, slot_ids, branch_ids, num_slots)
    return make_pair(rates[:, 0].sum() + rates[0, 1], rates[0, 1])


def sum_mismatch_kl(trainer_logprobs: Tensor, inference_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the pair of KL(inference || trainer) in nats a token, from tokens that the engine sampled.

    The k3 estimator ``exp(d) - 1 - d`` with ``d = trainer - inference``: unbiased, never negative.

    Args:
        trainer_logprobs: ``[R]``, by the learner, at the sampling temperature.
        inference_logprobs: ``[R]``, by the engine, of the same tokens.
        mask: bool ``[R]``, tokens that count; None = all.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    difference = trainer_logprobs.double() - inference_logprobs.double()
    return sum_rows(torch.expm1(difference) - difference, mask)
