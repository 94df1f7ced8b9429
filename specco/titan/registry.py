"""Flavours of the policy, as torchtitan's ``ModelSpec``."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from specco.drafts.base import DraftConfig
from specco.titan.parallelize import parallelize_policy
from specco.titan.policy import ARCHITECTURES, Policy
from specco.titan.sizes import make_policy_config

TINY: dict[str, Any] = {"num_layers": 8, "dim": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
SMOKE: dict[str, Any] = {"num_layers": 4, "dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}

FLAVORS: dict[str, dict[str, Any]] = {
    # 1.3 million parameters: the demo's policy
    "tiny": {"architecture": "qwen3", "hidden_dim": 256} | TINY,
    "smoke": {"architecture": "qwen3", "hidden_dim": 128} | SMOKE,
    "smoke_moe": {"architecture": "qwen3", "hidden_dim": 64, "num_experts": 8, "top_k": 2} | SMOKE,
    "smoke_llama3": {"architecture": "llama3", "hidden_dim": 128} | SMOKE,
}
"""Sizes by name, arguments of ``make_policy_config``; all have a vocabulary of 64 and RoPE base 10,000."""

SMALL_INIT_STD = 0.07
"""Near one over the square root of the width; Qwen3's 0.02 is meant for wider matrices."""


def model_registry(flavor: str, *, draft: DraftConfig | None = None, is_frozen: bool = False) -> ModelSpec:
    """Return the spec of a flavour.

    Args:
        flavor: a key of ``FLAVORS``.
        draft: config of a draft to carry, or None.
        is_frozen: whether only the draft is trained.

    Raises:
        ValueError: an unknown flavour.
    """
    if flavor not in FLAVORS:
        raise ValueError(f"flavor is {flavor!r}; allowed are {sorted(FLAVORS)}")
    config = make_policy_config(
        vocab_size=64, rope_theta=10_000.0, max_seq_len=1024, init_std=SMALL_INIT_STD, **FLAVORS[flavor]
    )
    return make_model_spec(config, flavor=flavor, draft=draft, is_frozen=is_frozen)


def make_model_spec(
    config: Policy.Config, *, flavor: str, draft: DraftConfig | None = None, is_frozen: bool = False
) -> ModelSpec:
    """Wrap a policy's config, one read from a Hugging Face directory for instance, into torchtitan's ``ModelSpec``.

    Args:
        config: of the policy; ``draft`` and ``is_frozen`` are set on it.
        flavor: name of the size, for logs.
        draft: config of a draft to carry, or None.
        is_frozen: whether only the draft is trained.
    """
    config.draft = draft
    config.is_frozen = is_frozen
    return ModelSpec(
        name=config.architecture,
        flavor=flavor,
        model=config,
        parallelize_fn=parallelize_policy,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=ARCHITECTURES[config.architecture].state_dict_adapter,
    )
