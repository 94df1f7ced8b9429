"""The single call as one registered op, ``specco::attend``: autograd, DTensor and torch.compile see it whole.

A process group goes by name and a layout by its offsets, since an op takes neither.
"""

# No postponed annotations here: torch reads the op's schema from them.
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from specco.ops.branch_keys import BranchKeys, as_mask, sink_gradient
from specco.ops.checks import find_pass_problem, find_trunk_problem, raise_together
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype
from specco.ops.passes import PassInputs, backward_pass, build_query_pass, forward_pass
from specco.ops.ring import RingShards, TrafficCounters
from specco.ops.rows import as_dense


@lru_cache(maxsize=32)
def _build_layout(cu_seqlens: tuple[int, ...], cp_size: int, cp_rank: int) -> PackedLayout:
    return PackedLayout.build(cu_seqlens, cp_size, cp_rank)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: BranchKeys | None,
    anchors: Tensor | None,
    layout: PackedLayout,
    trunk_inclusive: bool,
    window: int | None,
    query_offset: Tensor | None,
    group: dist.ProcessGroup | None,
    scale: float,
    backend: str,
) -> PassInputs:
    chosen = get_backend(backend, q.device, q.dtype)
    query_pass = build_query_pass(layout, chosen, q, k.shape[1], anchors, trunk_inclusive, window, query_offset)
    return PassInputs(query_pass, RingShards(k, v, layout, group, TrafficCounters()), as_dense(q), branch, scale)


def _as_branch(k_branch: Tensor | None, v_branch: Tensor | None, mask: Tensor | None) -> BranchKeys | None:
    if k_branch is None or v_branch is None or k_branch.shape[1] == 0:
        return None
    return BranchKeys([k_branch], [v_branch], mask)


@torch.library.custom_op("specco::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_branch: Tensor | None,
    v_branch: Tensor | None,
    sinks: Tensor | None,
    anchors: Tensor | None,
    branch_mask: Tensor | None,
    query_offset: Tensor | None,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    trunk_inclusive: bool,
    window: int | None,
    group_name: str | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    layout = _build_layout(tuple(cu_seqlens.tolist()), cp_size, cp_rank)
    group = None if group_name is None else _resolve_process_group(cast(Any, group_name))
    keys = [] if k_branch is None else [k_branch]
    values = [] if v_branch is None else [v_branch]
    problem = (
        layout.find_group_problem(group)
        or find_trunk_problem(k, v, layout)
        or find_pass_problem(q, k, keys, values, anchors, layout, branch_mask, window, query_offset, sinks)
    )
    raise_together(problem, group, q.device)
    branch = _as_branch(k_branch, v_branch, branch_mask)
    inputs = _prepare(q, k, v, branch, anchors, layout, trunk_inclusive, window, query_offset, group, scale, backend)
    return forward_pass(inputs, sinks)


@_attend.register_fake
def _(q, k, v, k_branch, v_branch, sinks, *others):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


@torch.library.custom_op("specco::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_branch: Tensor | None,
    v_branch: Tensor | None,
    sinks: Tensor | None,
    anchors: Tensor | None,
    branch_mask: Tensor | None,
    query_offset: Tensor | None,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    trunk_inclusive: bool,
    window: int | None,
    group_name: str | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = _build_layout(tuple(cu_seqlens.tolist()), cp_size, cp_rank)
    group = None if group_name is None else _resolve_process_group(cast(Any, group_name))
    branch = _as_branch(k_branch, v_branch, branch_mask)
    inputs = _prepare(q, k, v, branch, anchors, layout, trunk_inclusive, window, query_offset, group, scale, backend)
    dq, dtrunk, dkeys, dvalues = backward_pass(inputs, dout, out, lse)
    assert dtrunk is not None
    dk, dv = dtrunk
    if dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr():
        dv = dv.clone()  # halves of one buffer; an op's outputs must not share memory
    # An op returns tensors, never None, and no two of them share memory: what is absent is empty.
    dsinks = q.new_empty(0) if sinks is None else sink_gradient(dout, out, lse, sinks)
    dbranch = [
        grads[0] if grads else q.new_empty(0) if given is None else given.new_zeros(given.shape)
        for grads, given in ((dkeys, k_branch), (dvalues, v_branch))
    ]
    return dq, dk, dv, dbranch[0], dbranch[1], dsinks


@_attend_backward.register_fake
def _(dout, out, lse, q, k, v, k_branch, v_branch, sinks, *others):
    absent = [
        q.new_empty(0) if given is None else given.new_empty(given.shape) for given in (k_branch, v_branch, sinks)
    ]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *absent


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:10])
    ctx.options = inputs[10:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout, _):
    out, lse, *tensors = ctx.saved_tensors
    grads = torch.ops.specco.attend_backward(dout, out, lse, *tensors, *ctx.options)
    grads = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    return (*grads, *[None] * 11)


_attend.register_autograd(_backward, setup_context=_setup_context)


def attend_once(
    q: Tensor,
    k_trunk: Tensor,
    v_trunk: Tensor,
    k_branch: Tensor | None,
    v_branch: Tensor | None,
    anchors: Tensor | None,
    layout: PackedLayout,
    trunk_inclusive: bool,
    branch_mask: Tensor | str | None,
    window: int | None,
    query_offset: Tensor | None,
    sinks: Tensor | None,
    group: dist.ProcessGroup | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Call the registered op; arguments as in ``branch_attention``. Returns ``out`` and ``lse``."""
    mask = branch_mask
    if isinstance(branch_mask, str):
        problem = None
        if branch_mask != "causal":
            problem = f"branch_mask={branch_mask!r}; allowed are None, 'causal', or a bool tensor"
        raise_together(problem, None, q.device)
        mask = as_mask(branch_mask, q.shape[1], q.device)
    return torch.ops.specco.attend(
        q,
        k_trunk,
        v_trunk,
        k_branch,
        v_branch,
        sinks,
        anchors,
        mask,
        query_offset,
        layout.cu_seqlens,
        layout.cp_size,
        layout.cp_rank,
        trunk_inclusive,
        window,
        None if group is None else group.group_name,
        scale,
        backend,
    )
