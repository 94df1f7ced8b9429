"""Ulysses x ring with contiguous shards (USP), as SpecForge runs EAGLE-3: a baseline of ``bench_branch_attention.py``.

Contiguous shards, Ulysses (all-to-all over heads) inside a ring; a causal step whose keys all lie after the queries is
skipped, so the last rank of the ring does the most. Each TTT pass runs the ring again over the keys of pass 1; the keys
of later passes are merged by log-sum-exp, one fp32 elementwise product each; each pass stacks and saves all keys so far
and its fp32 output. K and V are two messages; dK and dV make the whole round in fp32.
Source: USP (arXiv 2405.07719); sgl-project/SpecForge ``specforge/modeling/draft/llama3_eagle.py`` and
``specforge/layers/ring/ring_flash_attn.py``. Where Ulysses has more ranks than KV heads, KV heads are repeated, as
DeepSpeed does. SpecForge has no ring for sampled blocks: here the blocks of a rank's own anchors go round the same way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from bench_baselines import (
    Piece,
    Span,
    Traffic,
    attend,
    attend_backward,
    block_backward,
    block_forward,
    branch_backward,
    branch_forward,
    staircase,
)
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """An all-to-all over the Ulysses group of tensors whose rows (tokens or blocks) each rank owns a share of.

    Args:
        owners: for each Ulysses rank the global ids of its rows, ascending; together they come out ascending.
        group: the Ulysses group.
    """

    owners: list[Tensor]
    group: dist.ProcessGroup
    traffic: Traffic

    @cached_property
    def order(self) -> Tensor:
        return torch.cat(self.owners).argsort()

    def to_heads(self, x: Tensor) -> Tensor:
        """[own rows, ..., N, H] -> [all rows, ..., N / ulysses, H]."""
        return SeqAllToAll.apply(x, self, True)

    def to_rows(self, x: Tensor) -> Tensor:
        """[all rows, ..., N / ulysses, H] -> [own rows, ..., N, H]."""
        return SeqAllToAll.apply(x, self, False)


class SeqAllToAll(torch.autograd.Function):
    """Both directions of ``Exchange``; each is the other's backward. Collective over the Ulysses group."""

    @staticmethod
    def forward(ctx, x, exchange: Exchange, to_heads: bool):
        ctx.rest = exchange, to_heads
        shares = [len(ids) for ids in exchange.owners]
        order, degree, rank = exchange.order, len(shares), dist.get_rank(exchange.group)
        if to_heads:
            send = x.unflatten(-2, (degree, -1)).movedim(-3, 0).flatten(0, 1)
            sizes = [shares[rank]] * degree, shares
        else:
            send = torch.empty_like(x).index_copy_(0, order, x)
            sizes = shares, [shares[rank]] * degree
        send = send.contiguous()
        received = send.new_empty((sum(sizes[1]), *send.shape[1:]))
        since = time.perf_counter()
        dist.all_to_all_single(received, send, sizes[1], sizes[0], group=exchange.group)
        own = sizes[0][rank] * send[0].nbytes if len(send) else 0
        exchange.traffic.count(send.nbytes - own, since)
        if to_heads:
            return received[order]
        return received.unflatten(0, (degree, -1)).movedim(0, -3).flatten(-3, -2)

    @staticmethod
    def backward(ctx, grad):
        exchange, to_heads = ctx.rest
        return SeqAllToAll.apply(grad, exchange, not to_heads), None, None


