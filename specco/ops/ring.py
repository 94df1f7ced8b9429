"""How a trunk's keys and values meet the queries of every rank: round the ring, or gathered once.

Both classes offer the same two walks over the shards that this rank may see. ``forward(visit)`` calls
``visit(source, k, v, bases)`` for each, own shard first. ``backward(visit, prepare)`` calls ``prepare`` and then
``visit`` for each, own shard last, takes the contributions to dK and dV that ``visit`` yields, one by one, and sees to
it that they arrive at their owners.

Ring, cp_size = 4, seen from rank r. K/V move to r + 1; dK/dV start at the first remote rank and follow them. Each
exchange is under way while the step before it computes: backward's first one of K/V beside ``prepare``, which is the
branches' own keys, and the last one of dK/dV, twice as large, beside the own shard::

    step                0          1          2          3          4
    forward computes    r          r - 1      r - 2      r - 3
    backward computes   prepare    r - 1      r - 2      r - 3      r
    dK/dV                          begin      add        add        home from r + 1, add the own part
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype
from specco.ops.rows import RowSet, as_dense


class Contribution(NamedTuple):
    """What some queries add to the gradients of a shard.

    Args:
        rows: of the shard.
        heads: key heads of the shard.
        dk: ``[b, n, heads, H]``, in the inputs' dtype or the accumulator type.
        dv: the same.
    """

    rows: RowSet
    heads: slice
    dk: Tensor
    dv: Tensor


ForwardVisit = Callable[[int, Tensor, Tensor, Tensor], None]
BackwardVisit = Callable[[int, Tensor, Tensor, Tensor], Iterable[Contribution]]


@dataclass
class TrafficCounters:
    """What one rank sent, and how long it stood still for it.

    Args:
        messages: tensors sent.
        bytes: bytes sent.
        wait_seconds: time spent in waits, which no computation covered.
    """

    messages: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


class RingComm:
    """Sends and receives on one process group, posted early and waited on late.

    Args:
        group: the context-parallel group.
        counters: added to, never reset.
    """

    def __init__(self, group: dist.ProcessGroup, counters: TrafficCounters) -> None:
        self.group, self.counters = group, counters
        self._works: list[dist.Work] = []
        self._buffers: list[Tensor] = []

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Start sends to, and receives from, ranks of the group. Empty tensors are not sent.

        The peers must post the matching receives and sends in the same order. Buffers live until :meth:`wait`.
        """
        ops = []
        for tensor, peer in sends:
            if tensor.numel():
                ops.append(dist.P2POp(dist.isend, tensor, dist.get_global_rank(self.group, peer), self.group))
                self.counters.messages += 1
                self.counters.bytes += tensor.numel() * tensor.element_size()
                self._buffers.append(tensor)
        for tensor, peer in receives:
            if tensor.numel():
                ops.append(dist.P2POp(dist.irecv, tensor, dist.get_global_rank(self.group, peer), self.group))
        if ops:
            self._works.extend(dist.batch_isend_irecv(ops))

    def wait(self) -> None:
        """Wait for everything posted."""
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self.counters.wait_seconds += time.perf_counter() - start
        self._works.clear()
        self._buffers.clear()


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Return K and V in one buffer ``[2, K, T, H]``: one message, and heads-major, as the CPU's kernels want it."""
    kv = k.new_empty(2, k.shape[1], k.shape[0], k.shape[2])
    kv[0].copy_(k.transpose(0, 1))
    kv[1].copy_(v.transpose(0, 1))
    return kv


