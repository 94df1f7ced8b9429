"""The policy: a decoder of torchtitan with taps on its layers and a draft model as a submodule.

    tokens -> tok_embeddings -> layer 0 -> ... -> layer n-1 -> norm -> hidden -> (lm_head, applied by the chunked head)
                   | detached      | detached, where j is in target_layer_ids
                   v               v
                 embeddings      taps  ->  draft  ->  DraftRows

Taps are taken between the layers, outside of what activation checkpointing recomputes. The policy's own arithmetic does
not know whether there is a draft: it reads detached tensors, and its parameters are initialised after the policy's.
A stage of a pipeline is a policy without the modules of the other stages; the last one has the draft, and is handed the
taps of the others.

torchtitan's decoders differ by their layers' configs and by their sharding, not by their ``forward``. So one class
serves Qwen3, Qwen3-MoE, Llama 3 and GPT-OSS, and ``adapt_config`` makes its config from any config of theirs, layer by
layer: each layer's kind of attention is chosen by its own config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, TransformerBlock
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from specco.distributed.taps import Taps
from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.registry import build_draft
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.titan.attention import PackedAttention, PackedMasks
from specco.titan.head import HeadLinear
from specco.titan.layers import (
    AnyDtypeComplexRoPE,
    AnyDtypeDispatcher,
    AnyDtypeExperts,
    AnyDtypeGptOssExperts,
    AnyDtypeRoPE,
    BiasedRowsLinear,
    LocalGate,
    PackedMoE,
    PackedMoEBlock,
    PolicyEmbedding,
    SinkAttention,
    keep_state_shardings,
)


class Architecture(NamedTuple):
    """One of torchtitan's decoders: its config, what writes its TP and EP plan into the config, its adapter."""

    config: type[Decoder.Config]
    set_sharding: Callable[..., None]
    state_dict_adapter: type[StateDictAdapter]


def _set_llama3_sharding(config: Any, *, enable_sp: bool, enable_ep: bool) -> None:
    set_llama3_sharding_config(config, enable_sp=enable_sp)


ARCHITECTURES = {
    "qwen3": Architecture(Qwen3Model.Config, set_qwen3_sharding_config, Qwen3StateDictAdapter),
    "llama3": Architecture(Llama3Model.Config, _set_llama3_sharding, Llama3StateDictAdapter),
    "gpt_oss": Architecture(GptOssModel.Config, set_gpt_oss_sharding_config, GptOssStateDictAdapter),
}


