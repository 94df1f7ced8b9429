"""Packed documents: shifts that stop at a document's end, what is refused, what moves to a device."""

from __future__ import annotations

import pytest
import torch

from specco.packing import PackedTokens, pack_documents


def pack(lengths: list[int], max_tokens: int = 8) -> list[PackedTokens]:
    """Return documents of ids 0, 1, ... whose tokens after the first are trained."""
    return pack_documents(
        [torch.arange(length) for length in lengths],
        [torch.arange(length) > 0 for length in lengths],
        max_tokens=max_tokens,
        row_values={"advantages": [torch.full((length,), float(length)) for length in lengths]},
    )


def test_documents_fill_microbatches_in_order() -> None:
    first, second = pack([5, 3, 1, 4])
    assert first.cu_seqlens.tolist() == [0, 5, 8] and second.cu_seqlens.tolist() == [0, 1, 5]
    assert first.sample_ids.tolist() == [0, 1] and second.sample_ids.tolist() == [2, 3]
    assert second.row_values["advantages"].tolist() == [1.0, 4.0, 4.0, 4.0, 4.0]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("distance", [0, 1, 2, 4, 9])
def test_shift_stops_at_the_end_of_each_document(distance: int) -> None:
    (tokens,) = pack([5, 1, 2])
    expected = []
    for length in (5, 1, 2):
        expected += [i + distance if i + distance < length else -1 for i in range(length)]
    assert tokens.shift(tokens.input_ids, distance, -1).tolist() == expected


def test_a_target_row_predicts_a_trained_token_of_its_own_document() -> None:
    (tokens,) = pack([3, 1, 2])
    assert tokens.is_target_row.tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize("lengths", [[9], [3, 0]])
def test_lengths_that_cannot_be_packed_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"document \d has [09] tokens; allowed are 1 to max_tokens=8"):
        pack(lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens ends at 2, but input_ids has 3 tokens"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool)}, "loss_mask has 4 rows, but input_ids has 3 tokens"),
        ({"row_values": {"advantages": torch.ones(1)}}, "advantages has 1 rows, but input_ids has 3 tokens"),
        ({"sample_ids": torch.tensor([0, 1])}, "sample_ids has 2 entries for 1 documents"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    sizes = {"input_ids": torch.arange(3), "loss_mask": torch.ones(3, dtype=torch.bool)}
    documents = {"cu_seqlens": torch.tensor([0, 3]), "sample_ids": torch.tensor([0])}
    with pytest.raises(ValueError, match=message):
        PackedTokens(**(sizes | documents | changes))


def test_rows_move_to_a_device_and_offsets_stay() -> None:
    (tokens,) = pack([3, 2])
    moved = tokens.to("meta")
    on_device = (moved.input_ids, moved.loss_mask, moved.row_values["advantages"], moved.position_ids)
    assert {value.device.type for value in on_device} == {"meta"}
    assert moved.cu_seqlens is tokens.cu_seqlens and moved.sample_ids is tokens.sample_ids
