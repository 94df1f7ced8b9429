"""Lay policy and draft out over the mesh: torchtitan's plan for the policy, an FSDP2 group of its own for the draft."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3.parallelize import parallelize_qwen3

from specco.drafts.base import Draft
from specco.titan.policy import Qwen3Policy


def parallelize_policy(
    model: Qwen3Policy,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    **kwargs: Any,
) -> Qwen3Policy:
    """Apply data parallelism to a policy that may carry a ``draft``; torchtitan's ``parallelize_fn`` of our flavours.

    The draft becomes one FSDP2 group, never part of a policy group or of the root's, and stays unsharded from its
    forward to its backward, since the chunked head uses its ``lm_head`` after its forward.

    Args:
        model: policy on the meta device.
        parallel_dims: degrees and meshes; ``dp_replicate`` and ``fsdp`` may exceed 1.
        training: precision of parameters and reductions.
        parallelism: must name ``spmd_backend="partial_dtensor"``.
        kwargs: what torchtitan's ``parallelize_qwen3`` takes besides.

    Raises:
        ValueError: a degree that is not supported yet, or another backend.
    """
    check_parallelism(parallelism)
    if model.draft is not None:
        shard_draft(model.draft, parallel_dims=parallel_dims, training=training)
    parallelize_qwen3(model, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **kwargs)
    if dist.get_backend() == "gloo":
        # gloo has no PREMUL_SUM, which FSDP2 uses for a gradient factor that is not the world size
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def check_parallelism(parallelism: ParallelismConfig) -> None:
    """Refuse, when the config is read, what the learner does not run.

    Raises:
        ValueError: naming the degree and its value.
    """
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(f'parallelism.spmd_backend is {parallelism.spmd_backend!r}; allowed is "partial_dtensor"')
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        degree = getattr(parallelism, f"{name}_degree")
        if degree != 1:
            raise ValueError(f"parallelism.{name}_degree is {degree}; the learner supports 1 (data parallelism only)")


def shard_draft(draft: Draft, *, parallel_dims: ParallelDims, training: TrainingConfig) -> None:
    """Make the draft one FSDP2 group over the data-parallel mesh, in place."""
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    fully_shard(draft, mesh=parallel_dims.get_mesh(axes), mp_policy=policy, reshard_after_forward=False)
