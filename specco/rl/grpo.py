"""GRPO: advantages within a group of responses, and the token-level clipped loss. Sums, never means.

    advantage of a response  A = (r - mean of its group) [/ std of its group]
    ratio of a token         w = exp(logprobs - base)
    loss of a token          -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) * c  +  kl_coef * k3
    correction               c = min(exp(base - inference), importance_cap), detached

Source: DeepSeekMath (arXiv 2402.03300), section 4.1; clip_low and clip_high apart and the loss a token instead of a
response: DAPO (arXiv 2503.14476); the truncated correction of the mismatch between trainer and engine: Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specco.metrics import make_pair, sum_mismatch_kl


def compute_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool = True) -> Tensor:
    """Return float32 ``[N]``: each reward minus the mean of its group, over the group's standard deviation.

    A group whose rewards are all equal gets zeros, one with a single response as well.

    Args:
        rewards: ``[N]``, one a response.
        group_ids: int64 ``[N]``, any values; responses to one prompt share one.
        normalize_std: divide by the population standard deviation of the group.
    """
    mean, std, inverse = _group_moments(rewards, group_ids)
    advantages = rewards.double() - mean[inverse]
    has_spread = std[inverse] > 0
    if normalize_std:
        advantages = advantages / torch.where(has_spread, std[inverse], 1.0)
    return torch.where(has_spread, advantages, 0.0).float()


def summarize_rewards(rewards: Tensor, group_ids: Tensor) -> dict[str, Tensor]:
    """Return pairs: ``reward`` over responses, ``groups_without_spread`` over groups (they train nothing)."""
    _, std, _ = _group_moments(rewards, group_ids)
    return {
        "reward": make_pair(rewards.double().sum(), rewards.numel()),
        "groups_without_spread": make_pair((std == 0).sum(), std.numel()),
    }


def _group_moments(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and population std of each group, float64, and the group's index of each response."""
    groups, inverse = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(groups.numel(), dtype=torch.float64, device=rewards.device)
    counts = zeros.index_add(0, inverse, torch.ones_like(rewards, dtype=torch.float64))
    mean = zeros.index_add(0, inverse, rewards.double()) / counts
    variance = zeros.index_add(0, inverse, (rewards.double() - mean[inverse]).square()) / counts
    # equal rewards whose mean is rounded leave a variance of rounding size: that is no spread
    scale = rewards.double().abs().max() if rewards.numel() else zeros.new_zeros(())
    std = variance.sqrt()
    return mean, torch.where(std > 1e-9 * scale, std, 0.0), inverse


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """The loss of a policy's tokens, for the learner's chunked head.

    Args:
        clip_low: the ratio counts no less than ``1 - clip_low`` where that would lower the loss further.
        clip_high: nor more than ``1 + clip_high``.
        ratio_base: what the ratio is taken against. "inference": the engine's logprobs, so that the ratio corrects the
            mismatch itself. "current": the logprobs of this very pass (the ratio is 1, its gradient is not); right for
            one update a batch. "old": the learner's logprobs before the first of several updates of one batch.
        importance_cap: truncation of the correction ``exp(base - inference)`` for the last two; None: no correction.
        kl_coef: weight of the k3 estimate of KL(policy || reference); 0: no reference needed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_base: Literal["inference", "current", "old"] = "inference"
    importance_cap: float | None = None
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.kl_coef < 0:
            raise ValueError(
                f"clip_low is {self.clip_low} (allowed: 0 to 1), clip_high {self.clip_high} and kl_coef {self.kl_coef} "
                "(allowed: >= 0)"
            )
        if self.importance_cap is not None and (self.importance_cap < 1 or self.ratio_base == "inference"):
            raise ValueError(
                f"importance_cap is {self.importance_cap} with ratio_base={self.ratio_base!r}; allowed are values >= 1 "
                'with "current" or "old" ("inference" corrects the mismatch in the ratio itself)'
            )

    @property
    def row_value_names(self) -> tuple[str, ...]:
        """Per-token values that a call needs, each ``[r]``."""
        names = ["inference_logprobs", "advantages"]
        names += ["old_logprobs"] if self.ratio_base == "old" else []
        names += ["reference_logprobs"] if self.kl_coef > 0 else []
        return tuple(names)

    def __call__(self, logprobs: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss summed over tokens, and detached sums to be divided by the number of tokens.

        Args:
            logprobs: ``[r]``, of the tokens under the policy at the sampling temperature; get a gradient.
            values: ``[r]`` by name, see ``row_value_names``; any floating dtype.

        Returns:
            Scalar in the dtype of ``logprobs``, and float64 sums: ``policy_loss``, ``importance_ratio``,
            ``clipped_low`` and ``clipped_high`` (tokens whose gradient is cut), ``mismatch_kl`` (k3 estimate of
            KL(engine || learner), nats), ``entropy_estimate`` (minus the logprob), and with a correction
            ``importance_truncated`` (tokens), with ``kl_coef`` ``reference_kl`` (nats).
        """
        inference = values["inference_logprobs"].to(logprobs.dtype)
        advantages = values["advantages"].to(logprobs.dtype)
        base = {"inference": inference, "current": logprobs.detach()}.get(self.ratio_base)
        base = values["old_logprobs"].to(logprobs.dtype) if base is None else base
        ratio = torch.exp(logprobs - base)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        sums = {
            "importance_ratio": ratio.detach().double().sum(),
            "clipped_low": ((ratio < 1 - self.clip_low) & (advantages < 0)).double().sum(),
            "clipped_high": ((ratio > 1 + self.clip_high) & (advantages > 0)).double().sum(),
            "mismatch_kl": sum_mismatch_kl(logprobs.detach(), inference)[0],
            "entropy_estimate": -logprobs.detach().double().sum(),
        }
        if self.importance_cap is not None:
            correction = torch.exp(base - inference)
            sums["importance_truncated"] = (correction > self.importance_cap).double().sum()
            loss = loss * correction.clamp(max=self.importance_cap)
        if self.kl_coef > 0:
            difference = values["reference_logprobs"].to(logprobs.dtype) - logprobs
            reference_kl = torch.expm1(difference) - difference
            sums["reference_kl"] = reference_kl.detach().double().sum()
            loss = loss + self.kl_coef * reference_kl
        sums["policy_loss"] = loss.detach().double().sum()
        return loss.sum(), sums
