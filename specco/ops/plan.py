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

from collections import defaultdict
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class _Segment:
    """Query rows ``[q_start, + num_queries)`` against key rows ``[k_start, + num_keys)``; bounds are key columns."""

    q_start: int
    num_queries: int
    k_start: int
    num_keys: int
    first: Tensor | None = None
    last: Tensor | None = None


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


def round_up(size: int) -> int:
    """Round up to a multiple of a quarter of the power of two at or below: 1..8, 10, 12, 14, 16, 20, 24, ..."""
    step = max(1, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def _dense_call(group: Sequence[_Segment], is_causal: bool, is_first: bool, is_ragged: bool) -> Call:
    q_lengths, k_lengths = [s.num_queries for s in group], [s.num_keys for s in group]
    pairs = sum(n * (n + 1) // 2 if is_causal else n * m for n, m in zip(q_lengths, k_lengths, strict=True))
    if is_ragged:
        offsets = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
        mask = BlockMask(is_causal, cu_q=offsets[0], cu_k=offsets[1], max_q=max(q_lengths), max_k=max(k_lengths))
    else:
        mask = BlockMask(is_causal)
    q_rows = RowSet([s.q_start for s in group], q_lengths, is_ragged=is_ragged)
    k_rows = RowSet([s.k_start for s in group], k_lengths, is_ragged=is_ragged)
    return Call(q_rows, k_rows, mask, is_first, pairs)


def _masked_call(group: Sequence[_Segment], is_first: bool) -> Call:
    """Pad segments, with or without bounds, to one size under an interval mask."""
    width = max(s.num_queries for s in group)
    height = max(s.num_keys for s in group)
    first = torch.zeros(len(group), width, dtype=torch.int64)
    last = torch.zeros(len(group), width, dtype=torch.int64)
    for i, segment in enumerate(group):
        first[i, : segment.num_queries] = 0 if segment.first is None else segment.first
        last[i, : segment.num_queries] = segment.num_keys if segment.last is None else segment.last
    q_rows = RowSet([s.q_start for s in group], [s.num_queries for s in group], width)
    k_rows = RowSet([s.k_start for s in group], [s.num_keys for s in group], height)
    return Call(q_rows, k_rows, BlockMask(first=first, last=last), is_first, len(group) * width * height)


def batch_segments(
    segments: Iterable[_Segment], *, is_causal: bool = False, is_first: bool = False, is_ragged: bool = False
) -> list[Call]:
    """Group segments into calls: equal sizes exactly, small or masked ones padded to common sizes.

    No query row may come twice: the results of one call are merged all at once.
    """
    exact: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
    masked: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
    for segment in segments:
        if segment.first is not None:
            masked[round_up(segment.num_queries), round_up(segment.num_keys)].append(segment)
        else:
            exact[segment.num_queries, segment.num_keys].append(segment)
    if is_ragged:
        everything = [segment for group in exact.values() for segment in group]
        calls = [_dense_call(everything, is_causal, is_first, True)] if everything else []
        return calls + [_masked_call(group, is_first) for group in masked.values()]
    calls = []
    for (num_queries, num_keys), group in exact.items():
        if is_causal or len(group) > 1 or num_queries * num_keys >= _SMALL_PAIRS:
            calls.append(_dense_call(group, is_causal, is_first, False))
        else:
            masked[round_up(num_queries), round_up(num_keys)].extend(group)
    for group in masked.values():
        is_alone = len(group) == 1 and group[0].first is None
        calls.append(_dense_call(group, False, is_first, False) if is_alone else _masked_call(group, is_first))
    return calls


def key_bases(layout: PackedLayout, *, is_head_only: bool) -> Tensor:
    """Return int64 ``[n]``: the row at which each document starts in a shard, or in its head chunks laid end to end."""
    return layout.local_cu_seqlens[:-1] // 2 if is_head_only else layout.local_cu_seqlens[:-1]


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
        rows = torch.stack([starts + skip, num_valid - skip, bases, num_valid - skip], 1)
        segments = [_Segment(*row) for row in rows.tolist() if row[1] > 0]
        covers_all = trunk_inclusive and not layout.has_padding
        calls = batch_segments(segments, is_causal=True, is_first=True, is_ragged=is_ragged)
        return StepPlan(calls, covers_all=covers_all)
    chunk = torch.diff(layout.local_cu_seqlens) // 2
    if source < layout.cp_rank:
        rows = torch.stack([starts, num_valid, bases, chunk], 1)
    else:
        rows = torch.stack([starts + chunk, num_valid - chunk, bases, 2 * chunk], 1)
    return StepPlan(batch_segments((_Segment(*row) for row in rows.tolist() if row[1] > 0), is_ragged=is_ragged))


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


def _tree_segments(queries: QueryRows, last: Tensor, bases: Tensor, lengths: Tensor) -> list[list[_Segment]]:
    """Cover ragged prefixes ``[0, last)`` with masked leaves (first) and a list of dense nodes for each tree level."""
    num_queries, documents = queries.num_queries, queries.documents
    leaf = (lengths // 64).clamp(min=32)[documents]
    starts, counts = _runs(documents, last // leaf)
    leaves: list[_Segment] = []
    begin = (last // leaf * leaf)[starts]
    for start, count, offset, base in torch.stack([starts, counts, begin, bases[documents][starts]], 1).tolist():
        columns = last[start : start + count] - offset
        width = int(columns[-1])
        if width > 0:
            columns = columns.repeat_interleave(num_queries)
            segment = _Segment(
                start * num_queries, count * num_queries, base + offset, width, torch.zeros_like(columns), columns
            )
            leaves.append(segment)
    levels: list[list[_Segment]] = [leaves]
    width = leaf
    while bool((last >= width).any()):
        node = last // width
        starts, counts = _runs(documents, node)
        within = (node % _RADIX)[starts]
        rows = torch.stack(
            [
                starts * num_queries,
                counts * num_queries,
                bases[documents][starts] + (node[starts] - within) * width[starts],
                within * width[starts],
            ],
            1,
        )
        levels.append([_Segment(*row) for row in rows[within > 0].tolist()])
        width = width * _RADIX
    return levels


def _window_segments(
    queries: QueryRows, layout: PackedLayout, first: Tensor, last: Tensor, bases: Tensor
) -> list[list[_Segment]]:
    """Cover intervals by tiles of neighbouring anchors: lower edges (masked), dense cores, upper edges (masked).

    A tile whose edges meet is one masked block, listed with the lower edges.
    """
    assert queries.window is not None
    num_queries, documents = queries.num_queries, queries.documents
    tile_rows = max(16, min(256, queries.window // 8))
    starts, counts = _runs(documents, count_chunk(layout, documents, queries.anchors), queries.positions // tile_rows)
    tile = torch.repeat_interleave(torch.arange(starts.numel()), counts)[:, None].expand_as(first).reshape(-1)
    limits = []
    for values in (first.reshape(-1), last.reshape(-1)):
        for reduce in ("amin", "amax"):
            limit = torch.zeros(starts.numel(), dtype=torch.int64)
            limits.append(limit.scatter_reduce_(0, tile, values, reduce, include_self=False))
    parts: list[list[_Segment]] = [[], [], []]
    rows = torch.stack([starts, counts, bases[documents][starts], *limits], 1)
    for start, count, base, first_min, first_max, last_min, last_max in rows.tolist():
        if last_min - first_max < tile_rows:
            pieces = [(first_min, last_max)]
        else:
            pieces = [(first_min, first_max), (first_max, last_min), (last_min, last_max)]
        for part, (begin, end) in zip(parts, pieces, strict=False):
            if begin >= end:
                continue
            lower = (first[start : start + count].reshape(-1) - begin).clamp(0, end - begin)
            upper = (last[start : start + count].reshape(-1) - begin).clamp(0, end - begin)
            is_dense = bool((lower == 0).all() and (upper == end - begin).all())
            bounds = (None, None) if is_dense else (lower, upper)
            part.append(_Segment(start * num_queries, count * num_queries, base + begin, end - begin, *bounds))
    return parts


def count_chunk(layout: PackedLayout, documents: Tensor, local_rows: Tensor) -> Tensor:
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
    if queries.window is not None:
        parts = _window_segments(queries, layout, first, last, bases)
        return StepPlan([call for part in parts for call in batch_segments(part, is_ragged=is_ragged)])
    ends = last[:, 0]
    if source == layout.cp_rank:
        levels = _tree_segments(queries, ends, bases, torch.diff(layout.local_cu_seqlens))
        batched = [batch_segments(level, is_first=i == 0, is_ragged=is_ragged) for i, level in enumerate(levels)]
        return StepPlan([call for calls in batched for call in calls])
    starts, counts = _runs(queries.documents, ends)
    rows = torch.stack(
        [
            starts * queries.num_queries,
            counts * queries.num_queries,
            bases[queries.documents][starts],
            ends[starts],
        ],
        1,
    )
    return StepPlan(batch_segments((_Segment(*row) for row in rows.tolist() if row[3] > 0), is_ragged=is_ragged))
