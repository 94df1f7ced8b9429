"""Policies by their sizes: the configs of torchtitan's Qwen3, Qwen3-MoE and Llama 3 from a handful of numbers."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

from specco.titan.attention import PackedAttention
from specco.titan.policy import Policy, adapt_config


def make_policy_config(
    architecture: Literal["qwen3", "llama3"],
    *,
    vocab_size: int,
    num_layers: int,
    dim: int,
    hidden_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_experts: int = 0,
    top_k: int = 0,
    rope_theta: float = 1_000_000.0,
    rope_scaling: dict[str, Any] | None = None,
    max_seq_len: int = 40960,
    norm_eps: float = 1e-6,
    init_std: float = 0.02,
) -> Policy.Config:
    """Build the config of a policy with packed attention, untied, without a draft.

    Args:
        architecture: "qwen3" normalises queries and keys; "llama3" does not and rotates neighbouring pairs.
        vocab_size: rows of the embedding and of the head.
        num_layers: decoder layers.
        dim: model width.
        hidden_dim: width of the MLP, or of one expert.
        num_heads, num_kv_heads, head_dim: query heads, key and value heads, size of one.
        num_experts: experts of every layer; 0: dense. Qwen3 alone.
        top_k: experts of a token.
        rope_theta: RoPE base.
        rope_scaling: further fields of torchtitan's RoPE config; None: plain.
        max_seq_len: longest document, in tokens.
        norm_eps: of every RMSNorm.
        init_std: of the normal distribution that every matrix is drawn from.

    Raises:
        ValueError: experts of Llama 3, or a ``top_k`` that is not among the experts.
    """
    if num_experts and architecture != "qwen3":
        raise ValueError(f'num_experts is {num_experts} and architecture {architecture!r}; only "qwen3" has experts')
    if num_experts and not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; allowed are 1 to num_experts={num_experts}")
    init = {"weight": partial(nn.init.normal_, std=init_std)}
    is_qwen3 = architecture == "qwen3"
    rope = (CosSinRoPE if is_qwen3 else ComplexRoPE).Config(
        dim=head_dim, max_seq_len=max_seq_len, theta=rope_theta, **(rope_scaling or {})
    )
    heads: dict[str, Any] = {"n_heads": num_heads, "n_kv_heads": num_kv_heads, "head_dim": head_dim, "rope": rope}
    heads |= {"qk_norm": _make_norm(head_dim, norm_eps)} if is_qwen3 else {}
    shape = (is_qwen3, dim, hidden_dim, heads, (num_experts, top_k), norm_eps, init)
    return adapt_config(
        (Qwen3Model if is_qwen3 else Llama3Model).Config(
            vocab_size=vocab_size,
            dim=dim,
            norm=_make_norm(dim, norm_eps),
            tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=init),
            lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=init),
            layers=[_make_layer(*shape) for _ in range(num_layers)],
        )
    )


def _make_norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})


def _make_layer(
    is_qwen3: bool,
    dim: int,
    hidden_dim: int,
    heads: dict[str, Any],
    experts: tuple[int, int],
    norm_eps: float,
    init: dict[str, Any],
) -> Any:
    """Return the config of one layer; ``experts`` are their number, 0: none, and those of a token."""
    inner = PackedAttention.Config()
    attention = make_gqa_config(
        dim=dim, wqkv_param_init=init, wo_param_init=init, inner_attention=inner, fuse_qkv=True, **heads
    )
    block = Qwen3TransformerBlock if is_qwen3 else Llama3TransformerBlock
    dense = {"dim": dim, "hidden_dim": hidden_dim, "w1_param_init": init, "w2w3_param_init": init}
    return block.Config(
        attention_norm=_make_norm(dim, norm_eps),
        ffn_norm=_make_norm(dim, norm_eps),
        attention=attention,
        feed_forward=None if experts[0] else make_ffn_config(**dense),
        moe=_make_experts(dim, hidden_dim, *experts, init) if experts[0] else None,
    )


def _make_experts(dim: int, hidden_dim: int, num_experts: int, top_k: int, init: dict[str, Any]) -> Any:
    """Return the config of Qwen3's experts: softmax over all, the ``top_k`` largest renormalised to 1."""
    return make_moe_config(
        num_experts=num_experts,
        router=make_router_config(
            dim=dim, num_experts=num_experts, gate_param_init=init, top_k=top_k, score_func="softmax", route_norm=True
        ),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=hidden_dim,
            num_experts=num_experts,
            top_k=top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), init["weight"]),
            comm_backend="standard",
        ),
    )
