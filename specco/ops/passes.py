"""One pass of branch queries over a trunk: rows in kernel order, and the walk over the shards, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specco.ops.branch_keys import BranchKeys, finish_backward, finish_forward
from specco.ops.kernels import Backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype
from specco.ops.plan import QueryRows, StepPlan, plan_anchored, plan_every_row
from specco.ops.ring import Contributions, GatheredShards, RingShards
from specco.ops.rows import as_dense

_NUM_KEPT_PASSES = 8


class QueryPass:
    """How the queries ``[B, G, N, H]`` of one pass become kernel rows, and which calls they need in each step.

    Every-row queries without a window keep their order, and the G queries of a row become heads (they see the same
    prefix). Others are sorted by anchor, and the R = N // K query heads that read one key head become rows: query g of
    branch b in head ``k * R + r`` is row ``(b * G + g) * R + r`` of head k. Few anchors so make blocks of many rows, in
    which the kernels are quickest.

    Args:
        layout: of the trunk.
        backend: that will run the calls.
        num_queries: G.
        num_kv_heads: K.
        num_groups: R.
        anchors: int64 ``[B]``, local rows; None = every row, in order.
        trunk_inclusive: whether the anchor's own row is seen.
        window: sliding window in tokens, or None.
        query_offset: int64 ``[G]``, or None for 0..G-1.
    """

    def __init__(
        self,
        layout: PackedLayout,
        backend: Backend,
        *,
        num_queries: int,
        num_kv_heads: int,
        num_groups: int,
        anchors: Tensor | None,
        trunk_inclusive: bool,
        window: int | None,
        query_offset: Tensor | None,
    ) -> None:
        self.layout, self.backend, self.trunk_inclusive = layout, backend, trunk_inclusive
        self.num_queries, self.num_kv_heads, self.num_groups = num_queries, num_kv_heads, num_groups
        longest = int(torch.diff(layout.cu_seqlens).max()) if layout.num_documents else 0
        offsets = torch.arange(num_queries) if query_offset is None else query_offset.cpu()
        if window is not None and window >= longest + int(offsets.max()):
            window = None
        self.has_padding_rows = anchors is None and layout.has_padding
        self.order: Tensor | None = None
        self.queries: QueryRows | None = None
        self._plans: dict[tuple, StepPlan] = {}
        if anchors is None and window is None:
            return
        if anchors is None:
            rows = (layout.global_rows >= 0).nonzero().view(-1)
            self.order = rows if layout.has_padding else None
        else:
            rows, order = torch.sort(anchors.cpu(), stable=True)
            self.order = None if bool((order[1:] > order[:-1]).all()) else order
        self.queries = QueryRows(
            documents=layout.document_ids[rows],
            anchors=rows,
            positions=layout.position_ids[rows],
            num_queries=num_queries * num_groups,
            offsets=offsets.repeat_interleave(num_groups),
            trunk_inclusive=trunk_inclusive,
            window=window,
        )

    def to_rows(self, x: Tensor) -> Tensor:
        """Return ``[B, G, N, ...]`` as kernel rows ``[Q, heads, ...]``."""
        num_queries, num_kv_heads, num_groups = self.num_queries, self.num_kv_heads, self.num_groups
        if self.queries is not None and self.order is not None:
            x = x.index_select(0, self.order.to(x.device))
        x = x.reshape(x.shape[0], num_queries, num_kv_heads, num_groups, *x.shape[3:])
        if self.queries is None:
            return x.transpose(1, 2).reshape(x.shape[0], num_kv_heads * num_queries * num_groups, *x.shape[4:])
        return x.transpose(2, 3).reshape(x.shape[0] * num_queries * num_groups, num_kv_heads, *x.shape[4:])

    def from_rows(self, rows: Tensor, shape: torch.Size, fill: float) -> Tensor:
        """Undo :meth:`to_rows`, contiguous; branches that have no row get ``fill``."""
        num_queries, num_kv_heads, num_groups = self.num_queries, self.num_kv_heads, self.num_groups
        if self.queries is None:
            rows = rows.view(shape[0], num_kv_heads, num_queries, num_groups, *shape[3:]).transpose(1, 2)
            return rows.reshape(shape).contiguous()
        num_branches = rows.shape[0] // (num_queries * num_groups)
        rows = rows.view(num_branches, num_queries, num_groups, num_kv_heads, *shape[3:]).transpose(2, 3)
        rows = rows.reshape(num_branches, *shape[1:]).contiguous()
        if self.order is None:
            return rows
        return rows.new_full(shape, fill).index_copy_(0, self.order.to(rows.device), rows)

    def is_final(self, plan: StepPlan) -> bool:
        """Return whether a plan writes each row once and no other step follows: then no accumulator is needed."""
        return self.layout.cp_size == 1 and plan.covers_all

    def clear_padding(self, tensors: list[Tensor], fill: float) -> None:
        """Set the padding rows of tensors ``[B, ...]`` of an every-row pass, in place: nothing of them gets out."""
        if self.has_padding_rows:
            for tensor in tensors:
                tensor.index_fill_(0, self.layout.on_device("padding_rows", tensor.device), fill)

    def plan(self, source: int, bases: Tensor) -> StepPlan:
        """Return the calls of the step that holds a rank's keys; plans of every-row passes are kept by the layout.

        Args:
            source: the rank.
            bases: int64 ``[n]``, place in the key tensor that stands for local row 0 of each document.
        """
        is_ragged = self.backend.is_ragged
        queries = self.queries
        memo = self.layout.memo if queries is None else self._plans
        key = ("plan", source, self.trunk_inclusive, is_ragged, tuple(bases.tolist()))
        if key not in memo:
            memo[key] = (
                plan_every_row(
                    self.layout, source, trunk_inclusive=self.trunk_inclusive, bases=bases, is_ragged=is_ragged
                )
                if queries is None
                else plan_anchored(queries, self.layout, source, bases=bases, is_ragged=is_ragged)
            )
        return memo[key]


@dataclass(frozen=True)
class PairCounts:
    """Query-key pairs of one pass over the trunk on one rank, per query head, padding not counted.

    Args:
        visible: pairs that the masks leave.
        computed: pairs handed to the backend: a causal block counts its triangle, a masked one all of it.
    """

    visible: int
    computed: int


def count_pairs(query_pass: QueryPass) -> PairCounts:
    """Count the trunk pairs of a pass on this rank. No collective."""
    layout, queries = query_pass.layout, query_pass.queries
    bases = layout.local_cu_seqlens[:-1]
    plans = [query_pass.plan(source, bases) for source in range(layout.cp_size)]
    computed = sum(call.num_computed for plan in plans for call in plan.calls)
    if queries is None:
        rows = layout.position_ids[layout.global_rows >= 0] + int(query_pass.trunk_inclusive)
        return PairCounts(int(rows.sum()) * query_pass.num_queries, computed * query_pass.num_queries)
    last = queries.positions[:, None] + int(queries.trunk_inclusive)
    first = torch.zeros_like(last)
    if queries.window is not None:
        first = (queries.positions[:, None] + queries.offsets - queries.window + 1).clamp(min=0)
    visible = (last - first).clamp(min=0).expand(-1, queries.num_queries)
    return PairCounts(int(visible.sum()) // query_pass.num_groups, computed // query_pass.num_groups)


def build_query_pass(
    layout: PackedLayout,
    backend: Backend,
    q: Tensor,
    num_kv_heads: int,
    anchors: Tensor | None,
    trunk_inclusive: bool,
    window: int | None,
    query_offset: Tensor | None,
) -> QueryPass:
    """Return the pass of queries ``q [B, G, N, H]``; the layout keeps the last few.

    The layers of a draft share their anchors, and backward needs the plan of forward again.
    """
    anchor_key = None if anchors is None else tuple(anchors.tolist())
    offset_key = None if query_offset is None else tuple(query_offset.tolist())
    num_groups = q.shape[2] // num_kv_heads
    key = (anchor_key, offset_key, q.shape[1], num_kv_heads, num_groups, trunk_inclusive, window, backend)
    recent: dict[tuple, QueryPass] = layout.memo.setdefault(("passes",), {})
    if key not in recent:
        if len(recent) == _NUM_KEPT_PASSES:
            recent.pop(next(iter(recent)))
        recent[key] = QueryPass(
            layout,
            backend,
            num_queries=q.shape[1],
            num_kv_heads=num_kv_heads,
            num_groups=num_groups,
            anchors=anchors,
            trunk_inclusive=trunk_inclusive,
            window=window,
            query_offset=query_offset,
        )
    return recent[key]


def _walk_forward(
    query_pass: QueryPass, shards: RingShards | GatheredShards, q: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out ``[Q, heads, H]``, lse ``[Q, heads]``) of the trunk, in kernel order.

    A function of its own, so that the queries' copy in kernel order is gone before the branch is folded in.
    """
    rows = query_pass.to_rows(q)
    dtype = accumulator_dtype(q.dtype)
    partial: list[Tensor] = []

    def visit(source: int, k: Tensor, v: Tensor, bases: Tensor) -> None:
        plan = query_pass.plan(source, bases)
        is_final = query_pass.is_final(plan)
        is_whole = is_final and len(plan.calls) == 1
        if not partial and not is_whole:
            new = torch.empty if plan.covers_all else torch.zeros
            partial.append(new(rows.shape, dtype=q.dtype if is_final else dtype, device=q.device))
            partial.append(torch.full(rows.shape[:2], -torch.inf, dtype=dtype, device=q.device))
        for call in plan.calls:
            part_out, part_lse = query_pass.backend.forward(
                call.q_rows.take(rows), call.k_rows.take(k), call.k_rows.take(v), call.mask.to(q.device), scale
            )
            if is_whole:
                partial.extend((part_out.flatten(0, 1), part_lse.flatten(0, 1)))
            elif call.is_first:
                call.q_rows.write(partial[0], partial[1], part_out, part_lse)
            else:
                call.q_rows.merge(partial[0], partial[1], part_out, part_lse)

    shards.forward(visit)
    return partial[0], partial[1]


