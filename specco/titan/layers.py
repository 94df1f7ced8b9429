"""torchtitan's layers as the policies need them: packed rows, any dtype, and nothing else changed.

Each class computes what its torchtitan base computes, to the bit, in the dtypes that the base keeps; what differs:

- ``PolicyEmbedding`` can embed further tokens, without gradient.
- ``AnyDtypeRoPE``, ``AnyDtypeComplexRoPE``: no cast of wider inputs to float32, so that a float64 model is float64.
- ``AnyDtypeExperts``, ``AnyDtypeGptOssExperts``, ``AnyDtypeDispatcher``: the same for experts, which torchtitan
  computes in bfloat16 whatever the model's dtype, and for the sum of their outputs. Other dtypes take a loop over the
  experts.
- ``PackedMoE`` in a ``PackedMoEBlock`` counts the tokens of each expert over real rows, each once, and takes any number
  of rows under tensor parallelism; ``LocalGate`` is its router's gate.
- ``SinkAttention``: GPT-OSS's attention with its sinks in the op's own softmax, which knows their gradient;
  ``BiasedRowsLinear`` is its output projection, whose bias gets its whole gradient under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, TransformerBlock
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.sharding import ShardingConfig

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
        """Return the embeddings of ``input``; given ``detached_ids`` ``[B, L]``, also theirs, without gradient.

        Under tensor parallelism the former are a DTensor, the latter whole on every rank.
        """
        embed_fn = self._embed_fn or super().forward
        embeddings = embed_fn(input)
        if detached_ids is None:
            return embeddings
        with torch.no_grad():
            detached = embed_fn(detached_ids)
            return embeddings, detached.full_tensor() if isinstance(detached, DTensor) else detached


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
        weights = (_to_local(weight) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w2, w3 in zip(rows, *weights, strict=True)]
        return torch.cat(outputs)


class AnyDtypeGptOssExperts(GptOssGroupedExperts):
    """torchtitan's ``GptOssGroupedExperts``; rows that are not bfloat16 are computed in their own dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Run each expert on its rows; arguments and result are those of ``AnyDtypeExperts.forward``."""
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weight = self.mlp1_weight_EGD
        is_cut = isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ())
        num_summands = cast(DTensor, weight).device_mesh["tp"].size() if is_cut else 1
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
        parameters = (_to_local(getattr(self, name)) for name in names)
        outputs = []
        for x, w1, b1, w2, b2 in zip(x_RD.split(num_tokens_per_expert_E.tolist()), *parameters, strict=True):
            hidden = swiglu(x @ w1.t() + b1, limit=self.swiglu_limit)
            outputs.append(hidden @ w2.t() + ScaleBiasForward.apply(b2, num_summands, x.dtype))
        return torch.cat(outputs)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


class LocalGate(Linear):
    """torchtitan's ``Linear`` on this rank's rows, or on its summand of their gradient, without DTensor."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``; under TP each rank's gradient of the two is one summand."""

        def localize(tensor: Tensor) -> Tensor:
            return tensor.to_local(grad_placements=[Partial()]) if isinstance(tensor, DTensor) else tensor

        return F.linear(input, localize(self.weight), None if self.bias is None else localize(self.bias))


class PackedMoE(MoE):
    """torchtitan's ``MoE`` that leaves padding rows, made-up ones and recomputed ones out of ``tokens_per_expert_E``.

    Padding rows are still routed, so that every rank's shapes stay those of its rows; nothing reads what comes back.

    Under tensor parallelism router and experts compute on local tensors, in one of two ways:

    - Without expert parallelism the hidden width of every expert is cut over "tp": each rank takes all rows, and its
      output is a summand of theirs.
    - With it whole experts are spread over "ep", which holds ranks of "tp": each rank takes its part of the rows, any
      number of them, also none.

    Either way what a rank computes as gradient of the gate, and without expert parallelism of the rows and of their
    scores, is a summand. torchtitan's own plan takes the parts of the rows for equal ones.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: PackedMasks) -> Tensor:  # pyrefly: ignore[bad-override]
        """Route each row to its experts. Collective over "tp" and "ep": every rank must call.

        Args:
            x_BLD: ``[B, L, D]``; under TP a DTensor.
            attention_masks: says which rows are padding.

        Returns:
            ``[B, L, D]``, placed like ``x_BLD``.
        """
        is_real = (attention_masks.layout.global_rows >= 0).view(x_BLD.shape[0], -1, 1).to(x_BLD.device)
        is_counted = is_real & attention_masks.is_counted
        if not isinstance(x_BLD, DTensor):
            return self._route(x_BLD, is_counted)
        is_spread = self.routed_experts.token_dispatcher.ep_mesh is not None
        rows = [Shard(1) if is_spread else Replicate()]
        results = [Shard(1) if is_spread else Partial()]
        mesh, x = x_BLD.device_mesh, x_BLD.redistribute(placements=rows)
        counted = DTensor.from_local(is_counted, mesh, [Replicate()], run_check=False).redistribute(placements=rows)
        out = self._route(x.to_local(grad_placements=results), counted.to_local())
        out = DTensor.from_local(out, mesh, results, run_check=False, shape=x.shape, stride=x.stride())
        return out.redistribute(placements=x_BLD.placements)

    def _route(self, x: Tensor, is_counted: Tensor) -> Tensor:
        """Return the experts' output of ``[B, l, D]`` rows, of which bool ``[B, l, 1]`` enter the statistics."""
        scores, expert_ids, all_scores = self.router(x, self.expert_bias_E)
        is_routed = torch.zeros_like(all_scores, dtype=torch.bool).scatter_(-1, expert_ids, True)
        if self.training and not _is_recomputing():
            with torch.no_grad():
                _to_local(self.tokens_per_expert_E).add_((is_routed & is_counted).sum(dim=(0, 1)))
        return self.routed_experts(x, scores, expert_ids, is_routed.sum(dim=(0, 1)))


def _is_recomputing() -> bool:
    """Tell whether activation checkpointing runs this forward once more, within a backward."""
    return torch._C._current_graph_task_id() != -1


def keep_state_shardings(moe: MoE.Config) -> None:
    """Leave of torchtitan's plan for a MoE what it says of parameters and buffers: ``PackedMoE`` places the rest."""
    for config in (moe, moe.router.gate, moe.routed_experts):
        assert config.sharding_config is not None
        config.sharding_config = ShardingConfig(state_shardings=config.sharding_config.state_shardings)


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


class BiasedRowsLinear(ScaledBiasRowwiseLinear):
    """torchtitan's ``ScaledBiasRowwiseLinear``, which under TP leaves the bias one rank's share of its gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's summand of ``input @ weight.T + bias``; its ``input`` is cut over "tp"."""
        bias = ScaleBiasForward.apply(_to_local(self.bias), self.tp_degree, self.bias.dtype)
        return F.linear(input, _to_local(self.weight), bias)


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
