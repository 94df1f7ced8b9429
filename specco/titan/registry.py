"""Flavours of the policy, as torchtitan's ``ModelSpec``."""

from __future__ import annotations

from typing import Any

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from specco.drafts.base import DraftConfig
from specco.titan.parallelize import parallelize_policy
from specco.titan.policy import Qwen3Policy, make_qwen3_config

FLAVORS: dict[str, dict[str, Any]] = {
    # 1.3 million parameters: the demo's policy
    "tiny": {"num_layers": 8, "dim": 128, "hidden_dim": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
    "smoke": {"num_layers": 4, "dim": 64, "hidden_dim": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32},
}
"""Sizes by name, arguments of ``make_qwen3_config``; all have a vocabulary of 64 and RoPE base 10,000."""

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
    config = make_qwen3_config(
        vocab_size=64, rope_theta=10_000.0, max_seq_len=1024, init_std=SMALL_INIT_STD, **FLAVORS[flavor]
    )
    return make_model_spec(config, flavor=flavor, draft=draft, is_frozen=is_frozen)


def make_model_spec(
    config: Qwen3Policy.Config, *, flavor: str, draft: DraftConfig | None = None, is_frozen: bool = False
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
        name="qwen3",
        flavor=flavor,
        model=config,
        parallelize_fn=parallelize_policy,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )
