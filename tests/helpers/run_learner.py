"""Run the learner under torchrun on fixed rollouts and save what it did: gradients, weights, metrics.

    torchrun --nproc-per-node N tests/helpers/run_learner.py POLICY DRAFT OUT LAYOUT/VARIANT [LAYOUT/VARIANT ...]

DRAFT holds a directory for each family of drafts, by the name of its method. LAYOUT is a key of ``LAYOUTS``. Each run
writes ``OUT/LAYOUT/VARIANT.safetensors`` (clipped gradients of every step as ``grad/STEP/NAME``, final weights as
``weight/NAME``) and ``OUT/LAYOUT/VARIANT.json`` (metrics by step).
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from specco.titan import cpu_support

cpu_support.apply()

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402

from helpers.gpt_oss import make_gpt_oss_config  # noqa: E402
from specco.drafts.load import read_draft_config  # noqa: E402
from specco.packing import PackedTokens, pack_documents  # noqa: E402
from specco.rl.grpo import GrpoLoss  # noqa: E402
from specco.titan import learner as learner_module  # noqa: E402
from specco.titan.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint  # noqa: E402
from specco.titan.export import read_policy_config  # noqa: E402
from specco.titan.learner import Learner, policy_and_draft_groups  # noqa: E402
from specco.titan.policy import Policy, adapt_config  # noqa: E402
from specco.titan.registry import make_model_spec  # noqa: E402
from specco.titan.sizes import make_policy_config  # noqa: E402

NUM_STEPS = 3
TORCH_DTYPE_MAP["float64"] = torch.float64

LAYOUTS = {
    "1": {},
    "fsdp2": {},
    "dp_replicate2": {"data_parallel_replicate_degree": 2},
    "cp2": {"context_parallel_degree": 2},
    "cp4": {"context_parallel_degree": 4},
    "fsdp2_cp2": {"context_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "tp2_no_sp": {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
    "fsdp2_tp2": {"tensor_parallel_degree": 2},
    "cp2_tp2": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "ep2": {"expert_parallel_degree": 2},
    "pp2": {"pipeline_parallel_degree": 2},
    "pp2_gpipe": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"},
    "pp2_interleaved": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    "pp2_bfs": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS"},
    "pp2_zb": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"},
    "pp2_zbv": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
    "pp2_dualpipe": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"},
    "fsdp2_pp2": {"pipeline_parallel_degree": 2},
    "cp2_pp2": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
    "tp2_pp2": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    "tp2_pp2_no_sp": {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "enable_sequence_parallel": False,
    },
    "ep2_pp2": {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2},
    "tp2_ep2_pp2": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "fsdp2_cp2_ep2": {"context_parallel_degree": 2, "expert_parallel_degree": 2},
    "tp2_ep2": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "tp2_ep2_no_sp": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "enable_sequence_parallel": False},
    "fsdp2_tp2_ep4": {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
    "fsdp2_tp2_ep2": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "cp2_tp2_ep2": {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
}
"""Degrees of each layout; the ranks that are left are FSDP's."""

VARIANTS = {
    "joint": {},
    "dflash": {"family": "dflash"},
    "dspark": {"family": "dspark"},
    "dspark_microbatches": {"family": "dspark", "max_tokens": 24},
    "dspark_permuted": {"family": "dspark", "is_permuted": True},
    "dspark_lopsided": {"family": "dspark", "is_lopsided": True},
    "weight0": {"draft_weight": 0.0},
    "alone": {"has_draft": False},
    "microbatches": {"max_tokens": 24},
    "microbatches2": {"num_microbatches": 2},
    "microbatches4": {"num_microbatches": 4},
    "permuted": {"is_permuted": True},
    "checkpointed": {"activation_checkpoint": FullAC.Config()},
    "lopsided": {"is_lopsided": True},
    "few_targets": {"has_few_targets": True},
    "dspark_few_targets": {"family": "dspark", "has_few_targets": True},
    "kl": {"has_reference": True},
    "nan_draft": {"poisoned": "draft."},
    "nan_policy": {"poisoned": "layers."},
}
"""What each run changes; "joint" is the plain one."""

MODEL_VARIANTS = {
    "moe": {"model": "moe"},
    "moe_alone": {"model": "moe", "has_draft": False},
    "moe_dflash": {"model": "moe", "family": "dflash"},
    "moe_lopsided": {"model": "moe", "is_lopsided": True},
    "moe_checkpointed": {"model": "moe", "activation_checkpoint": FullAC.Config()},
    "llama3": {"model": "llama3"},
    "llama3_alone": {"model": "llama3", "has_draft": False},
    "gptoss": {"model": "gpt_oss"},
    "gptoss_alone": {"model": "gpt_oss", "has_draft": False},
}
"""Runs of other policies than the dense Qwen3 of POLICY."""