class Policy(Decoder):
    """A decoder with taps; without a draft it computes what torchtitan's own decoder computes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        architecture: str
        """torchtitan's decoder that this one was made from, a key of ``ARCHITECTURES``."""

        draft: DraftConfig | None = None
        """The draft to carry; its ``target_layer_ids`` say where the taps are. None: no draft, no taps."""

        is_frozen: bool = False
        """Whether the policy's own parameters take no gradient (pre-training of the draft)."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take over what the job's config says of the model: sequence length and sharding plan."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            ARCHITECTURES[self.architecture].set_sharding(
                self,
                enable_sp=config.parallelism.enable_sequence_parallel,
                enable_ep=config.parallelism.expert_parallel_degree > 1,
            )
            for layer in self.layers:
                if layer.moe is not None:
                    keep_state_shardings(layer.moe)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return (parameters, multiply-adds times two per token), as torchtitan counts them."""
            attention = self.layers[0].attention
            head_dim = attention.head_dim or self.dim // attention.n_heads
            return get_moe_model_nparams_and_flops(self, model, attention.n_heads, 2 * head_dim, seq_len)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.is_frozen:
            self.requires_grad_(False)
        self.draft: Draft | None = None if config.draft is None else build_draft(config.draft)
        # the stage that embeds the mask token need not be the one that has the draft
        self.mask_token_id = None if self.draft is None else self.draft.mask_token_id
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
        taps: Taps | None = None,
    ) -> Tensor | tuple[Tensor, DraftRows | None]:
        """Run the policy as torchtitan's trainer does, or, given ``packed_tokens``, up to the chunked head.

        Args:
            tokens: int64 ``[B, L]``, this rank's rows in layout order; of a stage after the first ``[B, L, D]``, the
                output of the layer before it.
            positions: int64 ``[B, L]``, position of each token in its document; None: every row is one document.
            attention_masks: of the packed rows; None: one rank, from ``packed_tokens`` or ``positions``.
            packed_tokens: the packed microbatch, global, of which ``tokens`` are this rank's rows.
            taps: what other stages have sent, by the names of their modules; None where there are none.

        Returns:
            Without ``packed_tokens``: logits ``[B, L, V]``, or the final normalised hidden rows ``[B, L, D]`` where
            ``_skip_lm_head`` is set. With them: the hidden rows, under tensor parallelism a DTensor, whole on every
            rank of "tp", and the draft's rows or None where there is no draft. Of a stage before the last: the output
            ``[B, L, D]`` of its last layer.
        """
        if attention_masks is None:
            attention_masks = _build_masks(tokens, positions, packed_tokens)
        draft = None if packed_tokens is None else self.draft
        rows = {} if taps is None else dict(taps.rows)
        wanted = {EMBEDDING, *map(get_layer_name, draft.target_layer_ids)} if draft is not None else set()

        def keep(name: str, output: Tensor) -> None:
            if name in wanted:
                rows[name] = _flatten_local(output)

        h, mask_embedding = self._embed(tokens, None if packed_tokens is None else self.mask_token_id)
        keep(self._get_input_name(), h)
        for name, layer in self.layers.items():
            h = layer(h, attention_masks, positions)
            keep(get_layer_name(name), h)
        if self.lm_head is None:
            return h
        hidden = h if self.norm is None else self.norm(h)
        if packed_tokens is None:
            return hidden if self._skip_lm_head else self.lm_head(hidden)
        if draft is None:
            return hidden, None
        if taps is not None and draft.mask_token_id is not None:
            mask_embedding = taps.step_rows[EMBEDDING][0]
        tapped = torch.cat([rows[get_layer_name(layer_id)] for layer_id in draft.target_layer_ids], dim=-1)
        tapped, embeddings = _gather_rows(tapped, h), _gather_rows(rows[EMBEDDING], h)
        layout, group = attention_masks.layout, attention_masks.group
        return hidden, draft(tapped, embeddings, packed_tokens, layout, group, mask_embedding)

    def _get_input_name(self) -> str:
        """Return the tap that is the input of the first layer here."""
        if self.tok_embeddings is not None:
            return EMBEDDING
        first = min((int(name) for name in self.layers), default=len(self.config.layers))
        return get_layer_name(first - 1)

    def _embed(self, tokens: Tensor, mask_token_id: int | None) -> tuple[Tensor, Tensor | None]:
        """Return (embeddings of the tokens, detached embedding ``[D]`` of the mask token or None)."""
        if self.tok_embeddings is None:
            return tokens, None
        if mask_token_id is None:
            return self.tok_embeddings(tokens), None
        h, masks = self.tok_embeddings(tokens, detached_ids=tokens.new_tensor([[mask_token_id]]))
        return h, masks[0, 0]


EMBEDDING = "tok_embeddings"
"""Name of the embedding in the policy, and of its tap."""


def get_layer_name(layer_id: int | str) -> str:
    """Return the name of a layer in the policy, and of its tap."""
    return f"layers.{layer_id}"


def _flatten_local(x: Tensor) -> Tensor:
    """Return the detached rows ``[rows, D]`` that this rank holds of ``[B, L, D]``."""
    x = x.detach()
    return (x.to_local() if isinstance(x, DTensor) else x).flatten(0, 1)