def _unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return views ``k, v [T, K, H]`` of a buffer."""
    return kv[0].transpose(0, 1), kv[1].transpose(0, 1)


def add_contributions(total: Tensor, contributions: Iterable[Contribution]) -> None:
    """Add the gradients of some rows to ``total [2, T, K, H]``; each may go before the next one is made."""
    for rows, heads, dk, dv in contributions:
        rows.add_to(total[0, :, heads], dk)
        rows.add_to(total[1, :, heads], dv)
        del dk, dv


class RingShards:
    """K/V ride the ring for every walk: memory of two shards.

    Args:
        k: ``[T, K, H]``, this rank's rows.
        v: ``[T, K, H]``.
        layout: of the trunk.
        group: context-parallel group, None at one rank.
        counters: of the traffic.
    """

    def __init__(
        self, k: Tensor, v: Tensor, layout: PackedLayout, group: dist.ProcessGroup | None, counters: TrafficCounters
    ) -> None:
        self.k, self.v, self.layout, self.group, self.counters = as_dense(k), as_dense(v), layout, group, counters
        self._bases = layout.local_cu_seqlens[:-1]

    def _neighbours(self) -> tuple[int, int]:
        rank, size = self.layout.cp_rank, self.layout.cp_size
        return (rank + 1) % size, (rank - 1) % size

    def _walk_remote(
        self, group: dist.ProcessGroup, before: Callable[[], None]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Call ``before``, then yield ``(source, k, v)`` of each other rank, every time with the next under way."""
        size, (following, preceding) = self.layout.cp_size, self._neighbours()
        comm = RingComm(group, self.counters)
        kv_held = _pack(self.k, self.v)
        kv_free = torch.empty_like(kv_held)
        comm.post([(kv_held, following)], [(kv_free, preceding)])
        before()
        for step in range(1, size):
            comm.wait()
            kv_held, kv_free = kv_free, kv_held
            if step < size - 1:
                comm.post([(kv_held, following)], [(kv_free, preceding)])
            else:
                del kv_free
            yield (self.layout.cp_rank - step) % size, *_unpack(kv_held)

    def forward(self, visit: ForwardVisit) -> None:
        """Show every shard to ``visit``, the own one first. Collective over the group."""

        def visit_own() -> None:
            visit(self.layout.cp_rank, self.k, self.v, self._bases)

        if self.group is None:
            visit_own()
            return
        for source, k, v in self._walk_remote(self.group, visit_own):
            visit(source, k, v, self._bases)

    def backward(self, visit: BackwardVisit, prepare: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Show every shard to ``visit``, the own one last, and return this rank's ``dk, dv [T, K, H]``.

        Collective over the group.

        Args:
            prepare: called first, while the first exchange is under way.
        """
        if self.group is None:
            prepare()
            return self._add_up(iter(visit(self.layout.cp_rank, self.k, self.v, self._bases)))
        comm, (following, preceding) = RingComm(self.group, self.counters), self._neighbours()
        total, spare = self._new_sum(), None
        for source, k, v in self._walk_remote(self.group, prepare):
            self._add_late(comm, total, visit(source, k, v, self._bases))
            # At most two sums live: the one that leaves, whose memory the next one takes, and the one that comes.
            arriving = torch.empty_like(total) if spare is None else spare
            comm.post([(total, following)], [(arriving, preceding)])
            total, spare = arriving, total
            del k, v
        del spare
        self._add_late(comm, total, visit(self.layout.cp_rank, self.k, self.v, self._bases))
        return total[0].to(self.k.dtype), total[1].to(self.k.dtype)

    def _new_sum(self) -> Tensor:
        return torch.zeros(2, *self.k.shape, dtype=accumulator_dtype(self.k.dtype), device=self.k.device)

    def _add_late(self, comm: RingComm, total: Tensor, contributions: Iterable[Contribution]) -> None:
        """Add contributions to a sum that is under way: those to half the shard are computed before the wait.

        More would cover more of the exchange, but hold both sums and their own memory for longer.
        """
        contributions, held, elements = iter(contributions), [], 0
        while 2 * elements < self.k.numel() and (contribution := next(contributions, None)) is not None:
            held.append(contribution)
            elements += contribution.dk.numel()
        comm.wait()
        add_contributions(total, held)
        held.clear()
        add_contributions(total, contributions)

    def _add_up(self, contributions: Iterator[Contribution]) -> tuple[Tensor, Tensor]:
        """Return the sums of dK and dV ``[T, K, H]``; a contribution that is the whole gradient is taken as it is."""
        shape, dtype = self.k.shape, self.k.dtype
        first, second = next(contributions, None), next(contributions, None)
        if first is not None and second is None and first.rows.is_contiguous and first.dk.numel() == self.k.numel():
            return first.dk.reshape(shape).to(dtype), first.dv.reshape(shape).to(dtype)
        total = self._new_sum()
        add_contributions(total, [part for part in (first, second) if part is not None])
        del first, second
        add_contributions(total, contributions)
        return total[0].to(dtype), total[1].to(dtype)


def find_needed_rows(
    layout: PackedLayout, source: int, reader: int, window: int | None
) -> tuple[Tensor | None, Tensor]:
    """Return which local rows of rank ``source`` rank ``reader`` sees, in whole chunks.

    Args:
        window: sliding window in tokens of queries that stand at or after their anchor; None = all.

    Returns:
        The rows, int64, or None for all of them; and int64 ``[n]``, the place among them that stands for local row 0 of
        each document.
    """
    starts = layout.local_cu_seqlens[:-1]
    chunk = torch.diff(layout.local_cu_seqlens) // 2
    if source == reader:
        return None, starts
    last_chunk = 2 * layout.cp_size - 1
    is_needed = []
    for source_chunk in (source, last_chunk - source):
        needed = torch.zeros_like(chunk, dtype=torch.bool)
        for query_chunk in (reader, last_chunk - reader):
            if query_chunk > source_chunk:
                reach = torch.full_like(chunk, -1) if window is None else query_chunk * chunk - window + 1
                needed |= reach < (source_chunk + 1) * chunk
        is_needed.append(needed)
    has_head, has_tail = is_needed
    if bool(has_head.all() and has_tail.all()):
        return None, starts
    head_rows, tail_rows = has_head * chunk, has_tail * chunk
    counts = head_rows + tail_rows
    places = counts.cumsum(0) - counts
    first = starts + ~has_head * chunk
    rows = torch.repeat_interleave(first - places, counts) + torch.arange(int(counts.sum()))
    return rows, places - ~has_head * has_tail * chunk


class GatheredShards:
    """Each chunk that this rank sees comes once, straight from its owner, and serves every pass over the trunk.

    dK/dV are summed over passes, in the accumulator type, and go home in :meth:`send_home`.

    Args:
        k: ``[T, K, H]``, this rank's rows.
        v: ``[T, K, H]``.
        layout: of the trunk.
        group: context-parallel group, None at one rank.
        counters: of the traffic.
        window: largest sliding window of any pass; None = no limit.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        group: dist.ProcessGroup | None,
        counters: TrafficCounters,
        window: int | None,
    ) -> None:
        self.k, self.v, self.layout, self.counters, self.window = as_dense(k), as_dense(v), layout, counters, window
        self._comm = None if group is None else RingComm(group, counters)
        self._sources = [(layout.cp_rank - step) % layout.cp_size for step in range(1, layout.cp_size)]
        self._bases = {layout.cp_rank: layout.local_cu_seqlens[:-1]}
        self._held: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        if self._comm is not None:
            self._post_gather(self._comm)

    def _post_gather(self, comm: RingComm) -> None:
        rank, layout = self.layout.cp_rank, self.layout
        kv = _pack(self.k, self.v)
        receives = []
        for source in self._sources:
            rows, self._bases[source] = find_needed_rows(layout, source, rank, self.window)
            num_rows = layout.num_rows if rows is None else rows.numel()
            self._held[source] = kv.new_empty(*kv.shape[:2], num_rows, kv.shape[3])
            receives.append((self._held[source], source))
        sends: list[tuple[Tensor, int]] = []
        copied, copy = torch.empty(0, dtype=torch.int64), kv[:, :, :0]
        for reader in reversed(self._sources):
            rows, _ = find_needed_rows(layout, rank, reader, self.window)
            if rows is None:
                sends.append((kv, reader))
                continue
            if not torch.equal(rows, copied):  # without a window one copy serves all readers
                copied, copy = rows, kv.index_select(2, rows.to(kv.device))
            sends.append((copy, reader))
        comm.post(sends, receives)

    def _shards(self) -> list[tuple[int, Tensor, Tensor]]:
        own = [(self.layout.cp_rank, self.k, self.v)]
        return own + [(source, *_unpack(self._held[source])) for source in self._sources]

    def forward(self, visit: ForwardVisit) -> None:
        """Show every shard to ``visit``. No collective but the wait for what the constructor posted."""
        for source, k, v in self._shards():
            if source != self.layout.cp_rank and self._comm is not None:
                self._comm.wait()
            visit(source, k, v, self._bases[source])

    def backward(self, visit: BackwardVisit, prepare: Callable[[], None]) -> None:
        """Show every shard to ``visit`` after ``prepare``, the own one last, and keep dK and dV. No collective."""
        prepare()
        own, *others = self._shards()
        for source, k, v in (*others, own):
            if source not in self._sums:
                self._sums[source] = torch.zeros(2, *k.shape, dtype=accumulator_dtype(k.dtype), device=k.device)
            add_contributions(self._sums[source], visit(source, k, v, self._bases[source]))

    def send_home(self) -> tuple[Tensor, Tensor]:
        """Send the sums to their owners and return this rank's ``dk, dv [T, K, H]``. Collective over the group."""
        rank, size, dtype = self.layout.cp_rank, self.layout.cp_size, accumulator_dtype(self.k.dtype)

        def take(source: int, shape: torch.Size) -> Tensor:
            sums = self._sums.pop(source, None)
            return torch.zeros(shape, dtype=dtype, device=self.k.device) if sums is None else sums

        total = take(rank, torch.Size((2, *self.k.shape)))
        for step in range(1, size):
            assert self._comm is not None
            owner, reader = (rank + step) % size, (rank - step) % size
            rows, _ = find_needed_rows(self.layout, rank, reader, self.window)
            shape = (2, total.shape[1] if rows is None else rows.numel(), *total.shape[2:])
            arriving = torch.empty(shape, dtype=dtype, device=total.device)
            self._comm.post([(take(owner, self._held[owner].transpose(1, 2).shape), owner)], [(arriving, reader)])
            self._comm.wait()
            if rows is None:
                total += arriving
            else:
                total.index_add_(1, rows.to(total.device), arriving)
        return total[0].to(self.k.dtype), total[1].to(self.k.dtype)
