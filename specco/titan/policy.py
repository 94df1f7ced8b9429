"""The policy: torchtitan's Qwen3 with taps on its layers and a draft model as a submodule.

    tokens -> tok_embeddings -> layer 0 -> ... -> layer n-1 -> norm -> hidden -> (lm_head, applied by the chunked head)
                   | detached      | detached, where j is in target_layer_ids
                   v               v
                 embeddings      taps  ->  draft  ->  DraftRows

Taps are taken between the layers, outside of what activation checkpointing recomputes. The policy's own arithmetic does
not know whether there is a draft: it reads detached tensors, and its parameters are initialised after the policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.registry import build_draft
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.titan.attention import PackedAttention, PackedMasks
from specco.titan.head import HeadLinear


class PolicyEmbedding(Embedding):
    """torchtitan's ``Embedding`` that can also embed further tokens, detached, while its FSDP unit is unsharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    _embed_fn: Callable[[Tensor], Tensor] | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Let torchtitan wrap the look-up of one tensor, which its plan is written for, and call that for each."""
        instance = cast(Any, self)
        instance.forward = super().forward
        super().parallelize(parallel_dims)
        self._embed_fn = instance.forward
        del instance.forward

    def forward(  # pyrefly: ignore[bad-override]
        self, input: Tensor, *, detached_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the embeddings of ``input``; given ``detached_ids`` ``[B, L]``, also theirs, without gradient."""
        embed_fn = self._embed_fn or super().forward
        embeddings = embed_fn(input)
        if detached_ids is None:
            return embeddings
        with torch.no_grad():
            return embeddings, embed_fn(detached_ids)


class AnyDtypeRoPE(CosSinRoPE):
    """torchtitan's ``CosSinRoPE`` without the cast to float32, so that a float64 model is float64 throughout.

    Type promotion with the float32 cache makes the same float32 arithmetic of float32 and bfloat16 inputs, bit for bit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves of the head size.

        Args:
            query: ``[B, L, N, H]``.
            key: ``[B, L, K, H]``.
            rope_cache: ``[1 or B, L, 1, 2 * H]``, cosines then sines.

        Returns:
            The rotated two, of their own dtype.
        """
        cos, sin = rope_cache.chunk(2, dim=-1)
        query_out = query * cos + CosSinRoPE._rotate_half(query) * sin
        key_out = key * cos + CosSinRoPE._rotate_half(key) * sin
        return query_out.type_as(query), key_out.type_as(key)


class Qwen3Policy(Qwen3Model):
    """Qwen3 with taps; without a draft it computes what torchtitan's ``Qwen3Model`` computes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        draft: DraftConfig | None = None
        """The draft to carry; its ``target_layer_ids`` say where the taps are. None: no draft, no taps."""

        is_frozen: bool = False
        """Whether the policy's own parameters take no gradient (pre-training of the draft)."""

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.is_frozen:
            self.requires_grad_(False)
        self.draft: Draft | None = None if config.draft is None else build_draft(config.draft)
        num_layers = len(config.layers)
        if config.draft is not None and config.draft.vocab_size != config.vocab_size:
            raise ValueError(
                f"the draft has vocab_size={config.draft.vocab_size}; it must be the policy's, {config.vocab_size}"
            )
        if self.draft is not None and max(self.draft.target_layer_ids) >= num_layers:
            raise ValueError(f"target_layer_ids is {self.draft.target_layer_ids}; the policy has {num_layers} layers")

    def verify_module_protocol(self) -> None:
        """Check that every submodule but the draft, which needs no torchtitan, is a torchtitan ``Module``."""
        draft, self.draft = self.draft, None
        try:
            super().verify_module_protocol()
        finally:
            self.draft = draft

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        if self.draft is not None:
            self.draft.init_weights()

    def forward(  # pyrefly: ignore[bad-override]
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: PackedMasks | None = None,
        packed_tokens: PackedTokens | None = None,
    ) -> Tensor | tuple[Tensor, DraftRows | None]:
        """Run the policy as torchtitan's trainer does, or, given ``packed_tokens``, up to the chunked head.

        Args:
            tokens: int64 ``[B, L]``, this rank's rows in layout order.
            positions: int64 ``[B, L]``, position of each token in its document; None: every row is one document.
            attention_masks: of the packed rows; None: one rank, from ``packed_tokens`` or ``positions``.
            packed_tokens: the packed microbatch, global, of which ``tokens`` are this rank's rows.

        Returns:
            Without ``packed_tokens``: logits ``[B, L, V]``, or the final normalised hidden rows ``[B, L, D]`` where
            ``_skip_lm_head`` is set. With them: the hidden rows, under tensor parallelism a DTensor, whole on every
            rank of "tp", and the draft's rows or None where there is no draft.
        """
        if attention_masks is None:
            attention_masks = _build_masks(tokens, positions, packed_tokens)
        draft = None if packed_tokens is None else self.draft
        tapped = set() if draft is None else {str(layer_id) for layer_id in draft.target_layer_ids}
        h, mask_embedding = self._embed(tokens, None if draft is None else draft.mask_token_id)
        embeddings = h.detach()
        taps = []
        for name, layer in self.layers.items():
            h = layer(h, attention_masks, positions)
            if name in tapped:
                taps.append(h.detach())
        h = self.norm(h) if self.norm is not None else h
        if packed_tokens is None:
            return h if self._skip_lm_head or self.lm_head is None else self.lm_head(h)
        if draft is None:
            return h, None
        layout, group = attention_masks
        rows = (_gather_rows(torch.cat(taps, dim=-1)), _gather_rows(embeddings))
        return h, draft(*rows, packed_tokens, layout, group, mask_embedding)

    def _embed(self, tokens: Tensor, mask_token_id: int | None) -> tuple[Tensor, Tensor | None]:
        """Return (embeddings of the tokens, detached embedding ``[D]`` of the mask token or None)."""
        if self.tok_embeddings is None:
            return tokens, None
        if mask_token_id is None:
            return self.tok_embeddings(tokens), None
        h, masks = self.tok_embeddings(tokens, detached_ids=tokens.new_tensor([[mask_token_id]]))
        return h, _gather_rows(masks)[0]


def _gather_rows(x: Tensor) -> Tensor:
    """Return detached rows ``[T, D]`` of ``[B, L, D]``, also those that sequence parallelism keeps on other ranks."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).flatten(0, 1)


def _build_masks(tokens: Tensor, positions: Tensor | None, packed_tokens: PackedTokens | None) -> PackedMasks:
    if packed_tokens is not None:
        return PackedMasks(PackedLayout.build(packed_tokens.cu_seqlens))
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    return PackedMasks.from_positions(positions)


def make_qwen3_config(
    *,
    vocab_size: int,
    num_layers: int,
    dim: int,
    hidden_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float = 1_000_000.0,
    max_seq_len: int = 40960,
    norm_eps: float = 1e-6,
    init_std: float = 0.02,
) -> Qwen3Policy.Config:
    """Build the config of a dense Qwen3 policy with packed attention, untied, without a draft.

    Args:
        vocab_size: rows of the embedding and of the head.
        num_layers: decoder layers.
        dim: model width.
        hidden_dim: width of the MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of one head.
        rope_theta: RoPE base.
        max_seq_len: longest document, in tokens.
        norm_eps: of every RMSNorm.
        init_std: of the normal distribution that every matrix is drawn from.
    """
    matrix_init = {"weight": partial(nn.init.normal_, std=init_std)}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=norm_eps, param_init={"weight": nn.init.ones_})

    def attention() -> Module.Config:
        return make_gqa_config(
            dim=dim,
            n_heads=num_heads,
            n_kv_heads=num_kv_heads,
            head_dim=head_dim,
            wqkv_param_init=matrix_init,
            wo_param_init=matrix_init,
            inner_attention=PackedAttention.Config(),
            fuse_qkv=True,
            rope=AnyDtypeRoPE.Config(dim=head_dim, max_seq_len=max_seq_len, theta=rope_theta),
            qk_norm=norm(head_dim),
        )

    def layer() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=attention(),  # pyrefly: ignore[bad-argument-type]
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=matrix_init, w2w3_param_init=matrix_init
            ),
        )

    return Qwen3Policy.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=norm(dim),
        tok_embeddings=PolicyEmbedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=matrix_init),
        lm_head=HeadLinear.Config(in_features=dim, out_features=vocab_size, param_init=matrix_init),
        layers=[layer() for _ in range(num_layers)],
    )
