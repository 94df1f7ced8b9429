"""What the block drafts share: the shape, the decoder layers, and the run over sampled blocks.

A block of ``block_size`` queries hangs on each sampled anchor p: the embedding of x[p], then mask embeddings, at
positions p, p + 1, ... In every layer they see the rows of the document *before* p, whose keys and values come straight
from the fused taps, and each other. For one document of 5 rows, anchors 2 and 4, blocks of 3 queries (columns: keys):

              trunk (taps)        block at 2     block at 4
    query      0  1  2  3  4       0  1  2        0  1  2
    2, 0       1  1  .  .  .       1  1  1        .  .  .
    2, 1       1  1  .  .  .       1  1  1        .  .  .
    2, 2       1  1  .  .  .       1  1  1        .  .  .
    4, 0       1  1  1  1  .       .  .  .        1  1  1
    4, 1       1  1  1  1  .       .  .  .        1  1  1
    4, 2       1  1  1  1  .       .  .  .        1  1  1

Row p itself is not seen: when x[p] has just been sampled, its taps do not exist yet. In a sliding layer a query at
position t sees trunk rows after t - window alone, and its block causally.

The families differ in the first query that predicts: see ``BlockConfig.first_prediction``.

Source: DFlash (arXiv 2602.06036); layer, names and sliding layers as vLLM 0.32 serves them
(``model_executor/models/qwen3_dflash.py``). We differ: documents are packed, trunk keys may be sharded, and the rotary
angles are float32 (float64 for float64 models) whatever the dtype of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specco.drafts.anchors import build_block_rows, find_valid_slots, sample_anchors
from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.layers import SwigluMLP, apply_rope
from specco.losses import compute_decay_weights
from specco.ops.branch_attention import branch_attention
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    """One block draft.

    Args:
        num_hidden_layers: decoder layers.
        block_size: queries of a block.
        mask_token_id: token whose embedding, the policy's, stands at the unknown places of a block.
        layer_types: "full_attention" or "sliding_attention" of each layer; empty: all are full. An engine's older
            runner (the CPU's) serves layers of one type only.
        sliding_window: of the sliding layers, in tokens, at least ``block_size``; None: there are none.
        num_anchors: blocks of a document in training.
        loss_decay_gamma: prediction k of a block, from 0, weighs ``exp(-k / loss_decay_gamma)``.

    Raises:
        ValueError: a value that is out of range or contradicts another, by name.
    """

    first_prediction: ClassVar[int]
    """Query whose output is the first prediction; those before it only bring their keys."""

    num_hidden_layers: int
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    num_anchors: int = 64
    loss_decay_gamma: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("num_hidden_layers", "num_anchors", "loss_decay_gamma")
        if self.block_size <= self.first_prediction:
            raise ValueError(
                f"block_size is {self.block_size}; to predict a token it must be > {self.first_prediction}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; allowed are 0 to {self.vocab_size - 1}")
        if self.layer_types and (
            len(self.layer_types) != self.num_hidden_layers
            or not set(self.layer_types) <= {FULL_ATTENTION, SLIDING_ATTENTION}
        ):
            raise ValueError(
                f"layer_types is {self.layer_types}; it must be empty or name {FULL_ATTENTION!r} or "
                f"{SLIDING_ATTENTION!r} for each of num_hidden_layers={self.num_hidden_layers}"
            )
        if (SLIDING_ATTENTION in self.layer_types) != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window is {self.sliding_window} with layer_types={self.layer_types}; a window needs a "
                f"{SLIDING_ATTENTION!r} layer, and such a layer a window"
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window is {self.sliding_window}; it must be >= block_size={self.block_size}, since a block's "
                "own keys are not cut"
            )

    @property
    def num_predictions(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first_prediction

    def get_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None: it sees all."""
        is_sliding = bool(self.layer_types) and self.layer_types[layer] == SLIDING_ATTENTION
        return self.sliding_window if is_sliding else None


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of this rank are.

    Args:
        anchors: int64 ``[B]``, local trunk rows.
        trunk_positions: int64 ``[T]``.
        block_positions: int64 ``[B * W]``, block by block.
        layout: of the trunk.
        group: context-parallel group.
    """

    anchors: Tensor
    trunk_positions: Tensor
    block_positions: Tensor
    layout: PackedLayout
    group: dist.ProcessGroup | None


class BlockAttention(nn.Module):
    """Attention of one layer; the projections' widths give the number of heads, so they may be sharded by heads."""

    def __init__(self, config: BlockConfig, window: int | None) -> None:
        super().__init__()
        self.block_size, self.head_dim = config.block_size, config.head_dim
        self.rope_theta = config.rope_theta
        self.window = window
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _make_keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return apply_rope(self.k_norm(self._split(self.k_proj(x))), positions, self.rope_theta)

    def forward(self, x: Tensor, context: Tensor, places: BlockPlaces) -> Tensor:
        """Attend with the rows of the blocks.

        Args:
            x: ``[B * W, D]``, normalised rows of the blocks.
            context: ``[T, D]``, fused taps.
            places: of the blocks.

        Returns:
            ``[B * W, D]``.
        """
        num_blocks = places.anchors.numel()
        q = apply_rope(self.q_norm(self._split(self.q_proj(x))), places.block_positions, self.rope_theta)
        k, v = self._make_keys(x, places.block_positions), self._split(self.v_proj(x))
        q, k, v = (rows.unflatten(0, (num_blocks, self.block_size)) for rows in (q, k, v))
        out = branch_attention(
            q,
            self._make_keys(context, places.trunk_positions),
            self._split(self.v_proj(context)),
            k,
            v,
            anchors=places.anchors,
            layout=places.layout,
            trunk_inclusive=False,
            branch_mask=None if self.window is None else "causal",
            window=self.window,
            group=places.group,
        )
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(0, 1).flatten(-2))


