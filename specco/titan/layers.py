"""torchtitan's layers as the policies need them: packed rows, any dtype, and nothing else changed.

Each class computes what its torchtitan base computes, to the bit, in the dtypes that the base keeps; what differs:

- ``PolicyEmbedding`` can embed further tokens, without gradient.
- ``AnyDtypeRoPE``, ``AnyDtypeComplexRoPE``: no cast of wider inputs to float32, so that a float64 model is float64.
- ``AnyDtypeExperts``, ``AnyDtypeDispatcher``: the same for experts, which torchtitan computes in bfloat16 whatever the
  model's dtype, and for the sum of their outputs. Other dtypes take a loop over the experts.
- ``PackedMoE`` in a ``PackedMoEBlock`` counts the tokens of each expert over real rows, not over padding.
- ``SinkAttention``: GPT-OSS's attention with its sinks in the op's own softmax, which knows their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, TransformerBlock
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.ops.scatter_add import deterministic_scatter_add

from specco.titan.attention import PackedMasks


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
    """torchtitan's ``CosSinRoPE`` without the cast to float32.

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


class AnyDtypeComplexRoPE(ComplexRoPE):
    """torchtitan's ``ComplexRoPE`` without the cast of float64 to float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate neighbouring pairs of the head size.

        Args:
            query: ``[B, L, N, H]``.
            key: ``[B, L, K, H]``.
            rope_cache: complex ``[1 or B, L, 1, H / 2]``.

        Returns:
            The rotated two, of their own dtype.
        """

        def rotate(x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * rope_cache).flatten(3).type_as(x)

        return rotate(query), rotate(key)


class AnyDtypeExperts(GroupedExperts):
    """torchtitan's ``GroupedExperts``; rows that are not bfloat16 are computed in their own dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Run each expert on its rows.

        Args:
            x_RD: ``[R, D]``, rows sorted by expert.
            num_tokens_per_expert_E: int64 ``[E]``, rows of each expert of this rank; copied to the host.

        Returns:
            ``[R, D]``.
        """
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w2, w3 in zip(rows, *weights, strict=True)]
        return torch.cat(outputs)


class AnyDtypeDispatcher(AllToAllTokenDispatcher):
    """torchtitan's ``AllToAllTokenDispatcher``, whose sum over a token's experts is float32, or float64 for float64."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Bring the experts' outputs back to their tokens, weigh them and add them up.

        Collective over the "ep" mesh, where there is one: every rank must call.

        Args:
            routed_output_RD: ``[R, D]``, outputs sorted by expert.
            metadata: what ``dispatch`` returned.
            x_TD: ``[T, D]``, the tokens that were dispatched.

        Returns:
            ``[T, D]``.
        """
        if self.ep_mesh is not None:
            routed_output_RD = self._unpermute(routed_output_RD, metadata.input_shape, metadata.permuted_indices)
            routed_output_RD = self._combine_token_exchange(
                routed_output_RD, self.ep_mesh.get_group(), metadata.input_splits, metadata.output_splits
            )
        wide = routed_output_RD.to(torch.promote_types(routed_output_RD.dtype, torch.float32))
        weighed = (wide * metadata.topk_scores_experts_sorted_N[:, None]).to(x_TD.dtype)
        index = metadata.token_indices_experts_sorted_N[:, None].expand_as(weighed)
        return deterministic_scatter_add(torch.zeros_like(x_TD), index, weighed)


class PackedMoE(MoE):
    """torchtitan's ``MoE`` that leaves padding rows, and made-up ones, out of ``tokens_per_expert_E``.

    Padding rows are still routed, so that every rank's shapes stay those of its rows; nothing reads what comes back.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: PackedMasks) -> Tensor:  # pyrefly: ignore[bad-override]
        """Route each row to its experts.

        Args:
            x_BLD: ``[B, L, D]``; under TP a DTensor.
            attention_masks: says which rows are padding.

        Returns:
            ``[B, L, D]``.
        """
        scores, expert_ids, all_scores = self.router(x_BLD, self.expert_bias_E)
        is_routed = torch.zeros_like(all_scores, dtype=torch.bool).scatter_(-1, expert_ids, True)
        num_tokens_per_expert = is_routed.sum(dim=(0, 1))
        if self.training and attention_masks.is_counted:
            with torch.no_grad():
                is_counted = is_routed & _find_real_rows(is_routed, attention_masks)
                self.tokens_per_expert_E.add_(is_counted.sum(dim=(0, 1)))
        out = self.routed_experts(x_BLD, scores, expert_ids, num_tokens_per_expert)
        return out if self.shared_experts is None else out + self.shared_experts(x_BLD)


def _find_real_rows(like: Tensor, masks: PackedMasks) -> Tensor:
    """Return bool ``[B, L, 1]``, True where a row is no padding; placed like ``like``, ``[B, L, ...]``."""
    is_real = (masks.layout.global_rows >= 0).view(like.shape[0], -1, 1).to(like.device)
    if not isinstance(like, DTensor):
        return is_real
    replicated = [Replicate()] * like.device_mesh.ndim
    is_real = DTensor.from_local(is_real, like.device_mesh, replicated, run_check=False)
    return is_real.redistribute(placements=like.placements)


class PackedMoEBlock(TransformerBlock):
    """The block of Qwen3-MoE and GPT-OSS, which hands the masks to its MoE too."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    moe_enabled = True
    """torchtitan's FSDP looks for it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.moe is not None, "a block without experts stays torchtitan's own"
        self.attention = config.attention.build()
        self.moe = config.moe.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(self, x: Tensor, attention_masks: PackedMasks, positions: Tensor | None = None) -> Tensor:
        """Run attention and experts on ``[B, L, D]``."""
        x = x + self.attention(self.attention_norm(x), attention_masks, positions)
        return x + self.moe(self.ffn_norm(x), attention_masks)


class SinkAttention(GptOssAttention):
    """torchtitan's GPT-OSS attention, whose sinks enter the softmax of ``PackedAttention``."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """Attend on ``[B, L, D]``; under TP the sinks are those of this rank's heads."""
        q, k, v = self.qkv_linear(x)
        q, k = self.rope(q, k, positions)
        sinks = self.sinks
        if isinstance(sinks, DTensor):
            sinks = sinks.to_local(grad_placements=sinks.placements)
        out = self.inner_attention(
            q,
            k,
            v,
            attention_masks=attention_masks,
            scale=self.softmax_scale,
            enable_gqa=self.enable_gqa,
            sinks=sinks,
        )
        return self.wo(out.flatten(2))
