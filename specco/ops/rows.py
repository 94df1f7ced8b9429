"""Row sets: batches of runs of rows in a tensor, read and written as views where their spacing allows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specco.ops.merge import merge_partial

# Rows merged at a time on the CPU, so that the float32 copies of a block stay in cache.
_MERGE_ROWS = 512


class RowSet:
    """``b`` runs of rows, seen as ``[b, n, ...]``. Runs of unequal length are padded with repeats of their last row.

    Args:
        starts: first row of each run.
        lengths: rows of each run, >= 1.
        width: n, at least the longest run; None = the longest.
        is_ragged: lay the runs end to end instead, ``[1, sum of lengths, ...]``.
    """

    def __init__(
        self, starts: Sequence[int], lengths: Sequence[int], width: int | None = None, is_ragged: bool = False
    ) -> None:
        self.starts, self.lengths = list(starts), list(lengths)
        self.shape = (1, sum(lengths)) if is_ragged else (len(starts), width or max(lengths))
        self.is_padded = not is_ragged and min(lengths) < self.shape[1]
        self.stride = self._find_stride(is_ragged)
        self._by_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def _find_stride(self, is_ragged: bool) -> int | None:
        """Return the rows between the starts of neighbouring runs where all are alike and no run overlaps the next."""
        if self.is_padded:
            return None
        gaps = {after - before for before, after in zip(self.starts, self.starts[1:], strict=False)}
        if is_ragged:
            ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
            return 0 if ends[:-1] == self.starts[1:] else None
        if not gaps:
            return 0
        return gaps.pop() if len(gaps) == 1 and min(gaps) >= self.shape[1] else None

    @property
    def num_rows(self) -> int:
        """Rows of all runs together, padding not counted."""
        return sum(self.lengths)

    @property
    def is_contiguous(self) -> bool:
        """True where the runs, in order, are rows 0, 1, 2, ... of the tensor."""
        is_joined = self.shape[0] == 1 or self.stride == self.shape[1]
        return self.stride is not None and self.starts[0] == 0 and is_joined

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the flat row index ``[b * n]``, and the flat places that are no padding (None = all)."""
        if device not in self._by_device:
            starts, lengths = torch.tensor(self.starts), torch.tensor(self.lengths)
            if self.shape[0] == 1 and len(self.starts) > 1:
                offsets = torch.arange(self.shape[1]) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
                index, valid = torch.repeat_interleave(starts, lengths) + offsets, None
            else:
                columns = torch.arange(self.shape[1])
                index = (starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)).view(-1)
                valid = (columns < lengths[:, None]).view(-1).nonzero().view(-1) if self.is_padded else None
            self._by_device[device] = (index.to(device), None if valid is None else valid.to(device))
        return self._by_device[device]

    def view(self, x: Tensor) -> Tensor | None:
        """Return the rows of ``x`` as a view ``[b, n, ...]``, or None where their spacing allows none."""
        if self.stride is None:
            return None
        strides = (self.stride * x.stride(0), *x.stride())
        return x.as_strided((*self.shape, *x.shape[1:]), strides, x.storage_offset() + self.starts[0] * x.stride(0))

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of ``x [R, ...]`` as ``[b, n, ...]``, a view where possible."""
        view = self.view(x)
        return x.index_select(0, self._indices(x.device)[0]).view(*self.shape, *x.shape[1:]) if view is None else view

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add ``part [b, n, ...]`` to rows of ``total [R, ...]``; a row that comes twice gets both, padding adds 0."""
        view = self.view(total)
        if view is not None:
            view.add_(part)
        else:
            total.index_add_(0, self._indices(total.device)[0], part.flatten(0, 1).to(total.dtype))

    def write(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        """Set rows of an accumulator that hold nothing yet."""
        view = self.view(out)
        if view is not None:
            view.copy_(part_out)
            lse_view = self.view(lse)
            assert lse_view is not None
            lse_view.copy_(part_lse)
            return
        index, valid = self._indices(out.device)
        part_out, part_lse = part_out.flatten(0, 1), part_lse.flatten(0, 1)
        if valid is not None:
            index, part_out, part_lse = index[valid], part_out[valid], part_lse[valid]
        out.index_copy_(0, index, part_out.to(out.dtype))
        lse.index_copy_(0, index, part_lse)

    def merge(self, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        """Fold a partial result ``[b, n, N, H]`` into the accumulator ``out [R, N, H]``, ``lse [R, N]``."""
        if self.view(out) is not None and self.shape[0] == 1:
            _merge_in_blocks(
                out[self.starts[0] :][: self.shape[1]], lse[self.starts[0] :][: self.shape[1]], part_out[0], part_lse[0]
            )
            return
        index, valid = self._indices(out.device)
        part_out, part_lse = part_out.flatten(0, 1), part_lse.flatten(0, 1)
        if valid is not None:
            index, part_out, part_lse = index[valid], part_out[valid], part_lse[valid]
        for begin in range(0, index.numel(), _merge_rows(out)):
            block = slice(begin, begin + _merge_rows(out))
            rows_out, rows_lse = out.index_select(0, index[block]), lse.index_select(0, index[block])
            merge_partial(rows_out, rows_lse, part_out[block], part_lse[block])
            out.index_copy_(0, index[block], rows_out)
            lse.index_copy_(0, index[block], rows_lse)


def _merge_rows(out: Tensor) -> int:
    return _MERGE_ROWS if out.device.type == "cpu" else max(1, out.shape[0])


def _merge_in_blocks(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    for begin in range(0, out.shape[0], _merge_rows(out)):
        block = slice(begin, begin + _merge_rows(out))
        merge_partial(out[block], lse[block], part_out[block], part_lse[block])