@dataclass
class UspPlan:
    """Contiguous shards, document by document: rank = ring rank * ulysses + Ulysses rank.

    Args:
        lengths: document lengths, each a multiple of ulysses * ring.
        ulysses, ring: degrees; their product is the number of ranks.
        rank: this rank.
        groups: (Ulysses group, ring group), None where the degree is 1.
        anchors: ascending global rows of sampled blocks, None for EAGLE-3.
        width: queries of a block.
        dtype: of q, and so of a staircase's mask.
    """

    lengths: list[int]
    ulysses: int
    ring: int
    rank: int
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    anchors: Tensor | None = None
    width: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def ring_rank(self) -> int:
        return self.rank // self.ulysses

    def rows_of(self, rank: int, parts: int) -> Tensor:
        """Global rows of part ``rank`` when each document is cut in ``parts``."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        starts = [0, *ends]
        return torch.cat([torch.arange(a, b).chunk(parts)[rank] for a, b in zip(starts, ends, strict=False)])

    @property
    def rows(self) -> Tensor:
        """Global rows of this rank."""
        return self.rows_of(self.rank, self.ulysses * self.ring)

    def exchange(self, traffic: Traffic, of_blocks: bool = False) -> Exchange | None:
        """The Ulysses exchange of tokens, or of blocks (which live where their anchor does)."""
        if self.ulysses == 1:
            return None
        peers = range(self.ring_rank * self.ulysses, (self.ring_rank + 1) * self.ulysses)
        owners = [self.rows_of(rank, self.ulysses * self.ring) for rank in peers]
        if of_blocks and self.anchors is not None:
            owners = [self.anchors[torch.isin(self.anchors, rows)] for rows in owners]
        assert self.groups[0] is not None
        return Exchange(owners, self.groups[0], traffic)

    @cached_property
    def steps(self) -> list[list[Piece]]:
        return [self.pieces(step) for step in range(self.ring)]

    def pieces(self, step: int) -> list[Piece]:
        """Kernel calls of a ring step; none where all keys of the step lie after the queries."""
        if step > self.ring_rank:
            return []
        rows, start, pieces, done = self.rows_of(self.ring_rank, self.ring), 0, [], 0
        for length in self.lengths:
            span: Span = start, start + length // self.ring
            start = span[1]
            if self.anchors is None:
                pieces.append(Piece(span, span, None if step else "causal"))
                continue
            first, last = int(rows[span[0]]), int(rows[span[1] - 1])
            here = self.anchors[(self.anchors >= first) & (self.anchors <= last)] - first + span[0]
            count = len(here) * self.width
            if step and count:
                pieces.append(Piece((done, done + count), span))
            elif count:
                pieces += staircase(here.tolist(), self.width, span[0], self.dtype, done)
            done += count
        return pieces


class RingComm:
    """K and V (or their gradients) to the next rank of the ring and from the one before, one message a tensor."""

    def __init__(self, plan: UspPlan, traffic: Traffic) -> None:
        self.group, self.traffic, self.works = plan.groups[1], traffic, []
        ranks = [r * plan.ulysses + plan.rank % plan.ulysses for r in range(plan.ring)]
        self.dst, self.src = (ranks[(plan.ring_rank + shift) % plan.ring] for shift in (1, -1))

    def exchange(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        received = torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
        operations = []
        for x, y in zip(tensors, received, strict=True):
            operations.append(dist.P2POp(dist.isend, x, self.dst, self.group))
            operations.append(dist.P2POp(dist.irecv, y, self.src, self.group))
            self.traffic.count(x.nbytes, time.perf_counter())
        self.works = dist.batch_isend_irecv(operations)
        return received

    def wait(self) -> None:
        since = time.perf_counter()
        for work in self.works:
            work.wait()
        self.traffic.wait_s += time.perf_counter() - since


class UspAttention(torch.autograd.Function):
    """One pass: the ring over k_cache[:, 0], then the branch; everything stacked and saved as its authors do.

    Args:
        q: ``[L, N, H]``; k_cache, v_cache: ``[L, d, K, H]``, keys of passes 1..d (slot 0 is the trunk); with sampled
            blocks q is ``[B * W, N, H]``, the caches have one slot and k_branch, v_branch ``[B, W, K, H]`` are given.
    """

    @staticmethod
    def forward(ctx, q, k_cache, v_cache, k_branch, v_branch, plan: UspPlan, traffic):
        k, v = k_cache[:, 0].contiguous(), v_cache[:, 0].contiguous()
        comm, state = RingComm(plan, traffic), None
        for step in range(plan.ring):
            last = step + 1 == plan.ring
            received = (k, v) if last else comm.exchange((k, v))
            if pieces := plan.steps[step]:
                state = attend(q, k, v, pieces, state)
            if not last:
                comm.wait()
            k, v = received
        out, lse = state if state is not None else attend(q, k, v, [])
        if k_branch is not None:
            block_forward(q, k_branch, v_branch, out, lse)
        else:
            branch_forward(q, k_cache[:, 1:], v_cache[:, 1:], out, lse)
        ctx.save_for_backward(q, k_cache, v_cache, k_branch, v_branch, out, lse)
        ctx.rest = plan, traffic
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k_cache, v_cache, k_branch, v_branch, out, lse = ctx.saved_tensors
        plan, traffic = ctx.rest
        dq = torch.zeros(q.shape, dtype=out.dtype)
        d_cache = [torch.zeros(x.shape, dtype=out.dtype) for x in (k_cache, v_cache)]
        d_branch = (None, None)
        rounded = out.to(q.dtype)
        trunk = k_cache[:, 0].contiguous(), v_cache[:, 0].contiguous()
        d_trunk = ring_backward(grad_out, q, trunk, rounded, lse, dq, plan, traffic)
        for cache, grad in zip(d_cache, d_trunk, strict=True):
            cache[:, 0] = grad
        if k_branch is None:
            d_keys = branch_backward(grad_out, q, k_cache[:, 1:], v_cache[:, 1:], out, lse, dq)
            for cache, grad in zip(d_cache, d_keys, strict=True):
                cache[:, 1:] = grad
        else:
            d_branch = block_backward(grad_out, q, k_branch, v_branch, rounded, lse, dq)
            d_branch = tuple(x.to(q.dtype) for x in d_branch)
        return dq.to(q.dtype), *(x.to(q.dtype) for x in d_cache), *d_branch, None, None


def ring_backward(grad_out, q, kv, out, lse, dq, plan: UspPlan, traffic: Traffic) -> tuple[Tensor, Tensor]:
    """Add the trunk's dQ to ``dq``; K, V and their fp32 gradients go round; return this rank's dK and dV."""
    comm, d_comm, arriving = RingComm(plan, traffic), RingComm(plan, traffic), None
    d_k, d_v = (torch.zeros(x.shape, dtype=dq.dtype) for x in kv)
    for step in range(plan.ring):
        last = step + 1 == plan.ring
        received = kv if last else comm.exchange(kv)
        pieces = plan.steps[step]
        if pieces:
            d_k, d_v = attend_backward(grad_out, q, kv[0], kv[1], out, lse, pieces, dq)
        if arriving is not None:
            d_comm.wait()
            d_k, d_v = (d_k + arriving[0], d_v + arriving[1]) if pieces else arriving
        if not last:
            comm.wait()
        kv = received
        if plan.ring > 1:
            arriving = d_comm.exchange((d_k, d_v))
    if arriving is None:
        return d_k, d_v
    d_comm.wait()
    return arriving


class Usp:
    """A variant of the benchmark: EAGLE-3's passes or sampled blocks on this rank's contiguous shard.

    Attributes:
        rows: int64 ``[T]``, global rows of this rank.
        own_anchors: int64 ``[B]``, global rows of the anchors whose blocks live here.
        traffic: counters of the latest step.
    """

    def __init__(self, plan: UspPlan) -> None:
        self.plan, self.rows, self.traffic = plan, plan.rows, Traffic()
        if plan.anchors is not None:
            self.own_anchors = plan.anchors[torch.isin(plan.anchors, self.rows)]
        self.tokens, self.blocks = plan.exchange(self.traffic), plan.exchange(self.traffic, plan.anchors is not None)

    def split(self, x: Tensor, exchange: Exchange | None) -> Tensor:
        if exchange is None:
            return x
        heads = x.shape[-2]
        if heads < self.plan.ulysses:
            x = x.repeat_interleave(self.plan.ulysses // heads, -2)
        return exchange.to_heads(x)

    def run_passes(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        """q[d] [T, N, H], k[d] and v[d] [T, K, H] of each pass -> out[d] [T, N, H]. Collective."""
        self.traffic.reset()
        outs, keys, values = [], [], []
        for q_pass, k_pass, v_pass in zip(q, k, v, strict=True):
            keys.append(self.split(k_pass, self.tokens))
            values.append(self.split(v_pass, self.tokens))
            caches = torch.stack(keys, 1), torch.stack(values, 1)
            out = UspAttention.apply(self.split(q_pass, self.tokens), *caches, None, None, self.plan, self.traffic)
            outs.append(out if self.tokens is None else self.tokens.to_rows(out))
        return outs

    def run_blocks(self, q: Tensor, k: Tensor, v: Tensor, k_branch: Tensor, v_branch: Tensor) -> Tensor:
        """q [B, W, N, H], trunk k and v [T, K, H], own keys [B, W, K, H] -> [B, W, N, H]. Collective."""
        self.traffic.reset()
        trunk = (self.split(x, self.tokens).unsqueeze(1) for x in (k, v))
        q, k_branch, v_branch = (self.split(x, self.blocks) for x in (q, k_branch, v_branch))
        out = UspAttention.apply(q.flatten(0, 1), *trunk, k_branch, v_branch, self.plan, self.traffic).view_as(q)
        return out if self.blocks is None else self.blocks.to_rows(out)
