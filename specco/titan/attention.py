"""torchtitan's inner attention on packed documents, through ``specco.ops``: a drop-in for Varlen- and FlexAttention.

torchtitan's varlen attention has no CPU kernel and is refused under context parallelism; this one runs on both, since
``ring_attention`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.protocols.module import Module

from specco.ops.branch_attention import ring_attention
from specco.ops.layout import PackedLayout


class PackedMasks(NamedTuple):
    """Which rows see which: what torchtitan hands through its layers as ``attention_masks``.

    Args:
        layout: of the packed rows; its local rows are the ``B * L`` rows of the batch, in order.
        group: context-parallel group, None at one rank.
        is_counted: whether the rows enter a router's statistics; see ``PackedTokens``.
    """

    layout: PackedLayout
    group: dist.ProcessGroup | None = None
    is_counted: bool = True

    @staticmethod
    def from_positions(positions: Tensor) -> PackedMasks:
        """Build the masks of a batch that holds whole documents, at one rank.

        Args:
            positions: int64 ``[B, L]``, position of each token in its document. A 0 starts a document, and so does
                the first token of each row. Copied to the host.
        """
        is_start = positions == 0
        is_start[:, 0] = True
        starts = is_start.flatten().nonzero().squeeze(1).to(device="cpu", dtype=torch.int32)
        end = torch.tensor([positions.numel()], dtype=torch.int32)
        return PackedMasks(PackedLayout.build(torch.cat([starts, end])))


class PackedAttention(Module):
    """Causal attention within each packed document; exact under context parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        backend: Literal["auto", "cpu", "flash", "flex", "naive"] = "auto"
        """Kernel of ``specco.ops``; "auto" takes the fastest that runs on the tensors' device."""
        window: int | None = None
        """Sliding window of this layer, in tokens: a row sees itself and the ``window - 1`` rows before; None: all."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.backend, self.window = config.backend, config.window

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: PackedMasks,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend, row by row, to the earlier rows of the same document and to the row itself.

        Args:
            q_BLNH: ``[B, L, N, H]``, this rank's rows in layout order.
            k_BLNH: ``[B, L, K, H]``.
            v_BLNH: ``[B, L, K, H]``.
            attention_masks: layout and group. Collective over the group: every rank must call.
            scale: of the scores; None is ``H ** -0.5``.
            enable_gqa: whether ``K`` may differ from ``N``.
            sinks: ``[N]``, attention-sink logit of each head, in the softmax's denominator only; None: no sinks.

        Returns:
            ``[B, L, N, H]``; rows of padding are 0.

        Raises:
            ValueError: masks of another kind or size, or fewer key heads without ``enable_gqa``.
        """
        if not isinstance(attention_masks, PackedMasks):
            raise ValueError(f"attention_masks is {type(attention_masks).__name__}; PackedAttention takes PackedMasks")
        num_heads, num_kv_heads = q_BLNH.shape[2], k_BLNH.shape[2]
        if num_heads != num_kv_heads and not enable_gqa:
            raise ValueError(f"{num_heads} query heads on {num_kv_heads} key heads need enable_gqa=True")
        layout, group = attention_masks.layout, attention_masks.group
        q, k, v = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        if q.shape[0] != layout.global_rows.numel():
            raise ValueError(f"the batch has {q.shape[0]} rows, but its layout has {layout.global_rows.numel()}")
        options = {"window": self.window, "sinks": sinks, "scale": scale, "backend": self.backend}
        out = ring_attention(q, k, v, layout=layout, group=group, **options)
        assert isinstance(out, Tensor)
        return out.view(q_BLNH.shape)
