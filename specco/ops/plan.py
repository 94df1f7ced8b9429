"""Which block of queries meets which block of keys in each ring step: few large calls, no pair that nobody sees.

Positions grow along a document's local rows on every rank, so a query sees an interval ``[first, last)`` of the local
rows of its document on any rank. Three shapes of work cover every case; q rows down, k rows across, # = computed:

    every row, own rank         another rank's chunks      sampled anchors, own rank         sliding window
    # . . . . .  causal         # # # # # #  dense:        # . . . . .   dense nodes of      # # . . . .  dense core
    # # . . . .  call           # # # # # #  whole         # # # . . .   a radix-4 tree,     . # # # . .  and masked
    # # # . . .                 # # # # # #  chunks        # # # # # .   masked leaves       . . . # # #  edges

Equal blocks of different documents go into one batched call. Segments too small for a call of their own are padded to
common sizes under an interval mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specco.ops.kernels import BlockMask
from specco.ops.layout import PackedLayout
from specco.ops.rows import RowSet

_RADIX = 4
# Below this many pairs a block costs less than a Python call of its own, and is padded into a batch of others.
_SMALL_PAIRS = 8192


@dataclass(frozen=True)
class Call:
    """One call of a backend.

    Args:
        q_rows: of the query rows.
        k_rows: of the key rows of the shard that the step holds.
        mask: which keys are seen.
        is_first: no earlier call of the pass touched these query rows.
        num_computed: query-key pairs handed to the backend, per query head.
    """

    q_rows: RowSet
    k_rows: RowSet
    mask: BlockMask
    is_first: bool
    num_computed: int


@dataclass(frozen=True)
class StepPlan:
    """The calls of one ring step; ``covers_all``: each query row is touched by exactly one of them."""

    calls: list[Call]
    covers_all: bool = False


def count_before(layout: PackedLayout, rank: int, documents: Tensor, positions: Tensor) -> Tensor:
    """Return how many local rows of a rank's shard of each document stand before a position.

    Args:
        documents: int64 ``[...]``.
        positions: int64, same shape, position in the document, may lie outside it.
    """
    lengths = torch.diff(layout.local_cu_seqlens)[documents]
    if layout.cp_size == 1:
        return torch.minimum(positions.clamp(min=0), lengths)
    chunk = lengths // 2
    head = torch.minimum((positions - rank * chunk).clamp(min=0), chunk)
    tail = torch.minimum((positions - (2 * layout.cp_size - 1 - rank) * chunk).clamp(min=0), chunk)
    return head + tail


def round_up(sizes: Tensor) -> Tensor:
    """Round up to multiples of a quarter of the power of two at or below: 1..8, 10, 12, 14, 16, 20, 24, ..."""
    step = (2 ** (sizes.clamp(min=4).double().log2().floor().long() - 2)).clamp(min=1)
    return -(-sizes // step) * step


def _dense_call(group: Tensor, is_causal: bool, is_first: bool, is_ragged: bool) -> Call:
    q_starts, q_lengths, k_starts, k_lengths = group.unbind(1)
    pairs = q_lengths * (q_lengths + 1) // 2 if is_causal else q_lengths * k_lengths
    mask = BlockMask(is_causal)
    if is_ragged:
        cu_q, cu_k = (torch.cat([n.new_zeros(1), n.cumsum(0)]).to(torch.int32) for n in (q_lengths, k_lengths))
        mask = BlockMask(is_causal, cu_q=cu_q, cu_k=cu_k, max_q=int(q_lengths.max()), max_k=int(k_lengths.max()))
    q_rows, k_rows = RowSet(q_starts, q_lengths, is_ragged), RowSet(k_starts, k_lengths, is_ragged)
    return Call(q_rows, k_rows, mask, is_first, int(pairs.sum()))


def _masked_call(group: Tensor, bounds: tuple[Tensor, Tensor] | None, is_first: bool) -> Call:
    """Pad segments to one size under an interval mask; without bounds their queries see all their keys."""
    q_rows, k_rows = RowSet(group[:, 0], group[:, 1]), RowSet(group[:, 2], group[:, 3])
    columns = torch.arange(q_rows.shape[1])
    num_keys = group[:, 3:].expand(-1, columns.numel())
    first, last = torch.zeros_like(num_keys), num_keys
    if bounds is not None:
        rows = group[:, :1] + torch.minimum(columns, group[:, 1:2] - 1)
        first, last = ((bound[rows] - group[:, 2:3]).clamp(min=0).minimum(num_keys) for bound in bounds)
    last = last.masked_fill(columns >= group[:, 1:2], 0)
    num_computed = q_rows.shape[0] * q_rows.shape[1] * k_rows.shape[1]
    return Call(q_rows, k_rows, BlockMask(first=first, last=last), is_first, num_computed)


def _group(segments: Tensor, sizes: Tensor) -> list[Tensor]:
    """Split segments ``[m, 4]`` into groups of equal ``sizes [m, 2]``, each in its order."""
    if not segments.numel():
        return []
    keys = sizes[:, 0] * (int(sizes[:, 1].max()) + 1) + sizes[:, 1]
    keys, order = torch.sort(keys, stable=True)
    counts = torch.unique_consecutive(keys, return_counts=True)[1]
    return list(segments[order].split(counts.tolist()))


def _count_padded(segments: Tensor) -> int:
    """Return the pairs of segments ``[m, 4]`` when all are padded to the largest."""
    return segments.shape[0] * int(segments[:, 1].max()) * int(segments[:, 3].max())


def batch_segments(
    segments: Tensor,
    *,
    bounds: tuple[Tensor, Tensor] | None = None,
    is_causal: bool = False,
    is_first: bool = False,
    is_ragged: bool = False,
) -> list[Call]:
    """Group segments into calls: equal sizes exactly; small or masked ones padded to common sizes.

    Args:
        segments: int64 ``[m, 4]``: first query row, queries, first key row, keys. No query row may come twice, since
            the results of one call are merged all at once.
        bounds: int64 ``[Q]`` each, first key row and one past the last one that a query row sees; None = all keys of
            its segment.
        is_causal: query i of a segment sees its keys 0..i.
        is_first: no earlier call touched the query rows.
        is_ragged: whether the backend takes segments of different lengths in one call.
    """
    sizes = segments[:, 1::2]
    if bounds is not None:
        groups = _group(segments, round_up(sizes))
        # One call for all where its padding costs less than the calls that it saves.
        num_apart = sum(_count_padded(group) for group in groups)
        if groups and _count_padded(segments) - num_apart <= _SMALL_PAIRS // 4 * (len(groups) - 1):
            groups = [segments]
        return [_masked_call(group, bounds, is_first) for group in groups]
    if is_ragged:
        return [_dense_call(segments, is_causal, is_first, True)] if segments.numel() else []
    groups = _group(segments, sizes)
    is_alone = [not is_causal and len(group) == 1 and int(group[0, 1] * group[0, 3]) < _SMALL_PAIRS for group in groups]
    calls = [
        _dense_call(group, is_causal, is_first, False)
        for group, alone in zip(groups, is_alone, strict=True)
        if not alone
    ]
    small = [group for group, alone in zip(groups, is_alone, strict=True) if alone]
    if small:
        rest = torch.cat(small)
        for group in _group(rest, round_up(rest[:, 1::2])):
            if len(group) == 1:
                calls.append(_dense_call(group, False, is_first, False))
            else:
                calls.append(_masked_call(group, None, is_first))
    return calls


def plan_every_row(
    layout: PackedLayout, source: int, *, trunk_inclusive: bool, bases: Tensor, is_ragged: bool
) -> StepPlan:
    """Plan one step of queries on every local row, without a window.

    Args:
        source: the rank whose keys the step holds.
        trunk_inclusive: whether a query sees its own row.
        bases: int64 ``[n]``, row of the key tensor at which each document's keys start.
        is_ragged: whether the backend takes segments of different lengths in one call.
    """
    documents = torch.arange(layout.num_documents)
    lengths = torch.diff(layout.cu_seqlens.long())
    starts = layout.local_cu_seqlens[:-1]
    num_valid = count_before(layout, layout.cp_rank, documents, lengths)
    if source == layout.cp_rank:
        skip = 0 if trunk_inclusive else 1
        segments = torch.stack([starts + skip, num_valid - skip, bases, num_valid - skip], 1)
        calls = batch_segments(segments[segments[:, 1] > 0], is_causal=True, is_first=True, is_ragged=is_ragged)
        return StepPlan(calls, covers_all=trunk_inclusive and not layout.has_padding)
    chunk = torch.diff(layout.local_cu_seqlens) // 2
    if source < layout.cp_rank:
        segments = torch.stack([starts, num_valid, bases, chunk], 1)
    else:
        segments = torch.stack([starts + chunk, num_valid - chunk, bases, 2 * chunk], 1)
    return StepPlan(batch_segments(segments[segments[:, 1] > 0], is_ragged=is_ragged))


@dataclass(frozen=True)
class QueryRows:
    """Branch queries sorted by anchor: row ``b * G + g`` is query g of the b-th anchor.

    Args:
        documents: int64 ``[B]``.
        anchors: int64 ``[B]``, ascending local rows.
        positions: int64 ``[B]``, of the anchors in their documents.
        num_queries: G.
        offsets: int64 ``[G]``, tokens from the anchor to the query.
        trunk_inclusive: whether the anchor's own row is seen.
        window: sliding window in tokens, or None.
    """

    documents: Tensor
    anchors: Tensor
    positions: Tensor
    num_queries: int
    offsets: Tensor
    trunk_inclusive: bool
    window: int | None

    def bounds(self, layout: PackedLayout, source: int) -> tuple[Tensor, Tensor]:
        """Return the interval ``first, last [B, G]`` of a rank's local rows (of the document) that each query sees."""
        end = count_before(layout, source, self.documents, self.positions + int(self.trunk_inclusive))
        last = end[:, None].expand(-1, self.num_queries)
        if self.window is None:
            return torch.zeros_like(last), last
        own = self.positions[:, None] + self.offsets
        documents = self.documents[:, None].expand(-1, self.num_queries)
        return torch.minimum(count_before(layout, source, documents, own - self.window + 1), last), last


