"""Cases of branch attention: global inputs from a seed, the dense oracle, and the comparison on each rank's shard.

Every rank builds the same case and the same global inputs, runs the op on its own shard, whose padding rows are
poisoned with NaN, and compares with its rows of the oracle's result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specco.ops.branch_attention import Trunk, branch_attention
from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention
from specco.testing.tolerances import max_error


@dataclass(frozen=True)
class AttentionCase:
    """One call of the op, described by global facts.

    Args:
        lengths: tokens of each document.
        num_kv_heads: K.
        num_groups: query heads a key head, N = K * num_groups.
        head_dim: H.
        num_queries: G.
        num_keys: M, keys of a branch.
        anchors: global rows, any order, with repeats; None = every row.
        trunk_inclusive: whether the anchor's own row is seen.
        branch_mask: None, "causal", "shared" (random ``[G, M]``) or "each" (random ``[B, G, M]``).
        window: in tokens, or None.
        query_offset: one for each query, or None.
        has_sinks: with attention sinks.
        seed: of the values.
    """

    lengths: tuple[int, ...]
    num_kv_heads: int = 1
    num_groups: int = 2
    head_dim: int = 8
    num_queries: int = 1
    num_keys: int = 0
    anchors: tuple[int, ...] | None = None
    trunk_inclusive: bool = True
    branch_mask: str | None = None
    window: int | None = None
    query_offset: tuple[int, ...] | None = None
    has_sinks: bool = False
    seed: int = 0

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Inputs:
    """Global tensors of a case; ``options`` are the keyword arguments that op and oracle share."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_branch: Tensor | None
    v_branch: Tensor | None
    sinks: Tensor | None
    dout: Tensor
    anchors: Tensor | None
    branch_mask: Tensor | str | None
    options: dict[str, Any] = field(default_factory=dict)


def make_inputs(case: AttentionCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Draw the values of a case, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    num_rows = sum(case.lengths)
    num_branches = num_rows if case.anchors is None else len(case.anchors)
    num_heads = case.num_kv_heads * case.num_groups

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    mask: Tensor | str | None = case.branch_mask
    if case.branch_mask in ("shared", "each"):
        shape = (case.num_queries, case.num_keys)
        shape = shape if case.branch_mask == "shared" else (num_branches, *shape)
        mask = (torch.rand(shape, generator=generator) < 0.6).to(device)
    branch_shape = (num_branches, case.num_keys, case.num_kv_heads, case.head_dim)
    query_shape = (num_branches, case.num_queries, num_heads, case.head_dim)
    return Inputs(
        q=draw(*query_shape),
        k=draw(num_rows, case.num_kv_heads, case.head_dim),
        v=draw(num_rows, case.num_kv_heads, case.head_dim),
        k_branch=draw(*branch_shape) if case.num_keys else None,
        v_branch=draw(*branch_shape) if case.num_keys else None,
        sinks=draw(num_heads) if case.has_sinks else None,
        dout=draw(*query_shape),
        anchors=None if case.anchors is None else torch.tensor(case.anchors, dtype=torch.int64, device=device),
        branch_mask=mask,
        options={
            "trunk_inclusive": case.trunk_inclusive,
            "window": case.window,
            "query_offset": None if case.query_offset is None else torch.tensor(case.query_offset),
        },
    )


def differentiate(out: Tensor, inputs: list[Tensor | None], dout: Tensor) -> list[Tensor | None]:
    """Return the gradient of each input that is there."""
    given = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad(out, given, dout))
    return [None if x is None else next(grads) for x in inputs]


def run_oracle(case: AttentionCase, dtype: torch.dtype, inputs: Inputs | None = None) -> dict[str, Tensor | None]:
    """Return out, lse and every gradient of the dense oracle, global, computed in ``dtype``."""
    inputs = make_inputs(case, dtype) if inputs is None else inputs
    leaves = [
        None if x is None else x.detach().to(dtype).requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, inputs.k_branch, inputs.v_branch, inputs.sinks)
    ]
    q, k, v, k_branch, v_branch, sinks = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    out, lse = naive_branch_attention(
        q, k, v, k_branch, v_branch, cu_seqlens=case.cu_seqlens, anchors=inputs.anchors,
        branch_mask=inputs.branch_mask, sinks=sinks, **inputs.options,
    )  # fmt: skip
    names = ("q", "k", "v", "k_branch", "v_branch", "sinks")
    grads = differentiate(out, leaves, inputs.dout.to(dtype))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


