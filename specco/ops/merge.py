"""Merge of two partial attention results over disjoint key sets."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partial(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold one partial result into an accumulator, in place.

    ``out = (out * exp(lse) + part_out * exp(part_lse)) / (exp(lse) + exp(part_lse))`` and ``lse = logaddexp``, written
    so that nothing overflows, and that two sides without a visible key (-inf) give 0 and -inf, never NaN.

    Args:
        out: ``[..., H]``, float32 or float64 accumulator.
        lse: ``[...]``, natural log of its denominator, -inf = no visible key yet.
        part_out: ``[..., H]``, any float dtype; finite also where ``part_lse`` is -inf.
        part_lse: ``[...]``.

    Source: the online softmax of FlashAttention (arXiv 2205.14135, section 3.1); the sigmoid form of
    ring-flash-attention gives NaN when one side is -inf, so the weight here comes from the guarded ``logaddexp``.
    """
    joint = torch.logaddexp(lse, part_lse)
    # -inf - -inf is NaN: a row that sees no key on either side takes weight 0 of the (finite) part.
    weight = torch.exp(part_lse - joint).nan_to_num_(nan=0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(joint)