SIZES = {"num_layers": 3, "dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "top_k": 2}
MODELS: dict[str, Callable[..., Policy.Config]] = {
    "moe": partial(make_policy_config, "qwen3", **EXPERTS, **SIZES),
    "llama3": partial(make_policy_config, "llama3", **SIZES),
    "gpt_oss": lambda **sizes: adapt_config(make_gpt_oss_config(**sizes, **EXPERTS, **SIZES)),
}

CHECKPOINT_VARIANTS = {
    "saved": {"is_saved": True},
    "resumed": {"is_resumed": True},
    "dspark_saved": {"family": "dspark", "is_saved": True},
    "dspark_resumed": {"family": "dspark", "is_resumed": True},
    "saved_in_stages": {"is_saved": True, "checkpoints": "stages"},
    "resumed_from_stages": {"is_resumed": True, "checkpoints": "stages"},
}
"""Runs that end after the first step with a checkpoint, and runs that go on from it, in whatever layout."""


def make_documents(step: int, has_few_targets: bool) -> dict[str, list[torch.Tensor]]:
    """Return the same documents on every rank: short, long, one token, and one without targets.

    With ``has_few_targets`` the last two tokens of the longest document are the only ones that are trained, so that
    most ranks have nothing to train.
    """
    generator = torch.Generator().manual_seed(step)
    lengths = [9, 1, 17, 2, 12, 6]
    documents = {"ids": [], "masks": [], "inference_logprobs": [], "advantages": []}
    for index, length in enumerate(lengths):
        documents["ids"].append(torch.randint(64, (length,), generator=generator))
        if has_few_targets:
            documents["masks"].append((torch.arange(length) >= length - 2) & (length == max(lengths)))
        else:
            documents["masks"].append((torch.arange(length) >= min(3, length - 1)) & (index != 5))
        documents["inference_logprobs"].append(-4 * torch.rand(length, generator=generator, dtype=torch.float64))
        advantage = torch.randn((), generator=generator, dtype=torch.float64)
        documents["advantages"].append(advantage.expand(length))
    return documents


def make_microbatches(
    learner: Learner,
    step: int,
    *,
    max_tokens: int = 64,
    num_microbatches: int = 1,
    is_permuted: bool = False,
    is_lopsided: bool = False,
    has_few_targets: bool = False,
) -> list[PackedTokens]:
    """Return this data-parallel rank's share of the step's documents, packed.

    ``num_microbatches`` deals them out; ``max_tokens`` may cut each share further.
    """
    documents = make_documents(step, has_few_targets)
    order = list(range(len(documents["ids"])))
    if is_permuted:
        order = order[::-1]
    rank, size = learner.data_parallel_rank, learner.data_parallel_size
    mine = (order if rank == 0 else []) if is_lopsided else order[rank::size]
    microbatches = []
    for indices in (mine[start::num_microbatches] for start in range(num_microbatches)):
        values = {name: [documents[name][i] for i in indices] for name in ("inference_logprobs", "advantages")}
        ids, masks = [documents["ids"][i] for i in indices], [documents["masks"][i] for i in indices]
        microbatches += pack_documents(ids, masks, max_tokens=max_tokens, sample_ids=indices, row_values=values)
    return microbatches


class SharedDims(ParallelDims):
    """One set of process groups a layout: each has threads of gloo that wake up until the process ends."""

    built: ClassVar[dict[str, ParallelDims]] = {}

    @classmethod
    def from_config(cls, parallelism_config: ParallelismConfig, world_size: int) -> ParallelDims:
        key = repr(parallelism_config)
        if key not in cls.built:
            cls.built[key] = super().from_config(parallelism_config, world_size)
        return cls.built[key]

    def build_mesh(self) -> DeviceMesh:
        return super().build_mesh() if self._world_mesh is None else self._world_mesh


learner_module.ParallelDims = SharedDims


def build_learner(
    policy_path: str, draft_path: str, layout: str, has_draft: bool, *, model: str | None = None, **changes: object
) -> Learner:
    """Build a float64 learner whose clipping is at work; ``model`` is a key of ``MODELS``, None: that of POLICY."""
    wide = {"mixed_precision_param": "float64", "mixed_precision_reduce": "float64", "dtype": "float64"}
    config = Learner.Config(
        model_spec=make_model_spec(
            read_policy_config(policy_path) if model is None else MODELS[model](vocab_size=64, max_seq_len=64),
            flavor="test",
            draft=read_draft_config(draft_path) if has_draft else None,
        ),
        policy_path=policy_path if model is None else "",
        draft_path=draft_path if has_draft else "",
        optimizer=OptimizersContainer.Config(param_groups=policy_and_draft_groups(1e-3, 2e-3 if has_draft else None)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(max_norm=0.05, steps=NUM_STEPS, disable_cuda_graphs=True, **wide),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **LAYOUTS[layout]),
        draft_max_norm=0.5,
        chunk_rows=5,
    )
    learner = replace(config, **changes).build()
    if model is not None:
        fill_policy(learner)
    return learner


@torch.no_grad()
def fill_policy(learner: Learner) -> None:
    """Draw each weight of the policy from its name, the same in any layout."""
    for name, parameter in learner.policy.named_parameters():
        name = canonical_fqn(name)
        if not name.startswith("draft."):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            whole = 1 + 0.1 * whole if parameter.ndim == 1 else 0.2 * whole
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def run_variant(policy_path: str, draft_path: str, out: Path, layout: str, name: str) -> None:
    """Run the steps of one variant and save them on rank 0."""
    changes = dict((VARIANTS | MODEL_VARIANTS | CHECKPOINT_VARIANTS)[name])
    batch_choices = ("max_tokens", "num_microbatches", "is_permuted", "is_lopsided", "has_few_targets")
    batch = {key: changes.pop(key) for key in batch_choices if key in changes}
    poisoned = changes.pop("poisoned", None)
    loss = GrpoLoss()
    if changes.pop("has_reference", False):
        loss, changes["reference_path"] = GrpoLoss(kl_coef=0.1), policy_path
    is_saved, is_resumed = changes.pop("is_saved", False), changes.pop("is_resumed", False)
    family = changes.pop("family", "eagle3")
    draft_path, checkpoints = f"{draft_path}/{family}", out.parent / "checkpoints" / changes.pop("checkpoints", family)
    learner = build_learner(policy_path, draft_path, layout, changes.pop("has_draft", True), **changes)
    parameters = {canonical_fqn(n): p for n, p in learner.policy.named_parameters()}
    if is_resumed:
        load_checkpoint(list_checkpoints(checkpoints)[-1], {"learner": learner})
    tensors, metrics = {}, []

    def save_gradients(*_: object) -> None:
        for parameter_name, parameter in parameters.items():
            if parameter.grad is not None:
                tensors[f"grad/{learner.num_steps}/{parameter_name}"] = parameter.grad.full_tensor().clone()

    def poison(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan") if learner.num_steps == 1 else grad

    for optimizer in learner.optimizers:
        optimizer.register_step_pre_hook(save_gradients)
    if poisoned is not None:
        for parameter in [p for n, p in parameters.items() if n.startswith(poisoned)][:1]:  # none on other stages
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.copy_(poison(p.grad)))
    for step in range(learner.num_steps, 1 if is_saved else NUM_STEPS):
        metrics.append(learner.step(make_microbatches(learner, step, **batch), loss))
    if is_saved:
        save_checkpoint(checkpoints, 1, {"learner": learner}, keep=1)
    for parameter_name, parameter in parameters.items():
        tensors[f"weight/{parameter_name}"] = parameter.detach().full_tensor().clone()
    for buffer_name, buffer in learner.policy.named_buffers():
        if buffer_name.endswith("tokens_per_expert_E"):
            tensors[f"count/{canonical_fqn(buffer_name)}"] = sum_counts(learner, buffer)
    learner.close()
    for served_name, weight in list_served_weights(learner):
        tensors[f"served/{served_name}"] = weight.clone()
    tensors = gather_stages(learner, tensors)
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps(metrics))


