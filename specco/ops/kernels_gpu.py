"""Backends of block attention for a GPU: FlashAttention and FlexAttention, behind the seam of ``kernels.Backend``.

Both kernels accept queries and keys of several documents in one call, so both are ragged. FlashAttention knows whole
and causal blocks only; a block under an interval mask (a staircase of anchors, a sliding window) goes to FlexAttention,
whose block mask skips what no query of a tile sees.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.flex_attention import BlockMask as TileMask

from specco.ops.kernels import HALF_TYPES, BlockMask

logger = logging.getLogger(__name__)

_TILE = 128
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_MIN_FLASH_ATTN = (2, 7)

Segments = tuple[Tensor, Tensor, int, int]


def describe_missing_gpu(device: torch.device, min_capability: int) -> str | None:
    """Return why no kernel for CUDA tensors of at least this compute capability runs here, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA tensors, these are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] < min_capability:
        have = ".".join(map(str, capability))
        return f"it needs compute capability {min_capability}.0 or above, {device} has {have}"
    return None


def list_segments(q: Tensor, k: Tensor, mask: BlockMask) -> Segments:
    """Return ``cu_q, cu_k`` (int32 ``[n + 1]``) and the longest segments; a batch is a row of equal segments."""
    if mask.cu_q is not None:
        assert mask.cu_k is not None
        return mask.cu_q.to(q.device), mask.cu_k.to(q.device), mask.max_q, mask.max_k
    ends = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return ends * q.shape[1], ends * k.shape[1], q.shape[1], k.shape[1]


@lru_cache(maxsize=1)
def find_flash_attn() -> str | None:
    """Return the version of flash-attn if one is installed that is new enough and can be imported, else None."""
    version = None
    if importlib.util.find_spec("flash_attn") is not None:
        version = importlib.metadata.version("flash_attn")
        if tuple(int(part) for part in version.split(".")[:2]) < _MIN_FLASH_ATTN:
            logger.warning("flash-attn %s is too old, 2.7 or above is used", version)
            version = None
    if version is not None:
        try:
            import flash_attn.flash_attn_interface  # noqa: F401
        except ImportError as error:
            logger.warning("flash-attn %s is installed but cannot be imported: %s", version, error)
            version = None
    logger.info("FlashAttention comes from %s", "torch" if version is None else f"flash-attn {version}")
    return version


class FlashBackend:
    """FlashAttention 2 over variable lengths: flash-attn where installed, else torch's own copy of its kernels.

    Both take the joint (out, lse) in backward, answer a query without keys with lse +inf (turned into -inf here), and
    accept N a multiple of K. Rows whose joint lse is +inf get weight 0 from every key, hence no gradient.
    Source: Dao-AILab/flash-attention ``flash_attn_interface.py`` (2.7), ``torch.nn.attention.varlen`` (2.11).
    """

    is_ragged = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        reason = describe_missing_gpu(device, 8)
        if reason is None and dtype not in HALF_TYPES:
            reason = f"FlashAttention computes in float16 and bfloat16, these tensors are {dtype}"
        return reason or FlexBackend().missing(device, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        if mask.first is not None:
            return FlexBackend().forward(q, k, v, mask, scale)
        shape = q.shape
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), q.new_full(shape[:-1], float("-inf"), dtype=torch.float32)
        segments = list_segments(q, k, mask)
        q, k, v = (_pad_heads(x.flatten(0, 1)) for x in (q, k, v))
        out, lse = _flash_forward()(q, k, v, segments, mask.is_causal, scale)
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
        return out[..., : shape[-1]].reshape(shape), lse.transpose(0, 1).reshape(shape[:-1])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask.first is not None:
            return FlexBackend().backward(dout, q, k, v, out, lse, mask, scale)
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        segments = list_segments(q, k, mask)
        shapes = q.shape, k.shape, v.shape
        dout, q, k, v, out = (_pad_heads(x.to(q.dtype).flatten(0, 1)) for x in (dout, q, k, v, out))
        heads_first = lse.flatten(0, 1).to(torch.float32).transpose(0, 1).contiguous()
        grads = _flash_backward()(dout, q, k, v, out, heads_first, segments, mask.is_causal, scale)
        dq, dk, dv = (grad[..., : shape[-1]].reshape(shape) for grad, shape in zip(grads, shapes, strict=True))
        return dq, dk, dv


