"""Tensor parallelism of a draft: which of its modules are cut which way, for every family.

    x --enter--> q_proj k_proj v_proj (columns: heads) --> attention of these heads --> o_proj (rows) --all-reduce-->
    x --enter--> gate_proj up_proj (columns) ------------> product -----------------> down_proj (rows) --all-reduce-->

``enter`` copies in the forward and adds up the gradient in the backward, once a block of projections. Between the
blocks every rank of "tp" holds the same rows and computes the same, gradients included. The heads of the vocabulary are
cut by rows, as the policy's is; the chunked losses know it by their ``VocabShard``.

Modules are told by their names, the same in all families, so that a family needs no plan of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from specco.drafts.base import Draft, DraftConfig
from specco.vocab_parallel import VocabShard

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
GATHERED_COLUMNS = ("fc",)
ROWS = ("o_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
VOCABULARY = ("lm_head", "markov_w2")
ENTERED = ("self_attn", "mlp")
"""Blocks whose input is read by several modules of ``COLUMNS``."""


def check_draft_tp(config: DraftConfig, degree: int) -> None:
    """Refuse a draft that cannot be cut.

    Raises:
        ValueError: a size of the draft that the degree does not divide, naming both.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"):
        size = getattr(config, name)
        if size % degree:
            raise ValueError(f"the draft's {name} is {size}; tensor_parallel_degree={degree} must divide it")


def apply_draft_tp(draft: Draft, mesh: DeviceMesh) -> None:
    """Cut a draft over a mesh of one axis, in place; its parameters become DTensors, its rows stay plain tensors.

    Args:
        draft: on any device, meta included; call it before FSDP.
        mesh: "tp". Collective: every rank must call.

    Raises:
        ValueError: see ``check_draft_tp``.
    """
    check_draft_tp(draft.config, mesh.size())
    group = mesh.get_group()
    for path, module in draft.named_modules():
        name = path.rpartition(".")[2]
        if name in ENTERED:
            module.register_forward_pre_hook(partial(_enter, VocabShard(group, 0, 0)))
        is_row_cut = name in COLUMNS or name in GATHERED_COLUMNS or name in VOCABULARY
        placement = Shard(0) if is_row_cut else Shard(1) if name in ROWS else Replicate()
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(parameter_name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        if name not in VOCABULARY and list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(partial(_wrap_input, mesh, *_INPUTS.get(name, (Replicate(), None))))
            module.register_forward_hook(partial(_unwrap_output, _OUTPUTS.get(name, Replicate())))


_INPUTS: dict[str, tuple[Placement, Placement | None]] = {
    **dict.fromkeys(COLUMNS, (Replicate(), Partial())),
    **dict.fromkeys(ROWS, (Shard(-1), None)),
    **dict.fromkeys(HEAD_NORMS, (Shard(-2), None)),
}
"""Placement of a module's input and, where it differs, of its gradient; whole on every rank unless listed."""

_OUTPUTS: dict[str, Placement] = {
    **dict.fromkeys(COLUMNS, Shard(-1)),
    **dict.fromkeys(HEAD_NORMS, Shard(-2)),
}
"""Placement of a module's output; whole on every rank unless listed."""


def _enter(shard: VocabShard, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    is_activation = [isinstance(x, Tensor) and x.is_floating_point() for x in args]
    return tuple(shard.enter(x) if flag else x for x, flag in zip(args, is_activation, strict=True))


def _wrap_input(
    mesh: DeviceMesh, placement: Placement, grad: Placement | None, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    (x,) = args
    grads = None if grad is None else [grad]
    return (DTensor.from_local(x, mesh, [placement], run_check=False, grad_placements=grads),)


def _unwrap_output(placement: Placement, module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
    return output.redistribute(placements=[placement]).to_local()
