"""Baselines of ``bench_branch_attention.py``: how others run a draft's attention under context parallelism.

Each is written here from its authors' description, calls the same CPU kernel as specco
(``aten._scaled_dot_product_flash_attention_for_cpu`` and its backward with the joint out and lse), and is checked
against the dense oracle by ``--check`` and by tests/distributed/test_bench_baselines.py.

``AllGatherAttention``
    K and V of the trunk are all-gathered in each attention call, the gathered pair is saved for backward, its
    gradient is reduce-scattered in the input's type; queries are split head and tail, document by document.
    Source: Llama 3 report (arXiv 2407.21783) section 3.3.2, and the flex-attention context parallelism of torchtitan.
``UspAttention``, in bench_usp.py
    Ulysses x ring with contiguous shards, as SpecForge trains EAGLE-3. With one rank: the single-process baseline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Span = tuple[int, int]
# Rows of one staircase step: about this many query rows share one masked kernel call.
STAIRCASE_ROWS = 256


@dataclass
class Traffic:
    """What one rank sent (bytes, messages) and the seconds it stood waiting for others."""

    bytes_sent: int = 0
    messages: int = 0
    wait_s: float = 0.0

    def count(self, num_bytes: int, since: float) -> None:
        self.bytes_sent += num_bytes
        self.messages += 1
        self.wait_s += time.perf_counter() - since

    def reset(self) -> None:
        self.bytes_sent, self.messages, self.wait_s = 0, 0, 0.0


@dataclass(frozen=True)
class Piece:
    """One kernel call: query rows x key rows, whole (mask None), causal, or under an additive mask of q's dtype."""

    queries: Span
    keys: Span
    mask: Tensor | str | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], state: tuple[Tensor, Tensor] | None = None):
    """Run the pieces over q [L, N, H], k and v [R, K, H]; return fp32 (float64) out [L, N, H] and lse [L, N].

    ``state`` is an earlier (out, lse) over other keys; pieces are merged into it in place.
    """
    accumulator = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        state = q.new_zeros(q.shape, dtype=accumulator), q.new_full(q.shape[:2], -torch.inf, dtype=accumulator)
    out, lse = state
    for piece in pieces:
        rows, keys = slice(*piece.queries), slice(*piece.keys)
        mask = piece.mask if isinstance(piece.mask, Tensor) else None
        part_out, part_lse = flash_forward(
            *(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), 0.0, piece.mask == "causal", attn_mask=mask
        )
        merge(out[rows], lse[rows], part_out[0].transpose(0, 1), part_lse[0].transpose(0, 1))
    return state


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part over disjoint keys into (out [..., H], lse [...]) in place; every row of the part sees a key."""
    new_lse = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - new_lse).exp_().unsqueeze(-1)).add_(part_out * (part_lse - new_lse).exp_().unsqueeze(-1))
    lse.copy_(new_lse)


def attend_backward(grad_out, q, k, v, out, lse, pieces, dq) -> tuple[Tensor, Tensor]:
    """Add the pieces' dQ to ``dq`` and return their dK and dV [R, K, H], all in the accumulator's type."""
    dk, dv = (torch.zeros(x.shape, dtype=dq.dtype) for x in (k, v))
    for piece in pieces:
        rows, keys = slice(*piece.queries), slice(*piece.keys)
        mask = piece.mask if isinstance(piece.mask, Tensor) else None
        head_major = [x.transpose(0, 1)[None] for x in (grad_out[rows], q[rows], k[keys], v[keys], out[rows])]
        grads = flash_backward(
            *head_major, lse[rows].transpose(0, 1)[None], 0.0, piece.mask == "causal", attn_mask=mask
        )
        for total, part in zip((dq[rows], dk[keys], dv[keys]), grads, strict=True):
            total.add_(part[0].transpose(0, 1))
    return dk, dv


def branch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge TTT's branch keys k, v [L, M, K, H] (one elementwise product each, in fp32) into out and lse in place."""
    q5 = q.unflatten(1, (k.shape[2], -1)).to(out.dtype)
    out5, lse4 = out.view(q5.shape), lse.view(q5.shape[:-1])
    for m in range(k.shape[1]):
        key, value = (x[:, m].unsqueeze(-2).to(out.dtype) for x in (k, v))
        score = (q5 * key).sum(-1) * q.shape[-1] ** -0.5
        merge(out5, lse4, value.expand_as(out5), score)