def _pad_heads(x: Tensor) -> Tensor:
    """Return ``x [L, N, H]`` contiguous, with H padded by zeros to a multiple of 8 as the kernels want it."""
    return F.pad(x, (0, -x.shape[-1] % 8)).contiguous()


def _flash_forward() -> Callable[..., tuple[Tensor, Tensor]]:
    return _torch_flash_forward if find_flash_attn() is None else _package_flash_forward


def _flash_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return _torch_flash_backward if find_flash_attn() is None else _package_flash_backward


def _torch_flash_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, is_causal: bool, scale: float):
    """Return out ``[L, N, H]`` and lse ``[N, L]`` of torch's own kernels."""
    result = torch.ops.aten._flash_attention_forward(q, k, v, *segments, 0.0, is_causal, False, scale=scale)
    return result[0], result[1]


def _torch_flash_backward(dout, q, k, v, out, lse, segments: Segments, is_causal: bool, scale: float):
    # Without dropout the kernel reads neither the state of the random numbers nor the unused tensor.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *segments, 0.0, is_causal, rng_state, unused, scale=scale
    )


def _package_flash_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, is_causal: bool, scale: float):
    """Return out ``[L, N, H]`` and lse ``[N, L]`` of the flash-attn package."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    result = _flash_attn_varlen_forward(q, k, v, *segments, 0.0, scale, is_causal)
    return result[0], result[1]


def _package_flash_backward(dout, q, k, v, out, lse, segments: Segments, is_causal: bool, scale: float):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    no_window, softcap, alibi_slopes, deterministic = (-1, -1), 0.0, None, False
    rest = (*segments, 0.0, scale, is_causal, *no_window, softcap, alibi_slopes, deterministic)
    _flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, *rest)
    return dq, dk, dv


class FlexBackend:
    """FlexAttention, compiled, under a block mask of intervals: query i sees key columns ``first[i] <= j < last[i]``.

    FlexAttention's own backward uses the (out, lse) of its own block, not the joint pair that the seam hands over. The
    joint result is a merge, ``out = sum_p w_p out_p`` with ``w_p = exp(lse_p - lse)``, so its exact gradient reaches a
    block through both of its outputs::

        d out_p = w_p dout        d lse_p = w_p (dout . out_p - dout . out)

    and FlexAttention is differentiable in both. In its backward they give ``ds = w_p p_p (dout . v - dout . out)`` with
    ``w_p p_p = exp(s - lse)``: the formula of the seam. The price is the block's forward once more, 7/5 of the
    multiply-adds of a backward alone; the backward operator itself would save it, but its arguments are private, and
    only public functions are called here.
    """

    is_ragged = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        reason = describe_missing_gpu(device, 7)
        if reason is None and importlib.util.find_spec("triton") is None:
            reason = "FlexAttention is compiled by triton, which is not installed"
        if reason is None and dtype not in (*HALF_TYPES, torch.float32):
            reason = f"FlexAttention computes in float16, bfloat16 and float32, these tensors are {dtype}"
        return reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        first, last = list_intervals(q, k, mask)
        with torch.no_grad():
            heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out, lse = _attend(*heads_first, tile_mask(first, last, k.shape[1]), scale)
        is_empty = (last <= first).unsqueeze(-1)
        return out.transpose(1, 2), lse.transpose(1, 2).masked_fill(is_empty, float("-inf"))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        first, last = list_intervals(q, k, mask)
        # Inside a registered op torch records no graph, whatever the grad mode: its key is excluded there.
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            heads_first = leaves[0].transpose(1, 2), leaves[1].transpose(1, 2), leaves[2].transpose(1, 2)
            part_out, part_lse = _attend(*heads_first, tile_mask(first, last, k.shape[1]), scale)
            joint = dout.transpose(1, 2), out.transpose(1, 2), lse.transpose(1, 2)
            d_out, d_lse = differentiate_merge(*joint, part_out.detach(), part_lse.detach())
            dq, dk, dv = torch.autograd.grad((part_out, part_lse), leaves, (d_out, d_lse))
        return dq, dk, dv


def differentiate_merge(
    dout: Tensor, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one part's out and lse when the joint (out, lse) of a merge has gradient (dout, 0).

    Args:
        dout: ``[..., H]``.
        out: ``[..., H]``, joint.
        lse: ``[...]``, joint; +inf where the row's gradient is to be 0.
        part_out: ``[..., H]``.
        part_lse: ``[...]``, -inf where the part holds no visible key.
    """
    dtype = part_lse.dtype
    weight = torch.exp(part_lse - lse.to(dtype)).nan_to_num(nan=0.0)
    delta = weight * (dout.to(dtype) * out.to(dtype)).sum(-1)
    d_out = (weight.unsqueeze(-1) * dout.to(dtype)).to(part_out.dtype)
    # From the rounded d_out, as the kernel will take it: the two dot products then cancel to the last bit.
    return d_out, (d_out.to(dtype) * part_out.to(dtype)).sum(-1) - delta


