"""Full-size learners as functions: model, draft, degrees, precision; bring your own environment and directories.

    PYTHONPATH=. python tools/estimate_memory.py qwen3_8b_eagle3

``policy_path`` and ``draft_path`` are empty: set them to Hugging Face directories of the model and of its draft. Every
config states its degrees in full, so that it fits one number of GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.qwen3 import qwen3_configs

from specco.drafts.base import DraftConfig
from specco.drafts.block import BlockConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.titan.learner import Learner, policy_and_draft_groups
from specco.titan.policy import Policy, adapt_config
from specco.titan.registry import make_model_spec

MASK_TOKEN_ID = 151669
"""The first id of Qwen3's padded vocabulary that its tokenizer does not use."""


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return ``count`` layers, two or more, evenly spread from the second to the last but two.

    Source: z-lab/dflash, ``build_target_layer_ids``.
    """
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def make_draft_config(draft_class: type[DraftConfig], policy: Policy.Config, *, intermediate_size: int) -> DraftConfig:
    """Return a draft of a policy's width, heads and vocabulary: EAGLE-3 on three taps, block drafts on five.

    Args:
        draft_class: one of the families.
        policy: whose draft it is.
        intermediate_size: of the draft's MLP, which is dense whatever the policy's is.
    """
    attention, num_layers = policy.layers[0].attention, len(policy.layers)
    shape: dict[str, Any] = {
        "hidden_size": policy.dim,
        "intermediate_size": intermediate_size,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": policy.vocab_size,
        "rope_theta": attention.rope.theta,
        "max_position_embeddings": attention.rope.max_seq_len,
    }
    if not issubclass(draft_class, BlockConfig):
        middle = num_layers // 2 - 1
        return draft_class(target_layer_ids=(1, middle, num_layers - 4), **shape)
    block_size = 7 if issubclass(draft_class, DSparkConfig) else 16
    blocks = {"num_hidden_layers": 5, "block_size": block_size, "mask_token_id": MASK_TOKEN_ID, "num_anchors": 512}
    names = {field.name for field in fields(draft_class)}
    assert names >= blocks.keys()
    return draft_class(target_layer_ids=spread_layers(num_layers, 5), **shape, **blocks)


def make_learner_config(
    flavor: str, draft_class: type[DraftConfig], *, intermediate_size: int, **degrees: int
) -> Learner.Config:
    """Return the config of a learner in bfloat16 over float32 weights, every layer's activations recomputed.

    Args:
        flavor: key of torchtitan's ``qwen3_configs``.
        draft_class: family of the draft.
        intermediate_size: of the draft's MLP.
        degrees: fields of ``ParallelismConfig`` without ``_degree``.
    """
    # the name of torchtitan's own attention, which is replaced
    policy = adapt_config(qwen3_configs[flavor](attn_backend="flex"))
    draft = make_draft_config(draft_class, policy, intermediate_size=intermediate_size)
    names: dict[str, Any] = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    return Learner.Config(
        model_spec=make_model_spec(policy, flavor=flavor, draft=draft),
        optimizer=OptimizersContainer.Config(param_groups=policy_and_draft_groups(1e-6, 1e-4, weight_decay=0.0)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **names),
        activation_checkpoint=FullAC.Config(),
    )


def qwen3_8b(draft_class: type[DraftConfig]) -> Learner.Config:
    """Qwen3-8B with a draft on 8 GPUs: fsdp2 x tp2 x cp2."""
    degrees = {"data_parallel_shard": 2, "tensor_parallel": 2, "context_parallel": 2}
    return make_learner_config("8B", draft_class, intermediate_size=12288, **degrees)


def qwen3_8b_pp2(draft_class: type[DraftConfig]) -> Learner.Config:
    """Qwen3-8B with a draft on 8 GPUs: tp2 x pp2 x cp2."""
    degrees = {"data_parallel_shard": 1, "tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2}
    return make_learner_config("8B", draft_class, intermediate_size=12288, **degrees)


def qwen3_30b_a3b_dflash() -> Learner.Config:
    """Qwen3-30B-A3B with DFlash on 8 GPUs: fsdp8, whose ranks share the experts (ep8)."""
    return make_learner_config(
        "30B-A3B", DFlashConfig, intermediate_size=6144, data_parallel_shard=8, expert_parallel=8
    )


def qwen3_235b_a22b_dflash() -> Learner.Config:
    """Qwen3-235B-A22B with DFlash on 64 GPUs: fsdp32 x cp2, whose ranks share the experts (ep16)."""
    return make_learner_config(
        "235B-A22B",
        DFlashConfig,
        intermediate_size=12288,
        data_parallel_shard=32,
        context_parallel=2,
        expert_parallel=16,
    )


def qwen3_235b_a22b_dflash_pp4() -> Learner.Config:
    """Qwen3-235B-A22B with DFlash on 64 GPUs: fsdp2 x tp4 x pp4 x cp2, the 16 ranks of a stage share the experts."""
    return make_learner_config(
        "235B-A22B",
        DFlashConfig,
        intermediate_size=12288,
        data_parallel_shard=2,
        tensor_parallel=4,
        pipeline_parallel=4,
        context_parallel=2,
        expert_parallel=16,
    )


FAMILIES = {"eagle3": Eagle3Config, "dflash": DFlashConfig, "dspark": DSparkConfig}

CONFIGS: dict[str, Callable[[], Learner.Config]] = {
    **{f"qwen3_8b_{name}": partial(qwen3_8b, draft_class) for name, draft_class in FAMILIES.items()},
    **{f"qwen3_8b_{name}_pp2": partial(qwen3_8b_pp2, draft_class) for name, draft_class in FAMILIES.items()},
    "qwen3_30b_a3b_dflash": qwen3_30b_a3b_dflash,
    "qwen3_235b_a22b_dflash": qwen3_235b_a22b_dflash,
    "qwen3_235b_a22b_dflash_pp4": qwen3_235b_a22b_dflash_pp4,
}
