"""One pass of branch queries over a trunk: rows in kernel order, and the walk over the shards, forward and backward."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specco.ops.branch_keys import BranchKeys, finish_backward, finish_forward
from specco.ops.kernels import Backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype
from specco.ops.plan import Call, QueryRows, StepPlan, plan_anchored, plan_every_row
from specco.ops.ring import Contribution, GatheredShards, RingShards

_NUM_KEPT_PASSES = 8
# Elements of the queries of a chunk on the CPU, at most; a GPU takes chunks a hundred times larger. Smaller chunks hold
# less memory and make more calls, and below 768 query rows the CPU's kernel is a fifth slower.
_CHUNK_ELEMENTS = {"cpu": 3 * 2**16}
_DEFAULT_CHUNK_ELEMENTS = 2**26
# Elements of the queries of a call on the CPU, whose kernel copies all it gets heads-major; never less than what reads
# one key head. A GPU's kernels copy nothing. At half of it 4K at cp 4 is 5% slower.
_CALL_ELEMENTS = {"cpu": 2**19}


@dataclass(frozen=True)
class Chunk:
    """Branches of a pass that are walked together: copies in kernel order exist for one chunk at a time.

    Args:
        branches: int64 ``[b]``, in the order of their kernel rows; a slice where they follow each other.
        queries: their rows; None = every row of the layout, in order.
        plans: of the steps, by source and places of the keys.
    """

    branches: Tensor | slice
    queries: QueryRows | None
    plans: dict[tuple, StepPlan] = field(default_factory=dict)

    def take(self, x: Tensor) -> Tensor:
        """Return the chunk's part of ``x [B, ...]``, a view where its branches follow each other."""
        return x[self.branches] if isinstance(self.branches, slice) else x.index_select(0, self.branches.to(x.device))

    def put(self, total: Tensor | None, part: Tensor, num_branches: int) -> Tensor:
        """Set the chunk's part of ``total [B, ...]`` and return it; None: make it, or take a whole part as it is."""
        if part.shape[0] == num_branches and isinstance(self.branches, slice):
            return part
        if total is None:
            total = part.new_empty(num_branches, *part.shape[1:])
        if isinstance(self.branches, slice):
            total[self.branches] = part
        else:
            total.index_copy_(0, self.branches.to(total.device), part)
        return total