def list_served_weights(learner: Learner) -> list[tuple[str, torch.Tensor]]:
    """Return what an engine is given of policy and draft; every rank must be given the same."""
    weights = list(learner.policy_weights()) if learner.policy.config.architecture == "qwen3" else []
    if learner.draft_config is not None:
        weights += [(f"draft.{name}", weight) for name, weight in learner.draft_weights()]
    sums = [None] * dist.get_world_size()
    dist.all_gather_object(sums, [(name, weight.double().sum().item()) for name, weight in weights])
    assert all(other == sums[0] for other in sums), "ranks serve different weights"
    return weights


def gather_stages(learner: Learner, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of all stages of a pipeline."""
    if learner.pp_group is None:
        return tensors
    parts: list[dict[str, torch.Tensor]] = [{}] * learner.pp_group.size()
    dist.all_gather_object(parts, tensors, group=learner.pp_group)
    return {name: tensor for part in parts for name, tensor in part.items()}


def sum_counts(learner: Learner, buffer: torch.Tensor) -> torch.Tensor:
    """Return what all ranks have counted, each row once."""
    total = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer.clone()
    if learner.loss_group is not None:
        dist.all_reduce(total, group=learner.loss_group)
    return total


def run_differing_peers(policy_path: str, draft_path: str, out: Path, layout: str) -> None:
    """Give the last rank alone its documents in another order; save what each rank's learner says to that."""
    learner = build_learner(policy_path, f"{draft_path}/eagle3", layout, True)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    message = ""
    try:
        learner.step(make_microbatches(learner, 0, is_permuted=is_last), GrpoLoss())
    except ValueError as error:
        message = str(error)
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if dist.get_rank() == 0:
        save_file({}, out / "differing_peers.safetensors")
        (out / "differing_peers.json").write_text(json.dumps(messages))


def main() -> None:
    policy_path, draft_path, out, *runs = sys.argv[1:]
    for run in runs:
        layout, name = run.split("/")
        if name == "differing_peers":
            run_differing_peers(policy_path, draft_path, Path(out) / layout, layout)
            continue
        run_variant(policy_path, draft_path, Path(out) / layout, layout, name)
    # no rank leaves while another still saves
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