class BlockDecoderLayer(nn.Module):
    """A Qwen3 layer over the rows of the blocks; the context's keys come past its norms, from the fused taps."""

    def __init__(self, config: BlockConfig, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config, window)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwigluMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, places: BlockPlaces) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, places)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDraft(Draft):
    """Decoder layers over sampled blocks; the policy's embedding and head are used, detached."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, num_slots=config.num_predictions)
        self.mask_token_id = config.mask_token_id
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            BlockDecoderLayer(config, config.get_window(layer)) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _get_slot_weights(self) -> Tensor:
        return compute_decay_weights(self.num_slots, self.config.loss_decay_gamma)

    def sum_loss_weights(self, tokens: PackedTokens) -> Tensor:
        anchors = sample_anchors(tokens, self.config.num_anchors)
        return find_valid_slots(tokens, anchors, self.num_slots).sum(dim=0).cpu() * self._get_slot_weights()

    def forward(
        self,
        taps: Tensor,
        embeddings: Tensor,
        tokens: PackedTokens,
        layout: PackedLayout,
        group: dist.ProcessGroup | None = None,
        mask_embedding: Tensor | None = None,
    ) -> DraftRows:
        """Run the blocks; see ``Draft.forward``. A block belongs to the rank that holds its anchor's row."""
        self.check_inputs(tokens, layout)
        assert mask_embedding is not None, "a draft with a mask_token_id is given that token's embedding"
        rows = layout.on_device("global_rows", taps.device)
        trunk_positions = layout.on_device("position_ids", taps.device)
        is_anchor = torch.zeros(tokens.num_tokens, dtype=torch.bool, device=taps.device)
        is_anchor[sample_anchors(tokens, self.config.num_anchors)] = True
        local_anchors = (is_anchor[rows] & (rows >= 0)).nonzero().squeeze(1)
        anchors, width = rows[local_anchors], self.config.block_size
        block_positions = trunk_positions[local_anchors][:, None] + torch.arange(width, device=taps.device)
        places = BlockPlaces(local_anchors, trunk_positions, block_positions.flatten(), layout, group)
        context = self.hidden_norm(self.fc(taps))
        masks = mask_embedding.expand(anchors.numel(), width - 1, -1)
        hidden = torch.cat([embeddings[local_anchors][:, None], masks], dim=1).flatten(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, context, places)
        is_valid = find_valid_slots(tokens, anchors, self.num_slots)
        predictions = hidden.unflatten(0, (anchors.numel(), width))[:, self.config.first_prediction :]
        return build_block_rows(self.norm(predictions[is_valid]), anchors, is_valid, tokens, self._get_slot_weights())