def list_intervals(q: Tensor, k: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Return int32 ``first, last [b, nq]``, the key columns that each query sees, for any kind of block."""
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    if mask.first is not None:
        assert mask.last is not None
        return mask.first.to(q.device, torch.int32), mask.last.to(q.device, torch.int32)
    rows = torch.arange(num_queries, dtype=torch.int32, device=q.device)
    first, last = torch.zeros_like(rows), torch.full_like(rows, num_keys)
    if mask.cu_q is not None:
        assert mask.cu_k is not None
        cu_q, cu_k = mask.cu_q.to(q.device), mask.cu_k.to(q.device)
        segment = torch.searchsorted(cu_q, rows, right=True) - 1
        first, last = cu_k[segment], cu_k[segment + 1]
        rows = rows - cu_q[segment]
    if mask.is_causal:
        last = first + rows + 1
    return first.expand(batch, -1), last.expand(batch, -1)


def tile_mask(first: Tensor, last: Tensor, num_keys: int) -> TileMask:
    """Build FlexAttention's block mask of intervals from their bounds tile by tile, without a dense mask.

    Args:
        first: int32 ``[b, nq]``.
        last: int32 ``[b, nq]``, one past the last key; ``last <= first`` = no key.
        num_keys: key columns.
    """
    num_queries = first.shape[1]
    is_empty = last <= first
    none_first, none_last = first.masked_fill(is_empty, num_keys), last.masked_fill(is_empty, 0)
    tiles = -(-num_queries // _TILE)
    pad = (0, tiles * _TILE - num_queries)

    def reduce(x: Tensor, fill: int, take_max: bool) -> Tensor:
        per_tile = F.pad(x, pad, value=fill).unflatten(1, (tiles, _TILE))
        return per_tile.amax(-1) if take_max else per_tile.amin(-1)

    # A tile of keys is visited from the lowest first to the highest last, and needs no mask where all its rows see it.
    # Ragged tiles at the ends of queries and keys are always masked, as create_block_mask has them.
    visit_from = reduce(none_first, num_keys, False) // _TILE
    visit_to = -(-reduce(none_last, 0, True) // _TILE)
    whole_from = -(-reduce(none_first, 0, True) // _TILE)
    whole_to = reduce(none_last, 0, False) // _TILE
    columns = torch.arange(-(-num_keys // _TILE), device=first.device)
    visited = (columns >= visit_from[..., None]) & (columns < visit_to[..., None])
    whole = visited & (columns >= whole_from[..., None]) & (columns < whole_to[..., None])

    def pack(tiles_on: Tensor) -> tuple[Tensor, Tensor]:
        counts = tiles_on.sum(-1, dtype=torch.int32)
        return counts[:, None], tiles_on.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]

    def is_visible(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return (k_index >= first[b, q_index]) & (k_index < last[b, q_index])

    return TileMask.from_kv_blocks(
        *pack(visited & ~whole), *pack(whole), _TILE, is_visible, seq_lengths=(num_queries, num_keys)
    )


@lru_cache(maxsize=1)
def _compiled_attention() -> Callable:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, tiles: TileMask, scale: float) -> tuple[Tensor, Tensor]:
    """Run FlexAttention over ``q [b, N, nq, H]``, ``k, v [b, K, nk, H]``; return out and lse ``[b, N, nq]``."""
    # Sizes of 1, head counts and dtypes compile anew: more variants than the default limit of 8 allows, above which a
    # dense fallback would run. The decoding kernel, which short blocks would be sent to, has no gradient of lse.
    with torch._dynamo.config.patch(recompile_limit=64):
        out, aux = _compiled_attention()(
            q,
            k,
            v,
            block_mask=tiles,
            scale=scale,
            enable_gqa=True,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse
