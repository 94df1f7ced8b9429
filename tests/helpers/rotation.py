"""Rotary positions by complex numbers, for the references of draft networks."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate ``[heads, H]``: the complex number x[j] + i x[j + H/2] by the angle position * theta^(-2j/H)."""
    head_dim = x.shape[1]
    half = head_dim // 2
    speeds = [theta ** (-2 * j / head_dim) for j in range(half)]
    turn = torch.polar(torch.ones(half, dtype=x.dtype), position * torch.tensor(speeds, dtype=x.dtype))
    turned = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=1)
