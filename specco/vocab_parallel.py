"""Rows of logits whose vocabulary is spread over the ranks of a group (the columns of a sharded language-model head).

    rank 0         rank 1         rank 2
    logits [r, 3]  logits [r, 3]  logits [r, 2]        a vocabulary of 8 on 3 ranks, cut as torch.chunk cuts
    tokens 0 1 2   tokens 3 4 5   tokens 6 7

Every rank of the group has the same rows. What is summed over the vocabulary is all-reduced, so every rank then holds
the same value and computes the same loss from it; its backward needs no collective, since each rank's own logits enter
its value on that rank with the same gradient. Only what comes *before* the head needs one: ``enter``.

Source: Megatron-LM (arXiv 1909.08053), section 3, for the cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The tokens whose logits this rank computes.

    Methods are collective over the group: every rank must call.

    Args:
        group: ranks that hold the shards, in order; None: this rank holds all.
        start: first token.
        size: number of tokens.
    """

    group: dist.ProcessGroup | None
    start: int
    size: int

    @classmethod
    def build(cls, vocab_size: int, group: dist.ProcessGroup | None = None) -> VocabShard:
        """Return this rank's shard of a vocabulary, cut as ``torch.chunk`` and ``Shard(0)`` cut it."""
        if group is None:
            return cls(None, 0, vocab_size)
        width = -(-vocab_size // group.size())
        start = min(group.rank() * width, vocab_size)
        return cls(group, start, min(width, vocab_size - start))

    def enter(self, x: Tensor) -> Tensor:
        """Return ``x``, the input of a product with this shard's weights; its gradient is summed over the shards."""
        return x if self.group is None else _Enter.apply(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the shards. No gradient."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """Return the largest value of ``x`` over the shards. No gradient."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.group is None:
            return x
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=op, group=self.group)
        return out

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column of each token, 0 where another shard has it; whether it is here). No collective."""
        columns = ids - self.start
        is_here = (columns >= 0) & (columns < self.size)
        return columns.where(is_here, 0), is_here

    def pick(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return ``[r]``: of each row of ``values`` ``[r, size]`` that of one token. No gradient.

        Args:
            values: this shard's columns.
            ids: int64 ``[r]``.
        """
        if self.group is None:
            return values.gather(1, ids[:, None]).squeeze(1)
        columns, is_here = self.locate(ids)
        return self.sum(values.gather(1, columns[:, None]).squeeze(1) * is_here)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return ``[r]``: the log of the sum over the whole vocabulary, from ``[r, size]``. No gradient."""
        if self.group is None:
            return torch.logsumexp(logits, dim=1)
        local = torch.logsumexp(logits, dim=1)
        largest = self.max(local)
        return largest + self.sum(torch.exp(local - largest)).log()

    def log_softmax(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``[r, size]`` log-probabilities of a dtype. No gradient."""
        if self.group is None:
            return torch.log_softmax(logits, dim=1, dtype=dtype)
        wide = logits.to(dtype)
        return wide - self.logsumexp(wide)[:, None]

    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64 ``[r]``: the first token of the largest logit."""
        if self.group is None:
            return logits.argmax(dim=1)
        values, columns = logits.max(dim=1)
        last = torch.iinfo(columns.dtype).max
        tokens = (columns + self.start).where(values == self.max(values), last)
        return self._reduce(tokens, dist.ReduceOp.MIN)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        grad = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
        lse = shard.logsumexp(logits)
        ctx.shard = shard
        ctx.save_for_backward(logits, ids, lse)
        return shard.pick(logits, ids) - lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        logits, ids, lse = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_logits = torch.exp(logits - lse[:, None]).mul_(-grad[:, None])
        columns, is_here = ctx.shard.locate(ids)
        grad_logits.scatter_add_(1, columns[:, None], (grad * is_here)[:, None])
        return grad_logits, None, None


def compute_logprobs(logits: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
    """Return ``[r]``: the log-probability of one token a row.

    Collective over the shard's group in the forward alone: each rank's gradient is that of its own logits.

    Args:
        logits: ``[r, size]``, this shard's columns, in the accumulator type.
        ids: int64 ``[r]``, tokens of the whole vocabulary.
        shard: of the vocabulary.
    """
    return _Logprobs.apply(logits, ids, shard)