@dataclass(frozen=True)
class Shard:
    """Which part of a case this rank holds.

    Args:
        layout: of the trunk.
        branches: int64, global branch of each local one; -1 = a padding row of an every-row case.
    """

    layout: PackedLayout
    branches: Tensor

    @classmethod
    def build(cls, case: AttentionCase, layout: PackedLayout) -> Shard:
        if case.anchors is None:
            return cls(layout, layout.global_rows)
        ranks, _ = layout.locate(torch.tensor(case.anchors, dtype=torch.int64))
        return cls(layout, (ranks == layout.cp_rank).nonzero().view(-1))

    def take(self, x: Tensor, rows: Tensor, poison: float = float("nan")) -> Tensor:
        """Return rows of a global tensor, with ``poison`` in the padding rows."""
        rows = rows.to(x.device)
        if x.shape[0] == 0:
            return x.new_full((rows.numel(), *x.shape[1:]), poison)
        local = x.index_select(0, rows.clamp(min=0))
        return local.masked_fill((rows < 0).view(-1, *[1] * (x.dim() - 1)), poison)


def run_op(
    case: AttentionCase,
    layout: PackedLayout,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    mode: str,
    backend: str = "auto",
    inputs: Inputs | None = None,
) -> dict[str, Tensor | None]:
    """Run the op on this rank's shard; ``mode`` is "once" (the registered op), "ring" or "gather" (a Trunk)."""
    inputs = make_inputs(case, dtype) if inputs is None else inputs
    shard = Shard.build(case, layout)
    rows, branches = layout.global_rows, shard.branches
    leaves = [
        None if x is None else shard.take(x, index).requires_grad_()
        for x, index in (
            (inputs.q, branches),
            (inputs.k, rows),
            (inputs.v, rows),
            (inputs.k_branch, branches),
            (inputs.v_branch, branches),
        )
    ]
    q, k, v, k_branch, v_branch = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    mask = inputs.branch_mask
    if isinstance(mask, Tensor) and mask.dim() == 3:
        mask = mask[branches.clamp(min=0).to(mask.device)]
    anchors = None
    if inputs.anchors is not None:
        anchors = layout.locate(inputs.anchors[branches.to(inputs.anchors.device)])[1].to(q.device)
    options: dict[str, Any] = {
        "anchors": anchors,
        "branch_mask": mask,
        "sinks": sinks,
        "return_lse": True,
        **inputs.options,
    }
    if mode == "once":
        out, lse = branch_attention(q, k, v, k_branch, v_branch, layout=layout, group=group, backend=backend, **options)
    else:
        trunk = Trunk(k, v, layout, group, mode, backend=backend)
        out, lse = trunk.attend(q, k_branch, v_branch, **options)
    grads = differentiate(out, [*leaves, sinks], shard.take(inputs.dout, branches))
    names = ("q", "k", "v", "k_branch", "v_branch", "sinks")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def compare_shard(
    case: AttentionCase,
    layout: PackedLayout,
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Return the largest error of each result over this rank's rows; padding rows must be 0 (lse: -inf).

    Collective where the case has sinks: their gradient is the sum over ranks.
    """
    shard = Shard.build(case, layout)
    errors = {}
    for name, value in actual.items():
        wanted = expected[name]
        if value is None or wanted is None:
            assert value is None
            assert wanted is None
            continue
        if name == "sinks":
            total = value.clone()
            if group is not None:
                dist.all_reduce(total, group=group)
            errors[name] = max_error(total, wanted)
            continue
        rows = layout.global_rows if name in ("k", "v") else shard.branches
        errors[name] = max_error(value, shard.take(wanted, rows, -torch.inf if name == "lse" else 0.0))
    return errors
