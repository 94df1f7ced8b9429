"""The keys of a branch itself: tiny blocks [G x M], never sent anywhere, in closed form and in row blocks.

The functions also finish a pass: they fold the branch and the sink into the trunk's partial result, and the branch's
part into dq, while a block of rows is in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specco.ops.naive import accumulator_dtype

# Elements of a block of queries (half a MiB in float32) on the CPU; a GPU takes blocks a hundred times larger.
_BLOCK_ELEMENTS = {"cpu": 2**17}
_DEFAULT_BLOCK_ELEMENTS = 2**25


@dataclass(frozen=True)
class BranchKeys:
    """Keys and values of the branches.

    Args:
        keys: tensors ``[B, m_i, K, H]``, laid end to end along the key dim; at least one.
        values: the same.
        mask: bool ``[G, M]`` or ``[B, G, M]``, True = seen; None = all.
    """

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor | None

    def block(self, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of some branches as ``[b * K, M, H]``."""
        keys, values = (
            torch.cat([part[begin:end] for part in parts], 1).to(dtype).transpose(1, 2).flatten(0, 1)
            for parts in (self.keys, self.values)
        )
        return keys, values

    def mask_scores(self, scores: Tensor, begin: int, end: int) -> Tensor:
        """Set unseen entries of ``scores [b * K, G * R, M]`` to -inf, in place."""
        if self.mask is None:
            return scores
        mask = self.mask[begin:end] if self.mask.dim() == 3 else self.mask.unsqueeze(0)
        num_kv_heads = self.keys[0].shape[2]
        batch, num_queries, num_keys = end - begin, mask.shape[1], mask.shape[2]
        view = scores.view(batch, num_kv_heads, num_queries, -1, num_keys)
        view.masked_fill_(~mask[:, None, :, None, :], float("-inf"))
        return scores


def as_mask(branch_mask: Tensor | str | None, num_queries: int, device: torch.device) -> Tensor | None:
    """Return the in-branch mask as a bool tensor on a device; None = all."""
    if isinstance(branch_mask, str):
        return torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).tril()
    return None if branch_mask is None else branch_mask.to(device)