def branch_backward(grad_out, q, k, v, out, lse, dq) -> tuple[Tensor, Tensor]:
    """Closed form of ``branch_forward``: add to ``dq``, return dK and dV [L, M, K, H] in the accumulator's type."""
    shape = (k.shape[2], -1)
    scale = q.shape[-1] ** -0.5
    q5, grad5, out5 = (x.unflatten(1, shape).to(dq.dtype) for x in (q, grad_out, out))
    lse4, dk, dv = lse.unflatten(1, shape), torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
    for m in range(k.shape[1]):
        key, value = (x[:, m].unsqueeze(-2).to(dq.dtype) for x in (k, v))
        weight = ((q5 * key).sum(-1) * scale - lse4).exp()
        d_score = weight * (grad5 * (value - out5)).sum(-1) * scale
        dq.view(q5.shape).add_(d_score.unsqueeze(-1) * key)
        dk[:, m] = (d_score.unsqueeze(-1) * q5).sum(2)
        dv[:, m] = (grad5 * weight.unsqueeze(-1)).sum(2)
    return dk, dv


def block_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the bidirectional blocks' own keys k, v [B, M, K, H] into out [B * G, N, H]: one batched kernel call."""
    if not len(k):
        return
    blocks = q.unflatten(0, (-1, k.shape[1]))
    part_out, part_lse = flash_forward(*(x.transpose(1, 2) for x in (blocks, k, v)), 0.0, False)
    merge(out, lse, part_out.transpose(1, 2).flatten(0, 1), part_lse.transpose(1, 2).flatten(0, 1))


def block_backward(grad_out, q, k, v, out, lse, dq) -> tuple[Tensor, Tensor]:
    """Backward of ``block_forward`` from the joint (out, lse), same kernel."""
    if not len(k):
        return torch.zeros_like(k), torch.zeros_like(v)
    grad4, q4, out4, lse3 = (x.unflatten(0, (-1, k.shape[1])).transpose(1, 2) for x in (grad_out, q, out, lse))
    dq4, dk, dv = flash_backward(grad4, q4, k.transpose(1, 2), v.transpose(1, 2), out4, lse3, 0.0, False)
    dq.add_(dq4.transpose(1, 2).flatten(0, 1))
    return dk.transpose(1, 2).to(dq.dtype), dv.transpose(1, 2).to(dq.dtype)