class QueryPass:
    """How the queries ``[B, G, N, H]`` of one pass become kernel rows, and which calls they need in each step.

    Every-row queries without a window keep their order, and the G queries of a row become heads (they see the same
    prefix). Others are sorted by anchor, cut into chunks, and the R = N // K query heads that read one key head become
    rows: query g of the chunk's branch b in head ``k * R + r`` is row ``(b * G + g) * R + r`` of head k. Few anchors so
    make blocks of many rows, in which the kernels are quickest; the rows lie heads-major, as the CPU's want them.

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
        chunk_size: most branches walked at a time where they are not every row, in order.
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
        chunk_size: int,
    ) -> None:
        self.layout, self.backend, self.trunk_inclusive = layout, backend, trunk_inclusive
        self.num_queries, self.num_kv_heads, self.num_groups = num_queries, num_kv_heads, num_groups
        longest = int(torch.diff(layout.cu_seqlens).max()) if layout.num_documents else 0
        offsets = torch.arange(num_queries) if query_offset is None else query_offset.cpu()
        if window is not None and window >= longest + int(offsets.max()):
            window = None
        self.has_padding_rows = anchors is None and layout.has_padding
        if anchors is None and window is None:
            self.chunks = [Chunk(slice(0, layout.num_rows), None)]
            return
        if anchors is None:
            rows = branches = (layout.global_rows >= 0).nonzero().view(-1)
        else:
            rows, branches = torch.sort(anchors.cpu(), stable=True)
        is_in_order = torch.equal(branches, torch.arange(branches.numel()))
        # Of nearly equal size: a small one costs as many calls.
        num_chunks = max(1, -(-rows.numel() // chunk_size))
        chunk_size = max(1, -(-rows.numel() // num_chunks))
        self.chunks = []
        for begin in range(0, rows.numel(), chunk_size):
            part = slice(begin, min(begin + chunk_size, rows.numel()))
            queries = QueryRows(
                documents=layout.document_ids[rows[part]],
                anchors=rows[part],
                positions=layout.position_ids[rows[part]],
                num_queries=num_queries * num_groups,
                offsets=offsets.repeat_interleave(num_groups),
                trunk_inclusive=trunk_inclusive,
                window=window,
            )
            self.chunks.append(Chunk(part if is_in_order else branches[part], queries))

    def to_rows(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk's part ``[b, G, N, ...]`` of a tensor as kernel rows ``[Q, heads, ...]``."""
        x = x.reshape(x.shape[0], self.num_queries, self.num_kv_heads, self.num_groups, *x.shape[3:])
        if chunk.queries is None:
            x = x.transpose(1, 2)
            return x.reshape(x.shape[0], self.num_kv_heads * self.num_queries * self.num_groups, *x.shape[4:])
        return x.movedim(2, 0).reshape(self.num_kv_heads, -1, *x.shape[4:]).transpose(0, 1)

    def from_rows(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """Undo :meth:`to_rows`, contiguous."""
        num_queries, num_kv_heads, num_groups = self.num_queries, self.num_kv_heads, self.num_groups
        if chunk.queries is None:
            x = rows.view(rows.shape[0], num_kv_heads, num_queries, num_groups, *rows.shape[2:]).transpose(1, 2)
        else:
            x = rows.view(-1, num_queries, num_groups, num_kv_heads, *rows.shape[2:]).transpose(2, 3)
        return x.reshape(x.shape[0], num_queries, num_kv_heads * num_groups, *rows.shape[2:]).contiguous()

    def is_final(self, chunk: Chunk) -> bool:
        """Return whether a walk writes each row once: then no accumulator is needed."""
        return self.layout.cp_size == 1 and chunk.queries is None and self.trunk_inclusive

    def split_calls(self, plan: StepPlan, rows: Tensor) -> list[tuple[Call, slice, slice]]:
        """Return a plan's kernel calls, each with its heads of ``rows [Q, heads, H]`` and the key heads they read."""
        num_kv_heads, heads_each = self.num_kv_heads, rows.shape[1] // self.num_kv_heads
        limit = _CALL_ELEMENTS.get(rows.device.type)
        calls = []
        for call in plan.calls:
            size = num_kv_heads
            if limit is not None:
                elements = call.q_rows.shape[0] * call.q_rows.shape[1] * heads_each * rows.shape[2]
                size = min(num_kv_heads, max(1, limit // max(1, elements)))
            for begin in range(0, num_kv_heads, size):
                end = min(begin + size, num_kv_heads)
                calls.append((call, slice(begin * heads_each, end * heads_each), slice(begin, end)))
        return calls

    def clear_padding(self, tensors: list[Tensor], fill: float) -> None:
        """Set the padding rows of tensors ``[B, ...]`` of an every-row pass, in place: nothing of them gets out."""
        if self.has_padding_rows:
            for tensor in tensors:
                tensor.index_fill_(0, self.layout.on_device("padding_rows", tensor.device), fill)

    def plan(self, chunk: Chunk, source: int, bases: Tensor) -> StepPlan:
        """Return a chunk's calls of the step that holds a rank's keys; plans of every-row passes stay in the layout.

        Args:
            chunk: of this pass.
            source: the rank.
            bases: int64 ``[n]``, place in the key tensor that stands for local row 0 of each document.
        """
        is_ragged = self.backend.is_ragged
        queries = chunk.queries
        memo = self.layout.memo if queries is None else chunk.plans
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
    layout = query_pass.layout
    bases, num_visible, num_computed = layout.local_cu_seqlens[:-1], 0, 0
    for chunk in query_pass.chunks:
        queries = chunk.queries
        plans = [query_pass.plan(chunk, source, bases) for source in range(layout.cp_size)]
        computed = sum(call.num_computed for plan in plans for call in plan.calls)
        if queries is None:
            rows = layout.position_ids[layout.global_rows >= 0] + int(query_pass.trunk_inclusive)
            return PairCounts(int(rows.sum()) * query_pass.num_queries, computed * query_pass.num_queries)
        last = queries.positions[:, None] + int(queries.trunk_inclusive)
        first = torch.zeros_like(last)
        if queries.window is not None:
            first = (queries.positions[:, None] + queries.offsets - queries.window + 1).clamp(min=0)
        num_visible += int((last - first).clamp(min=0).expand(-1, queries.num_queries).sum())
        num_computed += computed
    return PairCounts(num_visible // query_pass.num_groups, num_computed // query_pass.num_groups)


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
    elements = _CHUNK_ELEMENTS.get(q.device.type, _DEFAULT_CHUNK_ELEMENTS)
    chunk_size = max(1, elements // max(1, q.shape[1:].numel()))
    options = (q.shape[1], num_kv_heads, num_groups, trunk_inclusive, window, backend, chunk_size)
    key = (anchor_key, offset_key, *options)
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
            chunk_size=chunk_size,
        )
    return recent[key]


@dataclass(frozen=True)
class PassInputs:
    """What forward and backward of a pass have in common.

    Args:
        query_pass: the order of the rows and the calls.
        shards: the trunk's keys and values.
        q: ``[B, G, N, H]``, stride 1 in its last dim.
        branch: keys of the branches, or None.
        scale: factor of the scores.
    """

    query_pass: QueryPass
    shards: RingShards | GatheredShards
    q: Tensor
    branch: BranchKeys | None
    scale: float

    def take_branch(self, chunk: Chunk) -> BranchKeys | None:
        """Return the branch keys of a chunk."""
        if self.branch is None:
            return None
        keys, values = ([chunk.take(x) for x in part] for part in (self.branch.keys, self.branch.values))
        mask = self.branch.mask
        return BranchKeys(keys, values, chunk.take(mask) if mask is not None and mask.dim() == 3 else mask)


def _attend_chunk(
    inputs: PassInputs,
    plan: StepPlan,
    chunk: Chunk,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    partial: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return ``out [Q, heads, H]`` and ``lse [Q, heads]`` of a chunk's rows over one more shard of the trunk.

    Args:
        rows: the chunk's queries in kernel order, ``[Q, heads, H]``.
        partial: the same over earlier shards, overwritten; None before the first.
    """
    query_pass, dtype = inputs.query_pass, accumulator_dtype(rows.dtype)
    is_final, calls = query_pass.is_final(chunk), query_pass.split_calls(plan, rows)
    if partial is None and not (is_final and len(calls) == 1):
        new = torch.empty if plan.covers_all else torch.zeros
        out = new(rows.shape, dtype=rows.dtype if is_final else dtype, device=rows.device)
        partial = out, torch.full(rows.shape[:2], -torch.inf, dtype=dtype, device=rows.device)
    for call, heads, kv_heads in calls:
        part_out, part_lse = query_pass.backend.forward(
            call.q_rows.take(rows[:, heads]),
            call.k_rows.take(k[:, kv_heads]),
            call.k_rows.take(v[:, kv_heads]),
            call.mask.to(rows.device),
            inputs.scale,
        )
        if partial is None:
            partial = part_out.flatten(0, 1), part_lse.flatten(0, 1)
            continue
        add = call.q_rows.write if call.is_first else call.q_rows.merge
        add(partial[0][:, heads], partial[1][:, heads], part_out, part_lse)
    assert partial is not None
    return partial


def forward_pass(inputs: PassInputs, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return joint ``out [B, G, N, H]`` in q's dtype and ``lse [B, G, N]``. Collective over the shards' group."""
    query_pass, q = inputs.query_pass, inputs.q
    partials: dict[int, tuple[Tensor, Tensor]] = {}
    results: list[Tensor | None] = [None, None]
    last_source = (query_pass.layout.cp_rank + 1) % query_pass.layout.cp_size

    def visit(source: int, k: Tensor, v: Tensor, bases: Tensor) -> None:
        for index, chunk in enumerate(query_pass.chunks):
            rows = query_pass.to_rows(chunk.take(q), chunk)
            plan = query_pass.plan(chunk, source, bases)
            partial = _attend_chunk(inputs, plan, chunk, rows, k, v, partials.pop(index, None))
            if source != last_source:
                partials[index] = partial
                continue
            del rows
            out, lse = (query_pass.from_rows(x, chunk) for x in partial)
            del partial
            parts = finish_forward(out, lse, chunk.take(q), inputs.take_branch(chunk), sinks, inputs.scale)
            results[:] = [chunk.put(x, part, q.shape[0]) for x, part in zip(results, parts, strict=True)]

    inputs.shards.forward(visit)
    out, lse = results
    if out is None or lse is None:
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    query_pass.clear_padding([out], 0.0)
    query_pass.clear_padding([lse], -torch.inf)
    return out, lse


def _clear_empty_rows(dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return dout and lse by which rows without a key give no gradient, whatever their dout holds: exp(s - inf) = 0."""
    is_empty = lse == -torch.inf
    if not bool(is_empty.any()):
        return dout.contiguous(), lse
    return dout.masked_fill(is_empty.unsqueeze(-1), 0.0), lse.masked_fill(is_empty, torch.inf)


def backward_pass(
    inputs: PassInputs, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor], list[Tensor]]:
    """Return dq, (dk, dv) of the trunk where the shards do not keep them, and the branch's dk and dv.

    Collective over the shards' group in ring mode.
    """
    query_pass, q, branch = inputs.query_pass, inputs.q, inputs.branch
    sums: dict[int, Tensor] = {}
    num_parts = 0 if branch is None else len(branch.keys)
    results: list[Tensor | None] = [None] * (1 + 2 * num_parts)

    def take(chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return chunk.take(q), *_clear_empty_rows(chunk.take(dout), chunk.take(lse)), chunk.take(out)

    def add_branch(chunk: Chunk, keys: BranchKeys, dq: Tensor | None) -> Tensor:
        chunk_q, chunk_dout, chunk_lse, chunk_out = take(chunk)
        dq, dkeys, dvalues = finish_backward(dq, chunk_dout, chunk_q, chunk_out, chunk_lse, keys, inputs.scale)
        parts = zip(results[1:], (*dkeys, *dvalues), strict=True)
        results[1:] = [chunk.put(x, part, q.shape[0]) for x, part in parts]
        return dq

    def prepare() -> None:
        for index, chunk in enumerate(query_pass.chunks):
            keys = inputs.take_branch(chunk)
            if keys is not None and not query_pass.is_final(chunk):
                sums[index] = query_pass.to_rows(add_branch(chunk, keys, None), chunk)

    def visit(source: int, k: Tensor, v: Tensor, bases: Tensor) -> Iterator[Contribution]:
        for index, chunk in enumerate(query_pass.chunks):
            plan = query_pass.plan(chunk, source, bases)
            dq = yield from _differentiate_chunk(inputs, plan, chunk, take(chunk), k, v, sums.pop(index, None))
            if source != query_pass.layout.cp_rank:
                sums[index] = dq
                continue
            dq = query_pass.from_rows(dq, chunk)
            if query_pass.is_final(chunk) and (keys := inputs.take_branch(chunk)) is not None:
                dq = add_branch(chunk, keys, dq)
            results[0] = chunk.put(results[0], dq.to(q.dtype), q.shape[0])

    dtrunk = inputs.shards.backward(visit, prepare)
    templates = [q] if branch is None else [q, *branch.keys, *branch.values]
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(templates, results, strict=True)]
    query_pass.clear_padding(grads, 0.0)
    return grads[0], dtrunk, grads[1 : 1 + num_parts], grads[1 + num_parts :]


def _differentiate_chunk(
    inputs: PassInputs,
    plan: StepPlan,
    chunk: Chunk,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    dq: Tensor | None,
) -> Generator[Contribution, None, Tensor]:
    """Yield what a chunk's rows add to dK and dV of a shard, and return ``dq [Q, heads, H]`` with it added.

    Args:
        given: the chunk's part of q, dout, lse and out.
        dq: the same over earlier shards, overwritten; None before the first.
    """
    query_pass = inputs.query_pass
    q_rows, dout_rows, lse_rows, out_rows = (query_pass.to_rows(x, chunk) for x in given)
    is_final, calls = query_pass.is_final(chunk), query_pass.split_calls(plan, q_rows)
    if dq is None and not (is_final and len(calls) == 1):
        dq_dtype = q_rows.dtype if is_final else accumulator_dtype(q_rows.dtype)
        dq = torch.zeros(q_rows.shape, dtype=dq_dtype, device=q_rows.device)
    for call, heads, kv_heads in calls:
        part_dq, part_dk, part_dv = query_pass.backend.backward(
            call.q_rows.take(dout_rows[:, heads]),
            call.q_rows.take(q_rows[:, heads]),
            call.k_rows.take(k[:, kv_heads]),
            call.k_rows.take(v[:, kv_heads]),
            call.q_rows.take(out_rows[:, heads]),
            call.q_rows.take(lse_rows[:, heads]),
            call.mask.to(k.device),
            inputs.scale,
        )
        if dq is None:
            dq = part_dq.flatten(0, 1)
        else:
            call.q_rows.add_to(dq[:, heads], part_dq)
        contribution = Contribution(call.k_rows, kv_heads, part_dk, part_dv)
        del part_dq, part_dk, part_dv
        yield contribution
        del contribution
    assert dq is not None
    return dq
