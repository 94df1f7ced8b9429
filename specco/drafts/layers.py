"""Parts of a decoder layer that several draft families share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def apply_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate ``x`` ``[T, heads, H]`` to ``positions`` int64 ``[T]``; pairs are (j, j + H/2), as in Llama."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=dtype) / half
    angles = (positions.to(dtype)[:, None] * theta**-exponents)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class SwigluMLP(nn.Module):
    """SwiGLU, as in Llama and Qwen3."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
