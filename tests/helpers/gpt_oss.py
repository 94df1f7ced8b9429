"""A tiny GPT-OSS: torchtitan's own debug model with smaller numbers in its config."""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.gpt_oss.model import GptOssModel

WINDOW = 4
"""Sliding window of every other layer, the first among them, in tokens."""


def make_gpt_oss_config(
    *,
    vocab_size: int,
    max_seq_len: int,
    num_layers: int,
    dim: int,
    hidden_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_experts: int,
    top_k: int,
) -> GptOssModel.Config:
    """Return torchtitan's config with sinks, windows, biases, YaRN and experts; arguments as ``make_policy_config``."""
    config = gptoss_configs["debugmodel"](moe_comm_backend="standard")
    config.vocab_size, config.dim, config.layers = vocab_size, dim, config.layers[:num_layers]
    config.tok_embeddings = replace(config.tok_embeddings, num_embeddings=vocab_size, embedding_dim=dim)
    config.lm_head = replace(config.lm_head, in_features=dim, out_features=vocab_size)
    config.norm = replace(config.norm, normalized_shape=dim)
    heads = {"n_heads": num_heads, "n_kv_heads": num_kv_heads, "head_dim": head_dim}
    qkv_features, features = (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim
    for layer in config.layers:
        # one object each: a sharding plan is written into it
        layer.attention_norm, layer.ffn_norm = replace(config.norm), replace(config.norm)
        attention, moe = layer.attention, layer.moe
        qkv = attention.qkv_linear
        layer.attention = replace(
            attention,
            dim=dim,
            **heads,
            qkv_linear=replace(qkv, **heads, wqkv=replace(qkv.wqkv, in_features=dim, out_features=qkv_features)),
            wo=replace(attention.wo, in_features=features, out_features=dim),
            rope=replace(attention.rope, dim=head_dim, max_seq_len=max_seq_len),
            sliding_window_size=None if attention.sliding_window_size is None else WINDOW,
        )
        gate = replace(moe.router.gate, in_features=dim, out_features=num_experts)
        inner = replace(moe.routed_experts.inner_experts, dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
        dispatcher = replace(moe.routed_experts.token_dispatcher, num_experts=num_experts, top_k=top_k)
        layer.moe = replace(
            moe,
            num_experts=num_experts,
            router=replace(moe.router, num_experts=num_experts, top_k=top_k, gate=gate),
            routed_experts=replace(moe.routed_experts, inner_experts=inner, token_dispatcher=dispatcher),
        )
    return config
