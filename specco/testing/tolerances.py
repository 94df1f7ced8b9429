"""Named tolerances, each with its reason, and the one way errors are measured."""

from __future__ import annotations

import torch
from torch import Tensor

OP_FLOAT64 = 1e-10
"""Largest absolute error of an op in float64 on inputs of unit size: thousands of sums in another order, with room."""

OP_FLOAT32 = 1e-5
"""The same in float32, where one rounding is 6e-8 and sums have up to a few hundred terms."""

OP_BFLOAT16 = 2**-5
"""One kernel in bfloat16, relative to the tensor's largest entry: weights and result are each rounded to 2**-9 of their
value, and a key that hundreds of queries see sums that many weights. Twice the largest error of 175 random blocks."""

STEP_FLOAT64 = 1e-9
"""Whole training steps in float64, relative to the tensor's largest entry: several ops and an optimizer in a row."""


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; equal infinities count 0, a NaN on either side counts inf."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs()
    difference = torch.where(actual == expected, 0.0, difference)
    return float(difference.nan_to_num(nan=float("inf")).max())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``max_error`` over the largest absolute entry of ``expected``."""
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return max_error(actual, expected) / max(scale, torch.finfo(torch.float64).tiny)
