"""Checks of what a caller passes to the op, and the agreement that lets every rank raise the same error."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from specco.ops.layout import PackedLayout


def raise_together(problem: str | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ValueError on every rank if any rank has a problem, naming the first such rank.

    Collective over ``group``: one all-reduce of 8 bytes, so that a bad argument of one rank leaves no other waiting in
    the ring; a second exchange only where there is something to raise. None = this process alone.
    """
    if group is None:
        if problem is not None:
            raise ValueError(problem)
        return
    has_problem = torch.tensor([int(problem is not None)], device=device)
    dist.all_reduce(has_problem, op=dist.ReduceOp.MAX, group=group)
    if not int(has_problem):
        return
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    rank = next(rank for rank, entry in enumerate(problems) if entry is not None)
    raise ValueError(f"{problems[rank]} (on context-parallel rank {rank})")


def find_trunk_problem(k: Tensor, v: Tensor, layout: PackedLayout) -> str | None:
    """Return what is wrong with a trunk's keys and values, or None."""
    if k.dim() != 3 or k.shape != v.shape:
        return f"k_trunk has shape {tuple(k.shape)} and v_trunk {tuple(v.shape)}; both must be [T, K, H]"
    if k.shape[0] != layout.num_rows:
        return f"k_trunk has {k.shape[0]} rows, but the layout has num_rows={layout.num_rows}; the two must be equal"
    if not k.is_floating_point() or k.dtype != v.dtype:
        return f"k_trunk is {k.dtype} and v_trunk {v.dtype}; both must be of one float dtype"
    if k.device != v.device:
        return f"k_trunk is on {k.device} and v_trunk on {v.device}; both must be on one device"
    return None


def find_query_problem(q: Tensor, k: Tensor, anchors: Tensor | None, layout: PackedLayout) -> str | None:
    """Return what is wrong with the queries and their anchors, or None."""
    if q.dim() != 4:
        return f"q has shape {tuple(q.shape)}; it must be [B, G, N, H]"
    if q.dtype != k.dtype:
        return f"q is {q.dtype}, but k_trunk is {k.dtype}; dtypes must not be mixed"
    if q.device != k.device:
        return f"q is on {q.device}, but k_trunk is on {k.device}"
    num_heads, head_dim = q.shape[2:]
    num_kv_heads = k.shape[1]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        return f"q has {num_heads} heads, which is no multiple of the {num_kv_heads} key heads"
    if head_dim != k.shape[2]:
        return f"q has head size {head_dim}, but k_trunk has {k.shape[2]}; the two must be equal"
    if q.shape[1] == 0:
        return "q has 0 queries a branch; there must be at least 1"
    if anchors is None:
        if q.shape[0] != layout.num_rows:
            return f"q has {q.shape[0]} rows and anchors is None, but the layout has num_rows={layout.num_rows}"
        return None
    return _find_anchor_problem(anchors, q.shape[0], layout)


def _find_anchor_problem(anchors: Tensor, num_branches: int, layout: PackedLayout) -> str | None:
    if anchors.dtype != torch.int64 or anchors.shape != (num_branches,):
        return (
            f"anchors has shape {tuple(anchors.shape)} and dtype {anchors.dtype}; "
            f"it must be int64 [{num_branches}], one for each branch of q"
        )
    rows = anchors.detach().cpu()
    outside = rows[(rows < 0) | (rows >= layout.num_rows)]
    if outside.numel():
        return f"anchors has row {int(outside[0])}; allowed are local rows 0 to {layout.num_rows - 1}"
    on_padding = rows[layout.global_rows[rows] < 0]
    if on_padding.numel():
        return f"anchors has row {int(on_padding[0])}, which is padding; anchors must be on rows of a document"
    return None


def find_branch_problem(
    q: Tensor, keys: list[Tensor], values: list[Tensor], branch_mask: Tensor | str | None
) -> str | None:
    """Return what is wrong with the branches' own keys, values and mask, or None."""
    if len(keys) != len(values):
        return f"k_branch has {len(keys)} tensors and v_branch {len(values)}; they must come in pairs"
    for key, value in zip(keys, values, strict=True):
        if key.dim() != 4 or key.shape != value.shape:
            return f"k_branch has shape {tuple(key.shape)} and v_branch {tuple(value.shape)}; both must be [B, M, K, H]"
        if key.dtype != q.dtype or value.dtype != q.dtype:
            return f"k_branch is {key.dtype} and v_branch {value.dtype}, but q is {q.dtype}; dtypes must not be mixed"
        if key.shape[0] != q.shape[0] or key.shape[3] != q.shape[3] or key.shape[2:] != keys[0].shape[2:]:
            return (
                f"k_branch has shape {tuple(key.shape)}, but q has shape {tuple(q.shape)}; "
                "branches and head size must be equal"
            )
        if key.shape[2] == 0 or q.shape[2] % key.shape[2]:
            return f"q has {q.shape[2]} heads, which is no multiple of the {key.shape[2]} heads of k_branch"
    if branch_mask is None:
        return None
    num_queries, num_keys = q.shape[1], sum(key.shape[1] for key in keys)
    if isinstance(branch_mask, str):
        if branch_mask != "causal":
            return f"branch_mask={branch_mask!r}; allowed are None, 'causal', or a bool tensor"
        if num_queries != num_keys:
            return f"branch_mask='causal' with {num_queries} queries and {num_keys} keys; the two must be equal"
        return None
    allowed = ((num_queries, num_keys), (q.shape[0], num_queries, num_keys))
    if branch_mask.dtype != torch.bool or tuple(branch_mask.shape) not in allowed:
        return (
            f"branch_mask has shape {tuple(branch_mask.shape)} and dtype {branch_mask.dtype}; "
            f"it must be bool of shape {allowed[0]} or {allowed[1]}"
        )
    return None


def find_option_problem(q: Tensor, window: int | None, query_offset: Tensor | None, sinks: Tensor | None) -> str | None:
    """Return what is wrong with window, query offsets and sinks, or None."""
    if window is not None and window < 1:
        return f"window={window}; it must be at least 1 token"
    if query_offset is not None and (
        query_offset.shape != (q.shape[1],) or query_offset.is_floating_point() or query_offset.dtype == torch.bool
    ):
        return (
            f"query_offset has shape {tuple(query_offset.shape)} and dtype {query_offset.dtype}; "
            f"it must be integer [{q.shape[1]}]"
        )
    if sinks is not None and (sinks.shape != (q.shape[2],) or not sinks.is_floating_point()):
        return f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; it must be float [{q.shape[2]}]"
    return None


def find_pass_problem(
    q: Tensor,
    k: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    anchors: Tensor | None,
    layout: PackedLayout,
    branch_mask: Tensor | str | None,
    window: int | None,
    query_offset: Tensor | None,
    sinks: Tensor | None,
) -> str | None:
    """Return what is wrong with the arguments of one pass, or None."""
    return (
        find_query_problem(q, k, anchors, layout)
        or find_branch_problem(q, keys, values, branch_mask)
        or find_option_problem(q, window, query_offset, sinks)
    )
