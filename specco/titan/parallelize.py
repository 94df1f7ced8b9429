"""Lay policy and draft out over the mesh: torchtitan's plan for the policy, an FSDP2 group of its own for the draft."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from specco.distributed.draft_plan import apply_draft_tp, check_draft_tp
from specco.distributed.pipeline_order import SCHEDULES
from specco.drafts.base import Draft
from specco.titan.policy import Policy
from specco.titan.stages import PipelineShape


def parallelize_policy(
    model: Policy,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> Policy:
    """Lay out a policy that may carry a ``draft``; torchtitan's ``parallelize_fn`` of our flavours.

    torchtitan's own steps in its own order, but for its context parallelism: our inner attention is told its group with
    every batch (``PackedMasks``), and nothing of the model has to be wrapped.

    The draft becomes one FSDP2 group, never part of a policy group or of the root's, and stays unsharded from its
    forward to its backward, since the chunked head uses its ``lm_head`` after its forward.

    Args:
        model: policy on the meta device.
        parallel_dims: degrees and meshes.
        training: precision of parameters and reductions.
        parallelism: see ``check_parallelism``.
        compile_config: whether the layers are compiled.
        ac_config: which activations are recomputed; None: none.
        dump_folder: of activation checkpointing's debug output.

    Raises:
        ValueError: a degree that is not supported, or another backend.
    """
    check_parallelism(parallelism)
    if parallel_dims.tp_enabled and model.draft is not None:
        apply_draft_tp(model.draft, parallel_dims.get_mesh("tp"))
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if model.draft is not None:
        shard_draft(model.draft, parallel_dims=parallel_dims, training=training)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(_get_data_axes(parallel_dims, "fsdp")),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        edp_mesh=parallel_dims.get_mesh(_get_data_axes(parallel_dims, "efsdp")) if parallel_dims.ep_enabled else None,
    )
    if dist.get_backend() == "gloo":
        # gloo has no PREMUL_SUM, which FSDP2 uses for a gradient factor that is not the world size
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def _get_data_axes(parallel_dims: ParallelDims, shard_axis: str) -> list[str]:
    """Return the axes that parameters are sharded and gradients are summed over.

    "fsdp" holds the ranks of "cp"; experts have "efsdp", what "ep" leaves of "fsdp" and "tp".
    """
    return ["dp_replicate", shard_axis] if parallel_dims.dp_replicate_enabled else [shard_axis]


def check_parallelism(parallelism: ParallelismConfig) -> None:
    """Refuse, when the config is read, what the learner does not run.

    Raises:
        ValueError: naming the degree and its value.
    """
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(f'parallelism.spmd_backend is {parallelism.spmd_backend!r}; allowed is "partial_dtensor"')
    if parallelism.pipeline_parallel_degree > 1:
        _check_pipeline(parallelism)


def _check_pipeline(parallelism: ParallelismConfig) -> None:
    if parallelism.pipeline_parallel_schedule not in SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule is {parallelism.pipeline_parallel_schedule!r}; allowed are "
            f"{', '.join(SCHEDULES)}"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv is {parallelism.pipeline_parallel_schedule_csv!r}; the "
            "learner runs schedules by their names alone, as the number of microbatches differs from step to step"
        )


def check_model(config: Policy.Config, parallelism: ParallelismConfig) -> None:
    """Refuse, before anything is built, a model that the degrees do not fit.

    Where ``data_parallel_shard_degree`` is -1, the number of ranks is torchrun's ``WORLD_SIZE``.

    Raises:
        ValueError: naming both sides.
    """
    tp = parallelism.tensor_parallel_degree
    if config.enable_weight_tying:
        raise ValueError("the policy's enable_weight_tying is True; the learner trains an embedding and a head apart")
    for layer_id, layer in enumerate(config.layers):
        for name in ("n_heads", "n_kv_heads"):
            heads = getattr(layer.attention, name)
            if heads is not None and heads % tp:
                raise ValueError(f"layer {layer_id} has {name}={heads}; tensor_parallel_degree={tp} must divide it")
    if config.draft is not None and config.draft.hidden_size != config.dim:
        raise ValueError(f"the draft has hidden_size={config.draft.hidden_size}; it must be the policy's, {config.dim}")
    if config.draft is not None and tp > 1:
        check_draft_tp(config.draft, tp)
    if parallelism.pipeline_parallel_degree > 1:
        PipelineShape.build(config, parallelism, rank=0)
    _check_experts(config, parallelism)


def _check_experts(config: Policy.Config, parallelism: ParallelismConfig) -> None:
    """Refuse degrees that cut experts, or the ranks they are spread over, into uneven parts."""
    tp, ep = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    moes = [layer.moe for layer in config.layers if layer.moe is not None]
    if ep > 1 and not moes:
        raise ValueError(f"parallelism.expert_parallel_degree is {ep}, but the policy has no experts")
    for moe in moes:
        hidden_dim = moe.routed_experts.inner_experts.hidden_dim
        if moe.num_experts % ep:
            raise ValueError(
                f"parallelism.expert_parallel_degree is {ep}; it must divide num_experts={moe.num_experts}"
            )
        if ep == 1 and hidden_dim % tp:
            raise ValueError(f"experts have hidden_dim={hidden_dim}; tensor_parallel_degree={tp} must divide it")
    cp, dp_shard = parallelism.context_parallel_degree, parallelism.data_parallel_shard_degree
    if dp_shard == -1:
        if "WORLD_SIZE" not in os.environ:
            return
        others = parallelism.data_parallel_replicate_degree * cp * tp * parallelism.pipeline_parallel_degree
        dp_shard = max(int(os.environ["WORLD_SIZE"]) // others, 1)
    if dp_shard * cp * tp % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep}; it must divide the {dp_shard * cp * tp} ranks of "
            f"data_parallel_shard_degree={dp_shard} x context_parallel_degree={cp} x tensor_parallel_degree={tp}"
        )


def check_trainer_parallelism(parallelism: ParallelismConfig) -> None:
    """Refuse, when the config is read, what torchtitan's own loop does not run with our packed attention.

    Raises:
        ValueError: naming the degree and its value.
    """
    names = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    _check_degrees(parallelism, names, "torchtitan's Trainer with a Policy")


def _check_degrees(parallelism: ParallelismConfig, names: tuple[str, ...], who: str) -> None:
    for name in names:
        degree = getattr(parallelism, f"{name}_degree")
        if degree != 1:
            raise ValueError(f"parallelism.{name}_degree is {degree}; {who} supports 1")


def shard_draft(draft: Draft, *, parallel_dims: ParallelDims, training: TrainingConfig) -> None:
    """Make the draft one FSDP2 group over the policy's own data axes, in place."""
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    mesh = parallel_dims.get_mesh(_get_data_axes(parallel_dims, "fsdp"))
    fully_shard(draft, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