def _runs(*keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and length of each run of equal consecutive keys ``[B]``."""
    is_start = torch.ones_like(keys[0], dtype=torch.bool)
    if is_start.numel():
        is_start[1:] = torch.stack([key[1:] != key[:-1] for key in keys]).any(0)
    starts = is_start.nonzero().view(-1)
    ends = torch.cat([starts[1:], starts.new_tensor([keys[0].numel()])])
    return starts, ends - starts


def _tree_levels(queries: QueryRows, last: Tensor, bases: Tensor, lengths: Tensor) -> list[Tensor]:
    """Cover ragged prefixes ``[0, last)`` by segments ``[m, 4]``: masked leaves, then dense blocks in disjoint sets.

    The dense ones are what all queries of a document see, where that is worth a call, and above it the nodes of each
    level of a tree.
    """
    num_queries, base = queries.num_queries, bases[queries.documents]
    starts, counts = _runs(queries.documents)
    shared = last[starts]
    shared = shared.where(counts * num_queries * shared >= _SMALL_PAIRS, 0)
    prefixes = torch.stack([starts * num_queries, counts * num_queries, base[starts], shared], 1)
    levels = [prefixes[shared > 0]]
    shared = torch.repeat_interleave(shared, counts)
    base, last = base + shared, last - shared
    # Wide leaves compute pairs that nobody sees, narrow ones take more calls.
    leaf = torch.maximum(lengths // 64, (lengths // 32).clamp(32, 64))[queries.documents]
    node = last // leaf
    starts, counts = _runs(queries.documents, node)
    begin = (node * leaf)[starts]
    widths = last[starts + counts - 1] - begin
    leaves = torch.stack([starts * num_queries, counts * num_queries, base[starts] + begin, widths], 1)
    width = leaf
    while bool((last >= width).any()):
        node = last // width
        starts, counts = _runs(queries.documents, node)
        within = (node % _RADIX)[starts]
        first_key = base[starts] + (node[starts] - within) * width[starts]
        nodes = torch.stack([starts * num_queries, counts * num_queries, first_key, within * width[starts]], 1)
        levels.append(nodes[within > 0])
        width = width * _RADIX
    return [leaves[widths > 0], *levels]


def _window_parts(
    queries: QueryRows, layout: PackedLayout, first: Tensor, last: Tensor, bases: Tensor
) -> list[tuple[Tensor, bool]]:
    """Cover intervals by tiles of neighbouring anchors: lower edges, dense cores, upper edges, as (segments, masked).

    A tile whose edges meet is one masked block, listed with the lower edges.
    """
    assert queries.window is not None
    num_queries, documents = queries.num_queries, queries.documents
    tile_rows = max(16, min(256, queries.window // 8))
    starts, counts = _runs(documents, find_chunk(layout, documents, queries.anchors), queries.positions // tile_rows)
    tile = torch.repeat_interleave(torch.arange(starts.numel()), counts)[:, None].expand_as(first).reshape(-1)
    limits = []
    for values in (first.reshape(-1), last.reshape(-1)):
        for reduce in ("amin", "amax"):
            limit = torch.zeros(starts.numel(), dtype=torch.int64)
            limits.append(limit.scatter_reduce_(0, tile, values, reduce, include_self=False))
    first_min, first_max, last_min, last_max = limits
    is_narrow = last_min - first_max < tile_rows
    base = bases[documents][starts]
    parts: list[tuple[Tensor, bool]] = []
    for begin, end, is_masked in (
        (first_min, torch.where(is_narrow, last_max, first_max), True),
        (first_max, torch.where(is_narrow, first_max, last_min), False),
        (torch.where(is_narrow, last_max, last_min), last_max, True),
    ):
        segments = torch.stack([starts * num_queries, counts * num_queries, base + begin, end - begin], 1)
        # An edge that every query of its tile sees whole needs no mask.
        is_dense = (begin >= first_max) & (end <= last_min)
        for chosen, needs_mask in ((~is_dense, is_masked), (is_dense, False)):
            parts.append((segments[chosen & (end > begin)], needs_mask))
    return parts


def find_chunk(layout: PackedLayout, documents: Tensor, local_rows: Tensor) -> Tensor:
    """Return 0 for rows in a head chunk and 1 for rows in a tail chunk."""
    offsets = local_rows - layout.local_cu_seqlens[documents]
    return (offsets >= torch.diff(layout.local_cu_seqlens)[documents] // 2).long() * int(layout.cp_size > 1)


def plan_anchored(queries: QueryRows, layout: PackedLayout, source: int, *, bases: Tensor, is_ragged: bool) -> StepPlan:
    """Plan one step of queries at given anchors, or of any queries with a sliding window.

    Args:
        source: the rank whose keys the step holds.
        bases: int64 ``[n]``, row of the key tensor that stands for local row 0 of each document.
        is_ragged: whether the backend takes segments of different lengths in one call.
    """
    first, last = queries.bounds(layout, source)
    base = bases[queries.documents]
    bounds = ((base[:, None] + first).reshape(-1), (base[:, None] + last).reshape(-1))
    if queries.window is not None:
        parts = [
            batch_segments(segments, bounds=bounds if is_masked else None, is_ragged=is_ragged)
            for segments, is_masked in _window_parts(queries, layout, first, last, bases)
        ]
        return StepPlan([call for part in parts for call in part])
    ends = last[:, 0]
    if source == layout.cp_rank:
        leaves, *levels = _tree_levels(queries, ends, bases, torch.diff(layout.local_cu_seqlens))
        calls = batch_segments(leaves, bounds=bounds, is_first=True, is_ragged=is_ragged)
        for nodes in levels:
            calls.extend(batch_segments(nodes, is_ragged=is_ragged))
        return StepPlan(calls)
    starts, counts = _runs(queries.documents, ends)
    segments = torch.stack([starts * queries.num_queries, counts * queries.num_queries, base[starts], ends[starts]], 1)
    return StepPlan(batch_segments(segments[segments[:, 3] > 0], is_ragged=is_ragged))