def forward_pass(
    query_pass: QueryPass,
    shards: RingShards | GatheredShards,
    q: Tensor,
    branch: BranchKeys | None,
    sinks: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return joint ``out [B, G, N, H]`` in q's dtype and ``lse [B, G, N]``. Collective over the shards' group."""
    q = as_dense(q)
    out_rows, lse_rows = _walk_forward(query_pass, shards, q, scale)
    out = query_pass.from_rows(out_rows, q.shape, 0.0)
    lse = query_pass.from_rows(lse_rows, q.shape[:-1], -torch.inf)
    del out_rows, lse_rows
    out, lse = finish_forward(out, lse, q, branch, sinks, scale)
    query_pass.clear_padding([out], 0.0)
    query_pass.clear_padding([lse], -torch.inf)
    return out, lse


def _walk_backward(
    query_pass: QueryPass,
    shards: RingShards | GatheredShards,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return (dq ``[Q, heads, H]`` in kernel order, (dk, dv) of the trunk or None); see ``_walk_forward``."""
    q_rows, dout_rows, out_rows, lse_rows = (query_pass.to_rows(x) for x in (q, dout, out, lse))
    dq: list[Tensor] = []

    def visit(source: int, k: Tensor, v: Tensor, bases: Tensor) -> Contributions:
        plan = query_pass.plan(source, bases)
        is_final = query_pass.is_final(plan)
        is_whole = is_final and len(plan.calls) == 1
        if not dq and not is_whole:
            dq_dtype = q.dtype if is_final else accumulator_dtype(q.dtype)
            dq.append(torch.zeros(q_rows.shape, dtype=dq_dtype, device=q.device))
        contributions: Contributions = []
        for call in plan.calls:
            part_dq, part_dk, part_dv = query_pass.backend.backward(
                call.q_rows.take(dout_rows),
                call.q_rows.take(q_rows),
                call.k_rows.take(k),
                call.k_rows.take(v),
                call.q_rows.take(out_rows),
                call.q_rows.take(lse_rows),
                call.mask.to(q.device),
                scale,
            )
            contributions.append((call.k_rows, part_dk, part_dv))
            if is_whole:
                dq.append(part_dq.flatten(0, 1))
            else:
                call.q_rows.add_to(dq[0], part_dq)
        return contributions

    dtrunk = shards.backward(visit)
    return dq[0], dtrunk


def backward_pass(
    query_pass: QueryPass,
    shards: RingShards | GatheredShards,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    branch: BranchKeys | None,
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor], list[Tensor]]:
    """Return dq, (dk, dv) of the trunk where the shards do not keep them, and the branch's dk and dv.

    Collective over the shards' group in ring mode.
    """
    # exp(s - inf) = 0: rows without a key give no gradient, whatever their dout holds.
    is_empty = lse == -torch.inf
    has_empty = bool(is_empty.any())
    lse = lse.masked_fill(is_empty, torch.inf) if has_empty else lse
    dout = dout.masked_fill(is_empty.unsqueeze(-1), 0.0) if has_empty else dout.contiguous()
    q = as_dense(q)
    dq_rows, dtrunk = _walk_backward(query_pass, shards, dout, q, out, lse, scale)
    dq_all = query_pass.from_rows(dq_rows, q.shape, 0.0)
    del dq_rows
    dq_all, dkeys, dvalues = finish_backward(dq_all, dout, q, out, lse, branch, scale)
    query_pass.clear_padding([dq_all, *dkeys, *dvalues], 0.0)
    return dq_all, dtrunk, dkeys, dvalues
