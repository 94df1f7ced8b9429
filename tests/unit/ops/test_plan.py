"""Plans of ring steps: each visible pair once, few others, equal work."""

from __future__ import annotations

import random

import pytest
import torch

from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.ops.passes import QueryPass, count_pairs
from specco.ops.plan import Call, round_up

BACKEND = get_backend("cpu", torch.device("cpu"), torch.float32)


def build_pass(layout: PackedLayout, anchors: torch.Tensor | None, num_queries: int, window: int | None, **options):
    return QueryPass(
        layout,
        BACKEND,
        num_queries=num_queries,
        num_kv_heads=1,
        num_groups=1,
        anchors=anchors,
        window=window,
        query_offset=None,
        trunk_inclusive=options.get("trunk_inclusive", True),
        chunk_size=options.get("chunk_size", 64),
    )


def mark_pairs(call: Call, hits: torch.Tensor) -> None:
    """Add 1 to ``hits [query rows, key rows]`` for each pair that a call lets through."""
    query_index, key_index = torch.arange(hits.shape[0]), torch.arange(hits.shape[1])
    q_rows, k_rows = call.q_rows.take(query_index), call.k_rows.take(key_index)
    for i in range(q_rows.shape[0]):
        for j in range(q_rows.shape[1]):
            seen = k_rows[i]
            if call.mask.is_causal:
                seen = seen[: j + 1]
            elif call.mask.first is not None and call.mask.last is not None:
                seen = seen[int(call.mask.first[i, j]) : int(call.mask.last[i, j])]
            hits[q_rows[i, j], seen] += 1


@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("trunk_inclusive", [False, True])
def test_calls_cover_each_visible_pair_once(is_sampled: bool, window: int | None, trunk_inclusive: bool):
    lengths, rng = [1, 90, 7, 33, 33, 2], random.Random(0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    for rank in range(2):
        layout = PackedLayout.build(cu_seqlens, 2, rank)
        real = (layout.global_rows >= 0).nonzero().view(-1)
        anchors = torch.tensor([int(real[rng.randrange(len(real))]) for _ in range(30)]) if is_sampled else None
        options = {"trunk_inclusive": trunk_inclusive, "chunk_size": 7}
        query_pass = build_pass(layout, anchors, 2 if is_sampled else 1, window, **options)
        rows = torch.arange(layout.num_rows) if anchors is None else anchors
        for source in range(2):
            keys = PackedLayout.build(cu_seqlens, 2, source)
            num_queries = query_pass.num_queries
            hits = torch.zeros(len(rows), num_queries, layout.num_rows, dtype=torch.int64)
            for chunk in query_pass.chunks:
                part = torch.zeros_like(chunk.take(hits))
                for call in query_pass.plan(chunk, source, layout.local_cu_seqlens[:-1]).calls:
                    mark_pairs(call, part.flatten(0, 1))
                hits = chunk.put(hits, part, len(rows))
            last = layout.position_ids[rows] + int(trunk_inclusive)
            own = layout.position_ids[rows][:, None] + torch.arange(num_queries)
            is_same = (layout.document_ids[rows][:, None] == keys.document_ids) & (keys.document_ids >= 0)
            visible = (is_same & (keys.position_ids < last[:, None]))[:, None].expand(-1, num_queries, -1)
            if window is not None:
                visible = visible & (keys.position_ids > (own - window)[:, :, None])
            assert torch.equal(hits, visible.long()), (rank, source)


def test_chunks_are_of_nearly_equal_size():
    layout = PackedLayout.build([0, 100])
    for num_anchors, sizes in ((0, []), (24, [24]), (25, [13, 12]), (60, [20, 20, 20])):
        chunks = build_pass(layout, torch.arange(num_anchors), 1, None, chunk_size=24).chunks
        assert [chunk.queries.anchors.numel() for chunk in chunks if chunk.queries] == sizes


def test_work_is_equal_and_little_is_wasted():
    """64 documents of 64 to 2,048 tokens at cp 4: visible pairs max/mean <= 1.02, computed/visible <= 1.05."""
    rng = random.Random(0)
    for _ in range(5):
        cu_seqlens = torch.tensor([0, *(rng.randint(64, 2048) for _ in range(64))]).cumsum(0)
        starts, ends = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
        anchors = torch.tensor([rng.randrange(i, j) for i, j in zip(starts, ends, strict=True) for _ in range(16)])
        every_row, sampled = [], []
        for rank in range(4):
            layout = PackedLayout.build(cu_seqlens, 4, rank)
            every_row.append(count_pairs(build_pass(layout, None, 1, None)))
            owners, rows = layout.locate(anchors)
            sampled.append(count_pairs(build_pass(layout, rows[owners == rank], 16, None)))
        visible = [count.visible for count in every_row]
        lengths = torch.diff(cu_seqlens)
        assert sum(visible) == int((lengths * (lengths + 1) // 2).sum())
        assert max(visible) <= 1.02 * sum(visible) / 4
        for counts in (every_row, sampled):
            assert sum(count.computed for count in counts) <= 1.05 * sum(count.visible for count in counts)


def test_many_documents_take_few_calls():
    """Calls grow with the distinct lengths, not with the documents."""
    layout = PackedLayout.build(torch.arange(513) * 128)
    query_pass = build_pass(layout, None, 1, None)
    assert len(query_pass.plan(query_pass.chunks[0], 0, layout.local_cu_seqlens[:-1]).calls) == 1
    rng = random.Random(0)
    layout = PackedLayout.build(torch.tensor([0, *(rng.randint(1, 64) for _ in range(512))]).cumsum(0), 4, 1)
    query_pass = build_pass(layout, None, 1, None)
    plans = [query_pass.plan(query_pass.chunks[0], source, layout.local_cu_seqlens[:-1]) for source in range(4)]
    assert sum(len(plan.calls) for plan in plans) <= 100


def test_rounded_sizes():
    sizes = torch.tensor([1, 3, 4, 7, 8, 9, 11, 16, 17, 33, 100])
    assert round_up(sizes).tolist() == [1, 3, 4, 7, 8, 10, 12, 16, 20, 40, 112]