def staircase(anchors: list[int], width: int, start: int, dtype: torch.dtype, first_query: int = 0) -> list[Piece]:
    """Pieces of ascending ``anchors`` (key rows; block b sees keys start <= t < anchors[b]) of ``width`` queries each.

    A few blocks share a call: whole up to their first anchor, masked from there to their last. Rows that see no key
    of the masked part are left out of it, since the kernel answers such rows with lse 0.
    """
    pieces = []
    for i in range(0, len(anchors), per_call := max(1, STAIRCASE_ROWS // width)):
        group = torch.tensor(anchors[i : i + per_call])
        low, high, base = int(group[0]), int(group[-1]), first_query + i * width
        if low > start:
            pieces.append(Piece((base, base + len(group) * width), (start, low)))
        if high > low:
            skip = int((group == low).sum())
            visible = torch.arange(low, high) < group[skip:, None]
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
            mask = mask.repeat_interleave(width, 0)[None, None]
            pieces.append(Piece((base + skip * width, base + len(group) * width), (low, high), mask))
    return pieces


@dataclass
class AllGatherPlan:
    """Who sees what on this rank, per document: head chunk r and tail chunk 2*cp-1-r of the queries, all keys."""

    lengths: list[int]
    cp: int
    rank: int
    rows: Tensor = field(init=False)
    order: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shards: list[list[Tensor]] = [[] for _ in range(self.cp)]
        start = 0
        for length in self.lengths:
            chunks = torch.arange(start, start + length).chunk(2 * self.cp)
            for r in range(self.cp):
                shards[r] += [chunks[r], chunks[2 * self.cp - 1 - r]]
            start += length
        self.rows = torch.cat(shards[self.rank])
        # The gathered tensor lies rank by rank; this puts it back in the documents' order.
        self.order = torch.cat([torch.cat(shard) for shard in shards]).argsort()

    def pieces(self) -> list[Piece]:
        """Every-row queries: for each chunk its own causal triangle and everything of the document before it."""
        pieces, local, start = [], 0, 0
        for length in self.lengths:
            chunk = length // (2 * self.cp)
            for index in (self.rank, 2 * self.cp - 1 - self.rank):
                own = start + index * chunk
                pieces.append(Piece((local, local + chunk), (own, own + chunk), "causal"))
                if index:
                    pieces.append(Piece((local, local + chunk), (start, own)))
                local += chunk
            start += length
        return pieces

    def block_pieces(self, anchors: Tensor, width: int, dtype: torch.dtype) -> list[Piece]:
        """Sampled blocks of this rank; ``anchors`` are ascending global rows."""
        pieces, start, done = [], 0, 0
        for length in self.lengths:
            here = anchors[(anchors >= start) & (anchors < start + length)].tolist()
            pieces += staircase(here, width, start, dtype, done * width)
            done, start = done + len(here), start + length
        return pieces


class AllGatherAttention(torch.autograd.Function):
    """One attention call: gather K and V, attend, merge the branch; backward reduce-scatters dK and dV."""

    @staticmethod
    def forward(ctx, q, k, v, k_branch, v_branch, pieces, plan, group, traffic, is_block):
        k_all, v_all = (all_gather(x, plan, group, traffic) for x in (k, v))
        out, lse = attend(q, k_all, v_all, pieces)
        if k_branch is not None:
            (block_forward if is_block else branch_forward)(q, k_branch, v_branch, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k_all, v_all, k_branch, v_branch, out, lse)
        ctx.rest = pieces, plan, group, traffic, is_block
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, k_branch, v_branch, out, lse = ctx.saved_tensors
        pieces, plan, group, traffic, is_block = ctx.rest
        dq = torch.zeros(q.shape, dtype=lse.dtype)
        dk, dv = attend_backward(grad_out, q, k, v, out, lse, pieces, dq)
        d_branch = (None, None)
        if k_branch is not None:
            d_branch = (block_backward if is_block else branch_backward)(grad_out, q, k_branch, v_branch, out, lse, dq)
            d_branch = tuple(x.to(q.dtype) for x in d_branch)
        dk, dv = (reduce_scatter(x.to(q.dtype), plan, group, traffic) for x in (dk, dv))
        return dq.to(q.dtype), dk, dv, *d_branch, None, None, None, None, None


def all_gather(x: Tensor, plan: AllGatherPlan, group, traffic: Traffic) -> Tensor:
    """[T, K, H] of each rank -> [S, K, H] in the documents' order. Collective."""
    gathered = x.new_empty((plan.cp * x.shape[0], *x.shape[1:]))
    since = time.perf_counter()
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    traffic.count((plan.cp - 1) * x.nbytes, since)
    return gathered[plan.order]


def reduce_scatter(x: Tensor, plan: AllGatherPlan, group, traffic: Traffic) -> Tensor:
    """Sum of all ranks' [S, K, H] -> this rank's [T, K, H]. Collective."""
    shards = torch.empty_like(x).index_copy_(0, plan.order, x)
    own = x.new_empty((x.shape[0] // plan.cp, *x.shape[1:]))
    since = time.perf_counter()
    dist.reduce_scatter_tensor(own, shards, group=group)
    traffic.count((plan.cp - 1) * own.nbytes, since)
    return own


class AllGather:
    """A variant of the benchmark: EAGLE-3's passes or sampled blocks on this rank's head and tail chunks.

    Attributes: as of ``bench_usp.Usp``.
    """

    def __init__(self, plan: AllGatherPlan, group, dtype: torch.dtype, anchors: Tensor | None = None, width: int = 1):
        self.plan, self.group, self.rows, self.traffic = plan, group, plan.rows, Traffic()
        if anchors is None:
            self.pieces = plan.pieces()
        else:
            self.own_anchors = anchors[torch.isin(anchors, self.rows)]
            self.pieces = plan.block_pieces(self.own_anchors, width, dtype)

    def run_passes(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        """q[d] [T, N, H], k[d] and v[d] [T, K, H] of each pass -> out[d] [T, N, H]. Collective."""
        self.traffic.reset()
        outs = []
        for d, q_pass in enumerate(q):
            branch = (torch.stack(k[1 : d + 1], 1), torch.stack(v[1 : d + 1], 1)) if d else (None, None)
            rest = self.pieces, self.plan, self.group, self.traffic, False
            outs.append(AllGatherAttention.apply(q_pass, k[0], v[0], *branch, *rest))
        return outs

    def run_blocks(self, q: Tensor, k: Tensor, v: Tensor, k_branch: Tensor, v_branch: Tensor) -> Tensor:
        """q [B, W, N, H], trunk k and v [T, K, H], own keys [B, W, K, H] -> [B, W, N, H]. Collective."""
        self.traffic.reset()
        rest = self.pieces, self.plan, self.group, self.traffic, True
        return AllGatherAttention.apply(q.flatten(0, 1), k, v, k_branch, v_branch, *rest).view_as(q)
