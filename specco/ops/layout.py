"""PackedLayout: which row of a packed sequence lives on which context-parallel rank, and where.

A document of length L is padded to a multiple of ``2 * cp_size`` and cut into ``2 * cp_size`` chunks. Rank r holds
chunks r (head) and ``2 * cp_size - 1 - r`` (tail) of *every* document, head before tail. With ``cp_size=2`` and two
documents of 4 and 6 tokens::

    document 0     | 0 | 1 | 2 | 3 |        document 1     | 0 1 | 2 3 | 4 5 | - - |      (chunks; - is padding)
    rank 0 holds   0 3  0 1 - -             rank 1 holds   1 2  2 3 4 5

Positions grow along the local rows of a document on every rank, so each query sees an *interval* of any rank's rows,
and no real row ever sees a padding row: padding is the end of its document. With ``cp_size=1`` nothing is padded or
moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PackedLayout:
    """Zigzag layout of one packed sequence, seen from one rank. Build it with :meth:`build`; it is never changed.

    Attributes:
        cu_seqlens: int32 ``[n + 1]``, global document offsets in tokens, without padding, on the CPU.
        cp_size: number of context-parallel ranks.
        cp_rank: the rank this layout describes.
        num_tokens: S, global rows.
        num_rows: T, local rows with padding; the same on every rank.
        local_cu_seqlens: int64 ``[n + 1]``, offsets of the documents' local rows; the same on every rank.
        global_rows: int64 ``[T]``, the global row of each local row, -1 = padding.
        padding_rows: int64, the local rows that are padding, ascending.
        position_ids: int64 ``[T]``, the position of each local row in its document; padding rows count on past its end.
        document_ids: int64 ``[T]``, the document of each local row, -1 = padding.
    """

    def __init__(self, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> None:
        self.cu_seqlens = cu_seqlens
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        self.num_tokens = int(cu_seqlens[-1])
        lengths = torch.diff(cu_seqlens.long())
        local_lengths = lengths if cp_size == 1 else -(-lengths // (2 * cp_size)) * 2
        self.local_cu_seqlens = torch.cat([local_lengths.new_zeros(1), local_lengths.cumsum(0)])
        self.num_rows = int(self.local_cu_seqlens[-1])
        self.global_rows, self.position_ids, self.document_ids = self._map_rows(cp_rank)
        self.padding_rows = (self.global_rows < 0).nonzero().view(-1)
        self.has_padding = self.padding_rows.numel() > 0
        # What others derive from the layout alone, by key: kept as long as the layout is.
        self.memo: dict[tuple, Any] = {}

    @classmethod
    def build(cls, cu_seqlens: Tensor | Sequence[int], cp_size: int = 1, cp_rank: int = 0) -> PackedLayout:
        """Check the offsets and build the layout of one rank. No collective.

        Args:
            cu_seqlens: int32 or int64 ``[n + 1]``, global document offsets in tokens, without padding.
            cp_size: number of context-parallel ranks.
            cp_rank: rank in ``0 .. cp_size - 1``.

        Raises:
            ValueError: offsets that do not start at 0, fall, or are not integers; a rank outside the group.
        """
        offsets = torch.as_tensor(cu_seqlens).detach().cpu()
        if offsets.dim() != 1 or offsets.numel() == 0 or offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise ValueError(
                f"cu_seqlens has shape {tuple(offsets.shape)} and dtype {offsets.dtype}; it must be integer [n + 1]"
            )
        if int(offsets[0]) != 0:
            raise ValueError(f"cu_seqlens starts at {int(offsets[0])}; it must start at 0")
        drops = torch.diff(offsets.long()) < 0
        if drops.any():
            at = int(drops.nonzero()[0])
            raise ValueError(f"cu_seqlens falls from {int(offsets[at])} to {int(offsets[at + 1])}; it must never fall")
        if cp_size < 1 or not 0 <= cp_rank < cp_size:
            raise ValueError(f"cp_rank={cp_rank} with cp_size={cp_size}; allowed are 0 <= cp_rank < cp_size")
        return cls(offsets.to(torch.int32), cp_size, cp_rank)

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    def _map_rows(self, cp_rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return global row, position and document of every local row of a rank."""
        local_lengths = torch.diff(self.local_cu_seqlens)
        documents = torch.repeat_interleave(torch.arange(self.num_documents), local_lengths)
        offsets = torch.arange(self.num_rows) - self.local_cu_seqlens[documents]
        positions = offsets
        if self.cp_size > 1:
            chunk = local_lengths[documents] // 2
            is_tail = offsets >= chunk
            chunk_ids = torch.where(is_tail, 2 * self.cp_size - 1 - cp_rank, cp_rank)
            positions = chunk_ids * chunk + offsets - is_tail * chunk
        is_padding = positions >= torch.diff(self.cu_seqlens.long())[documents]
        rows = (self.cu_seqlens.long()[documents] + positions).masked_fill(is_padding, -1)
        return rows, positions, documents.masked_fill(is_padding, -1)

    def on_device(self, name: str, device: torch.device) -> Tensor:
        """Return the attribute ``name`` on a device, copied there once."""
        key = (name, device)
        if key not in self.memo:
            self.memo[key] = getattr(self, name).to(device)
        return self.memo[key]

    def shard(self, x: Tensor) -> Tensor:
        """Take this rank's rows of a tensor that every rank holds. No collective; its gradient is of those rows.

        Args:
            x: ``[S, ...]``, global.

        Returns:
            ``[T, ...]``, padding rows zero.

        Raises:
            ValueError: ``x`` has not ``num_tokens`` rows.
        """
        if x.shape[0] != self.num_tokens:
            raise ValueError(f"x has {x.shape[0]} rows, but cu_seqlens ends at {self.num_tokens}")
        if self.cp_size == 1:
            return x
        if self.num_tokens == 0:
            return x.new_zeros(self.num_rows, *x.shape[1:])
        rows = x.index_select(0, self.on_device("global_rows", x.device).clamp(min=0))
        return rows.index_fill(0, self.on_device("padding_rows", x.device), 0) if self.has_padding else rows

    def unshard(self, x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Gather every rank's rows. Collective over ``group``: every rank must call. No gradient.

        Args:
            x: ``[T, ...]``, this rank's rows in layout order.
            group: the context-parallel group; None at ``cp_size=1``.

        Returns:
            ``[S, ...]`` on every rank, padding dropped.

        Raises:
            ValueError: ``x`` has not ``num_rows`` rows, or the group is not the layout's.
        """
        problem = self.find_group_problem(group)
        if problem is None and x.shape[0] != self.num_rows:
            problem = f"x has {x.shape[0]} rows, but the layout has num_rows={self.num_rows}"
        if problem is not None:
            raise ValueError(problem)
        if self.cp_size == 1:
            return x.detach()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.cp_size)]
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        out = x.new_empty(self.num_tokens, *x.shape[1:])
        for rank, part in enumerate(parts):
            rows = self._map_rows(rank)[0].to(x.device)
            out[rows[rows >= 0]] = part[rows >= 0]
        return out

    def find_group_problem(self, group: dist.ProcessGroup | None) -> str | None:
        """Return what is wrong with ``group`` (its size and this process's rank must be the layout's), or None."""
        size = 1 if group is None else group.size()
        rank = 0 if group is None else group.rank()
        if (size, rank) == (self.cp_size, self.cp_rank):
            return None
        return (
            f"group has size {size} and this rank is {rank}, but the layout was built with cp_size={self.cp_size} "
            f"and cp_rank={self.cp_rank}; the two must be equal"
        )

    def locate(self, global_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank that holds each global row, and the local row there.

        Args:
            global_rows: int64 ``[R]``, each in ``0 .. num_tokens - 1``.
        """
        rows = global_rows.cpu()
        if self.cp_size == 1:
            return torch.zeros_like(rows), rows
        cu_seqlens = self.cu_seqlens.long()
        documents = torch.searchsorted(cu_seqlens, rows, right=True) - 1
        positions = rows - cu_seqlens[documents]
        chunk = (torch.diff(self.local_cu_seqlens) // 2)[documents]
        chunk_ids = positions // chunk
        is_tail = chunk_ids >= self.cp_size
        ranks = torch.where(is_tail, 2 * self.cp_size - 1 - chunk_ids, chunk_ids)
        return ranks, self.local_cu_seqlens[documents] + is_tail * chunk + positions - chunk_ids * chunk