def _gather_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return all rows ``[T, width]`` of which this rank holds ``rows``, as it holds those of ``like`` ``[1, T, D]``."""
    if not isinstance(like, DTensor):
        return rows
    shape = torch.Size((1, like.shape[1], rows.shape[1]))
    stride = (shape[1] * shape[2], shape[2], 1)
    whole = DTensor.from_local(rows[None], like.device_mesh, like.placements, shape=shape, stride=stride)
    return whole.full_tensor()[0]


def _build_masks(tokens: Tensor, positions: Tensor | None, packed_tokens: PackedTokens | None) -> PackedMasks:
    if packed_tokens is not None:
        return PackedMasks(PackedLayout.build(packed_tokens.cu_seqlens))
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    return PackedMasks.from_positions(positions)


def adapt_config(config: Decoder.Config) -> Policy.Config:
    """Make the policy's config from one of torchtitan's, for example ``qwen3_configs["8B"](attn_backend="flex")``.

    Experts lose their load-balancing bias: neither Hugging Face's models nor vLLM's have one, and what is trained is
    what is served.

    Args:
        config: of a decoder in ``ARCHITECTURES``; left as it is.

    Raises:
        ValueError: another class, or a layer with a part that the policy has no counterpart of, naming the layer.
    """
    names = {architecture.config: name for name, architecture in ARCHITECTURES.items()}
    if type(config) not in names:
        raise ValueError(f"config is of {_name(config)}; a policy can be made from {[_name(kind) for kind in names]}")
    layers = []
    for layer_id, layer in enumerate(config.layers):
        try:
            layers.append(_adapt_layer(layer))
        except ValueError as error:
            raise ValueError(f"layer {layer_id}: {error}") from error
    return _rebuild(
        Policy.Config,
        config,
        architecture=names[type(config)],
        tok_embeddings=_rebuild(PolicyEmbedding.Config, config.tok_embeddings),
        lm_head=_rebuild(HeadLinear.Config, config.lm_head),
        layers=layers,
    )


def _rebuild(config_class: Any, config: Any, **changes: Any) -> Any:
    """Return a config of another class with the fields of ``config``, some of them changed."""
    return config_class(**{field.name: getattr(config, field.name) for field in fields(config)} | changes)


def _adapt_layer(layer: TransformerBlock.Config) -> TransformerBlock.Config:
    attention = _adapt_attention(layer.attention)
    if layer.moe is None:
        return replace(layer, attention=attention)
    experts = layer.moe.routed_experts
    if type(experts.token_dispatcher) is not AllToAllTokenDispatcher.Config:
        raise ValueError(f'its experts are dispatched by {_name(experts.token_dispatcher)}; supported is "standard"')
    if layer.moe.shared_experts is not None:
        raise ValueError("its MoE has a shared expert; supported are routed ones alone")
    experts = replace(
        experts,
        inner_experts=_adapt_experts(experts.inner_experts),
        token_dispatcher=_rebuild(AnyDtypeDispatcher.Config, experts.token_dispatcher),
    )
    router = replace(layer.moe.router, gate=_rebuild(LocalGate.Config, layer.moe.router.gate))
    moe = _rebuild(PackedMoE.Config, layer.moe, router=router, routed_experts=experts, load_balance_coeff=None)
    return _rebuild(PackedMoEBlock.Config, layer, attention=attention, moe=moe)


def _adapt_attention(attention: Any) -> Any:
    """Return the policy's counterpart of one layer's attention; the place where a further kind comes in."""
    kind = type(attention)
    if kind is GQAttention.Config:
        return replace(attention, rope=_adapt_rope(attention.rope), inner_attention=PackedAttention.Config())
    if kind is GptOssAttention.Config:
        inner = PackedAttention.Config(window=attention.sliding_window_size)
        parts = {"wo": _rebuild(BiasedRowsLinear.Config, attention.wo), "rope": _adapt_rope(attention.rope)}
        return _rebuild(SinkAttention.Config, attention, **parts, inner_attention=inner)
    supported = [_name(kind) for kind in (GQAttention.Config, GptOssAttention.Config)]
    raise ValueError(f"its attention is {_name(attention)}; supported are {supported}")


def _adapt_experts(experts: Any) -> Any:
    classes: dict[Any, Any] = {
        GroupedExperts.Config: AnyDtypeExperts.Config,
        GptOssGroupedExperts.Config: AnyDtypeGptOssExperts.Config,
    }
    if type(experts) not in classes:
        raise ValueError(f"its experts are {_name(experts)}; supported are {[_name(kind) for kind in classes]}")
    return _rebuild(classes[type(experts)], experts)


def _adapt_rope(rope: Any) -> Any:
    classes: dict[Any, Any] = {CosSinRoPE.Config: AnyDtypeRoPE.Config, ComplexRoPE.Config: AnyDtypeComplexRoPE.Config}
    if type(rope) not in classes:
        raise ValueError(f"its RoPE is {_name(rope)}; supported are {[_name(kind) for kind in classes]}")
    return _rebuild(classes[type(rope)], rope)


def _name(kind: Any) -> str:
    return (kind if isinstance(kind, type) else type(kind)).__qualname__.removesuffix(".Config")
