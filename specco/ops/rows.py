"""Row sets: batches of runs of rows in a tensor, read and written as views where their spacing allows it."""

from __future__ import annotations

import torch
from torch import Tensor

from specco.ops.merge import merge_partial

# Rows merged at a time on the CPU, so that the float32 copies of a block stay in cache.
_MERGE_ROWS = 512


def as_dense(x: Tensor) -> Tensor:
    """Return ``x`` with the stride 1 in its last dim that kernels need, copied only where it must be."""
    return x if x.stride(-1) == 1 else x.contiguous()


class RowSet:
    """``b`` runs of rows, seen as ``[b, n, ...]``. Runs of unequal length are padded with repeats of their last row.

    Args:
        starts: int64 ``[b]``, first row of each run.
        lengths: int64 ``[b]``, rows of each run, >= 1.
        is_ragged: lay the runs end to end instead, ``[1, sum of lengths, ...]``.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, is_ragged: bool = False) -> None:
        self._starts, self._lengths, self._is_ragged = starts, lengths, is_ragged
        self.start, self.num_rows = int(starts[0]), int(lengths.sum())
        longest = int(lengths.max())
        self.shape = (1, self.num_rows) if is_ragged else (starts.numel(), longest)
        self.is_padded = not is_ragged and starts.numel() * longest > self.num_rows
        self.stride = self._find_stride()
        self._by_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def _find_stride(self) -> int | None:
        """Return the rows between the starts of neighbouring runs where all are alike and no run overlaps the next."""
        if self.is_padded:
            return None
        if self._starts.numel() == 1:
            return 0
        gaps = torch.diff(self._starts)
        if self._is_ragged:
            return 0 if torch.equal(gaps, self._lengths[:-1]) else None
        gap = int(gaps[0])
        return gap if gap >= self.shape[1] and bool((gaps == gap).all()) else None

    @property
    def is_contiguous(self) -> bool:
        """True where the runs, in order, are rows 0, 1, 2, ... of the tensor."""
        is_joined = self.shape[0] == 1 or self.stride == self.shape[1]
        return self.stride is not None and self.start == 0 and is_joined

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the flat row index ``[b * n]``, and the flat places that are no padding (None = all)."""
        if device not in self._by_device:
            starts, lengths = self._starts, self._lengths
            if self._is_ragged:
                offsets = torch.arange(self.num_rows) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
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
        return x.as_strided((*self.shape, *x.shape[1:]), strides, x.storage_offset() + self.start * x.stride(0))

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
                out[self.start :][: self.shape[1]], lse[self.start :][: self.shape[1]], part_out[0], part_lse[0]
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
