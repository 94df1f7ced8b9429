"""Dense branch attention: the oracle of every fast path. One rank, plain autograd, any dtype up to float64.

It builds the whole [queries x (trunk + branch)] mask and softmax, so it is for tests and tiny models only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def trunk_visibility(
    cu_seqlens: Tensor,
    anchors: Tensor,
    query_offset: Tensor,
    *,
    trunk_inclusive: bool,
    window: int | None,
) -> Tensor:
    """Return bool ``[B, G, S]``: which trunk row each branch query sees.

    Args:
        cu_seqlens: int ``[n + 1]``, global document offsets in tokens.
        anchors: int64 ``[B]``, global trunk rows.
        query_offset: int64 ``[G]``, tokens from the anchor to the query.
        trunk_inclusive: whether the anchor's own row is seen.
        window: sliding window in tokens, or None.
    """
    cu_seqlens = cu_seqlens.long().to(anchors.device)
    rows = torch.arange(int(cu_seqlens[-1]), device=anchors.device)
    documents = torch.searchsorted(cu_seqlens, rows, right=True)
    anchor_documents = torch.searchsorted(cu_seqlens, anchors, right=True)
    last = anchors if trunk_inclusive else anchors - 1
    visible = (documents == anchor_documents[:, None]) & (rows <= last[:, None])
    visible = visible[:, None, :].expand(-1, query_offset.numel(), -1)
    if window is not None:
        own = anchors[:, None] + query_offset.to(anchors.device)
        visible = visible & (rows > (own - window)[:, :, None])
    return visible


def branch_visibility(branch_mask: Tensor | str | None, num_queries: int, num_keys: int) -> Tensor:
    """Return the in-branch mask as bool ``[G, M]`` or ``[B, G, M]``."""
    if branch_mask is None:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    if isinstance(branch_mask, str):
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    return branch_mask


def naive_branch_attention(
    q: Tensor,
    k_trunk: Tensor,
    v_trunk: Tensor,
    k_branch: Tensor | None = None,
    v_branch: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    anchors: Tensor | None = None,
    trunk_inclusive: bool = True,
    branch_mask: Tensor | str | None = None,
    window: int | None = None,
    query_offset: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with every mask written out. Arguments as in ``branch_attention``, on one rank: rows are global.

    Returns:
        ``out [B, G, N, H]`` in q's dtype and ``lse [B, G, N]`` in the accumulator type, both differentiable. ``lse``
        counts the sink where there is one, and is -inf where no key is visible.
    """
    num_branches, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_trunk.shape[1]
    dtype = accumulator_dtype(q.dtype)
    device = q.device
    anchors = torch.arange(num_branches, device=device) if anchors is None else anchors
    query_offset = torch.arange(num_queries) if query_offset is None else query_offset
    scale = head_dim**-0.5 if scale is None else scale

    visible = trunk_visibility(cu_seqlens, anchors, query_offset, trunk_inclusive=trunk_inclusive, window=window)
    grouped = q.to(dtype).view(num_branches, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim) * scale
    scores = torch.einsum("bgkrh,tkh->bgkrt", grouped, k_trunk.to(dtype))
    num_trunk = k_trunk.shape[0]
    if k_branch is not None and v_branch is not None:
        own = branch_visibility(branch_mask, num_queries, k_branch.shape[1]).to(device)
        visible = torch.cat([visible, own.expand(num_branches, -1, -1)], dim=-1)
        own_scores = torch.einsum("bgkrh,bmkh->bgkrm", grouped, k_branch.to(dtype))
        scores = torch.cat([scores, own_scores], dim=-1)
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    is_empty = ~visible.any(-1)[:, :, None, None]
    denominators = scores
    if sinks is not None:
        column = sinks.to(dtype).view(1, 1, num_kv_heads, -1, 1)
        denominators = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    # A row of -inf alone has no softmax: shift it to zeros for the arithmetic, and empty it afterwards.
    lse = torch.logsumexp(denominators.masked_fill(is_empty[..., None], 0.0), dim=-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(is_empty[..., None], 0.0)
    out = torch.einsum("bgkrt,tkh->bgkrh", weights[..., :num_trunk], v_trunk.to(dtype))
    if k_branch is not None and v_branch is not None:
        out = out + torch.einsum("bgkrm,bmkh->bgkrh", weights[..., num_trunk:], v_branch.to(dtype))
    lse = lse.masked_fill(is_empty, float("-inf"))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:-1])
