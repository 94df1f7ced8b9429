"""The zigzag layout: hand-drawn maps, round trips, refusals."""

from __future__ import annotations

import pytest
import torch

from specco.ops.layout import PackedLayout


def test_hand_drawn_map_of_two_documents():
    """Documents of 4 and 6 tokens on 2 ranks; the second is padded to 8, in chunks of 2."""
    layouts = [PackedLayout.build(torch.tensor([0, 4, 10], dtype=torch.int32), 2, rank) for rank in range(2)]
    assert layouts[0].global_rows.tolist() == [0, 3, 4, 5, -1, -1]
    assert layouts[1].global_rows.tolist() == [1, 2, 6, 7, 8, 9]
    assert layouts[0].document_ids.tolist() == [0, 0, 1, 1, -1, -1]
    assert layouts[1].position_ids.tolist() == [1, 2, 2, 3, 4, 5]
    assert layouts[0].padding_rows.tolist() == [4, 5]


def test_one_rank_moves_and_pads_nothing():
    layout = PackedLayout.build([0, 3, 3, 7])
    assert (layout.num_rows, layout.num_tokens, layout.num_documents) == (7, 7, 3)
    assert layout.global_rows.tolist() == list(range(7))
    x = torch.randn(7, 2)
    assert torch.equal(layout.shard(x), x)
    assert torch.equal(layout.unshard(x), x)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_every_row_lives_once_and_is_found(cp_size: int):
    cu_seqlens = [0, 1, 18, 18, 51, 53]
    layouts = [PackedLayout.build(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    assert len({layout.num_rows for layout in layouts}) == 1
    rows = torch.cat([layout.global_rows for layout in layouts])
    assert sorted(rows[rows >= 0].tolist()) == list(range(53))
    ranks, local_rows = layouts[0].locate(torch.arange(53))
    for row, (rank, local_row) in enumerate(zip(ranks.tolist(), local_rows.tolist(), strict=True)):
        assert int(layouts[rank].global_rows[local_row]) == row
    for layout in layouts:
        real = layout.global_rows >= 0
        starts = torch.tensor(cu_seqlens)[layout.document_ids[real]]
        assert torch.equal(starts + layout.position_ids[real], layout.global_rows[real])


def test_shard_zeroes_padding_and_has_its_gradient():
    layout = PackedLayout.build([0, 3], 2, 0)
    x = torch.full((3, 2), torch.inf, requires_grad=True)
    shard = layout.shard(x)
    assert shard.tolist() == [[torch.inf, torch.inf], [0.0, 0.0]]
    shard.backward(torch.full_like(shard, 2.0))
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 4],), "cu_seqlens starts at 1; it must start at 0"),
        (([0, 5, 4],), "cu_seqlens falls from 5 to 4"),
        ((torch.tensor([0.0, 4.0]),), "dtype torch.float32; it must be integer"),
        ((torch.zeros(0, dtype=torch.int64),), r"shape \(0,\)"),
        (([0, 4], 2, 2), "cp_rank=2 with cp_size=2; allowed are 0 <= cp_rank < cp_size"),
    ],
)
def test_bad_offsets_are_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        PackedLayout.build(*arguments)


def test_wrong_row_counts_are_refused():
    layout = PackedLayout.build([0, 5], 2, 0)
    with pytest.raises(ValueError, match="x has 6 rows, but cu_seqlens ends at 5"):
        layout.shard(torch.zeros(6))
    with pytest.raises(ValueError, match=r"group has size 1 .* cp_size=2"):
        layout.unshard(torch.zeros(4))
