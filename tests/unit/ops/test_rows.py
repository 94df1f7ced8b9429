"""Row sets: the same rows through a view, an index, padding or ragged runs."""

from __future__ import annotations

import pytest
import torch

from specco.ops.rows import RowSet

SETS = {
    "one run": ([2], [3], False),
    "evenly spaced": ([1, 5, 9], [2, 2, 2], False),
    "uneven": ([0, 3, 9], [2, 2, 2], False),
    "padded": ([0, 4, 8], [3, 1, 2], False),
    "joined ragged": ([1, 4, 5], [3, 1, 4], True),
    "ragged": ([0, 6, 3], [2, 3, 1], True),
}


def list_rows(name: str) -> torch.Tensor:
    starts, lengths, _ = SETS[name]
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


def build(name: str) -> RowSet:
    starts, lengths, is_ragged = SETS[name]
    return RowSet(torch.tensor(starts), torch.tensor(lengths), is_ragged)


def mark_real(name: str) -> torch.Tensor:
    """Return bool ``[b * n]``, False at the padding of a row set."""
    _, lengths, is_ragged = SETS[name]
    if is_ragged:
        return torch.ones(sum(lengths), dtype=torch.bool)
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).view(-1)


@pytest.mark.parametrize("name", list(SETS))
def test_rows_are_taken(name: str):
    x = torch.randn(12, 2, 4)
    taken = build(name).take(x).flatten(0, 1)
    assert torch.equal(taken[mark_real(name)], x[list_rows(name)])


@pytest.mark.parametrize("name", ["one run", "evenly spaced", "joined ragged"])
def test_even_spacing_copies_nothing(name: str):
    x = torch.randn(12, 2, 4)
    assert build(name).take(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", list(SETS))
def test_parts_are_added(name: str):
    rows, is_real = build(name), mark_real(name)
    part = torch.randn(rows.shape[0] * rows.shape[1], 2, 4).masked_fill(~is_real[:, None, None], 0.0)
    total = torch.ones(12, 2, 4)
    expected = total.index_add(0, list_rows(name), part[is_real])
    rows.add_to(total, part.view(*rows.shape, 2, 4))
    assert torch.equal(total, expected)


def test_a_row_that_comes_twice_gets_both():
    rows = RowSet(torch.tensor([0, 1]), torch.tensor([2, 2]))
    total = torch.zeros(3, 1)
    rows.add_to(total, torch.tensor([[[1.0], [2.0]], [[4.0], [8.0]]]))
    assert total.view(-1).tolist() == [1.0, 6.0, 8.0]


@pytest.mark.parametrize("name", list(SETS))
def test_results_are_written_and_merged(name: str):
    """A merge into what holds nothing is a write; equal parts merge to themselves, with log 2 more weight."""
    rows, is_real, index = build(name), mark_real(name), list_rows(name)
    part = torch.randn(len(is_real), 2, 4).masked_fill(~is_real[:, None, None], torch.nan)
    part_lse = torch.randn(len(is_real), 2)
    shaped = part.view(*rows.shape, 2, 4), part_lse.view(*rows.shape, 2)
    for fold in (rows.write, rows.merge):
        out, lse = torch.zeros(12, 2, 4), torch.full((12, 2), -torch.inf)
        fold(out, lse, *shaped)
        assert torch.equal(out[index], part[is_real])
        assert torch.equal(lse[index], part_lse[is_real])
        untouched = torch.ones(12, dtype=torch.bool).index_fill(0, index, False)
        assert bool((out[untouched] == 0).all())
        assert bool((lse[untouched] == -torch.inf).all())
    rows.merge(out, lse, *shaped)
    torch.testing.assert_close(out[index], part[is_real])
    torch.testing.assert_close(lse[index], part_lse[is_real] + torch.tensor(2.0).log())