def _block_rows(q: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS.get(q.device.type, _DEFAULT_BLOCK_ELEMENTS) // max(1, q.shape[1:].numel()))


def _by_kv_head(x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return ``[b, G, N, ...]`` as ``[b * K, G * R, ...]`` with R = N // K."""
    batch, num_queries, num_heads = x.shape[:3]
    x = x.to(dtype).reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, *x.shape[3:])
    return x.transpose(1, 2).reshape(batch * num_kv_heads, -1, *x.shape[4:])


def _from_kv_head(x: Tensor, shape: torch.Size, num_kv_heads: int) -> Tensor:
    """Undo :func:`_by_kv_head`; ``shape`` is that of the block."""
    batch, num_queries, num_heads = shape[:3]
    x = x.view(batch, num_kv_heads, num_queries, num_heads // num_kv_heads, *shape[3:])
    return x.transpose(1, 2).reshape(shape)


def finish_forward(
    out: Tensor, lse: Tensor, q: Tensor, branch: BranchKeys | None, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Fold the branch's keys and the sinks into the trunk's partial result.

    Args:
        out: ``[B, G, N, H]``, the trunk's partial result, in q's dtype or the accumulator type; may be overwritten.
        lse: ``[B, G, N]``, its denominators; may be overwritten.
        q: ``[B, G, N, H]``.
        branch: keys of the branches, or None.
        sinks: ``[N]``, or None.
        scale: factor of the scores.

    Returns:
        ``out`` in q's dtype, and ``lse``.
    """
    if branch is None and sinks is None:
        return out.to(q.dtype), lse
    dtype = accumulator_dtype(q.dtype)
    result = out if out.dtype == q.dtype else torch.empty_like(q, memory_format=torch.contiguous_format)
    num_kv_heads = 1 if branch is None else branch.keys[0].shape[2]
    for begin in range(0, q.shape[0], _block_rows(q)):
        end = min(begin + _block_rows(q), q.shape[0])
        block_out, block_lse = out[begin:end].to(dtype), lse[begin:end]
        joint, scores, values = block_lse, q.new_empty(0), q.new_empty(0)
        if branch is not None:
            keys, values = branch.block(begin, end, dtype)
            scores = torch.bmm(_by_kv_head(q[begin:end], num_kv_heads, dtype), keys.transpose(1, 2)).mul_(scale)
            branch.mask_scores(scores, begin, end)
            own_lse = _from_kv_head(torch.logsumexp(scores, -1), block_lse.shape, num_kv_heads)
            joint = torch.logaddexp(block_lse, own_lse)
        # A row without any key keeps lse -inf: it does not see the sink either.
        total = joint if sinks is None else torch.logaddexp(joint, sinks.to(dtype)).where(joint > -torch.inf, joint)
        safe = total.masked_fill(total == -torch.inf, 0.0)
        block_out = block_out * torch.exp(block_lse - safe).unsqueeze(-1)
        if branch is not None:
            weights = torch.exp(scores - _by_kv_head(safe, num_kv_heads, dtype).unsqueeze(-1))
            block_out += _from_kv_head(torch.bmm(weights, values), block_out.shape, num_kv_heads)
        result[begin:end] = block_out
        lse[begin:end] = total
    return result, lse


def finish_backward(
    dq: Tensor | None, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, branch: BranchKeys, scale: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return dq with the branch's part, and the gradients of the branch's keys and values.

    Args:
        dq: ``[B, G, N, H]``, the trunk's part, in q's dtype or the accumulator type; may be overwritten. None: not yet
            known, the branch's part alone is returned, in the accumulator type.
        dout: ``[B, G, N, H]``.
        out: ``[B, G, N, H]``, joint.
        lse: ``[B, G, N]``, joint; +inf where a row saw no key.

    Returns:
        ``dq``, in q's dtype where it was given, and one gradient for each tensor of keys and of values.
    """
    dtype = accumulator_dtype(q.dtype)
    if dq is not None and dq.dtype == q.dtype:
        result = dq
    else:
        result = torch.empty_like(q, dtype=dtype if dq is None else q.dtype, memory_format=torch.contiguous_format)
    dkeys = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in branch.keys]
    dvalues = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in branch.values]
    num_kv_heads, sizes = branch.keys[0].shape[2], [part.shape[1] for part in branch.keys]
    for begin in range(0, q.shape[0], _block_rows(q)):
        end = min(begin + _block_rows(q), q.shape[0])
        shape = q[begin:end].shape
        keys, values = branch.block(begin, end, dtype)
        queries, douts, outs, denominators = (
            _by_kv_head(x[begin:end], num_kv_heads, dtype) for x in (q, dout, out, lse)
        )
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        weights = branch.mask_scores(scores, begin, end).sub_(denominators.unsqueeze(-1)).exp_()
        delta = (douts * outs).sum(-1, keepdim=True)
        dscores = torch.bmm(douts, values.transpose(1, 2)).sub_(delta).mul_(weights).mul_(scale)
        part_dq = _from_kv_head(torch.bmm(dscores, keys), shape, num_kv_heads)
        result[begin:end] = part_dq if dq is None else dq[begin:end] + part_dq
        for grads, block in (
            (dkeys, torch.bmm(dscores.transpose(1, 2), queries)),
            (dvalues, torch.bmm(weights.transpose(1, 2), douts)),
        ):
            block = block.view(end - begin, num_kv_heads, -1, shape[-1]).transpose(1, 2)
            for grad, part in zip(grads, block.split(sizes, 1), strict=True):
                grad[begin:end] = part
    return result, dkeys, dvalues


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient ``[N]`` of the sinks from this rank's rows: ``-sum of exp(sink - lse) * (dout . out)``."""
    dtype = accumulator_dtype(out.dtype)
    total = torch.zeros(sinks.shape, dtype=dtype, device=sinks.device)
    for begin in range(0, out.shape[0], _block_rows(out)):
        block = slice(begin, begin + _block_rows(out))
        delta = (dout[block].to(dtype) * out[block].to(dtype)).sum(-1)
        parts = torch.exp(sinks.to(dtype) - lse[block]) * delta
        total -= parts.masked_fill_(lse[block] == -torch.inf, 0.0).flatten(0, -2).sum(0)
    return total.to(sinks.dtype)
