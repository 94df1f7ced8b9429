"""One block of attention: queries x keys -> (out, lse), and its gradients from a joint (out, lse). The backend seam.

A backend is an object with the four members of :class:`Backend`. Ours are here; those for a GPU are in ``kernels_gpu``.
To add one, write the class and enter it in ``_load_backends``.

Feeding ``backward`` the *joint* out and lse of a row (over every block and branch that the row saw) makes the gradients
of disjoint key blocks add up to the exact gradient: ``p = exp(s - lse)``, ``ds = p * (dout . v - dout . out)``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from specco.ops.naive import accumulator_dtype

logger = logging.getLogger(__name__)

HALF_TYPES = (torch.float16, torch.bfloat16)
# Elements of one additive mask, and of one float32 copy of q, that the CPU backend makes at a time (1 MiB: its L2).
_CPU_BLOCK_ELEMENTS = 2**18


@dataclass(frozen=True)
class BlockMask:
    """Which keys the queries of a block see.

    Args:
        is_causal: query i sees keys 0..i; the block then has as many keys as queries.
        first: int64 ``[b, nq]``, first key column that a query sees; None = all columns.
        last: int64 ``[b, nq]``, one past the last one; ``last <= first`` = no key.
        cu_q: int32 ``[n + 1]``, with ``b = 1``: the block is n segments laid end to end, each against its own keys.
            Only for backends with ``is_ragged``.
        cu_k: int32 ``[n + 1]``.
        max_q: longest segment, queries.
        max_k: longest segment, keys.
    """

    is_causal: bool = False
    first: Tensor | None = None
    last: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0

    def to(self, device: torch.device) -> BlockMask:
        """Return the mask with its tensors on a device."""
        tensors = {name: getattr(self, name) for name in ("first", "last", "cu_q", "cu_k")}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **moved) if moved and device.type != "cpu" else self

    def visible(self, begin: int, end: int, num_keys: int) -> Tensor:
        """Return bool ``[end - begin, nq, nk]`` of the interval mask, for part of the batch."""
        assert self.first is not None
        assert self.last is not None
        columns = torch.arange(num_keys, device=self.first.device)
        return (columns >= self.first[begin:end, :, None]) & (columns < self.last[begin:end, :, None])

    def is_empty_row(self) -> Tensor | None:
        """Return bool ``[b, nq]``, True where a query sees no key; None = every query sees one."""
        return None if self.last is None or self.first is None else self.last <= self.first


class Backend(Protocol):
    """What a backend of block attention offers.

    ``is_ragged`` says that it takes segments of different lengths in one call (``BlockMask.cu_q``); without it a call
    is a batch of equal blocks.
    """

    is_ragged: bool

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run here, or None."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: ``[b, nq, N, H]``, any strides but the last, which is 1.
            k: ``[b, nk, K, H]``, N a multiple of K: query head n reads key head ``n // (N // K)``.
            v: ``[b, nk, K, H]``.
            mask: which keys are seen.
            scale: factor of the scores.

        Returns:
            ``out [b, nq, N, H]`` (q's dtype or the accumulator type) and ``lse [b, nq, N]`` in the accumulator type,
            natural log; a query without a key gets finite out and lse -inf.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``dq, dk, dv`` of this block's keys (q's dtype or the accumulator type).

        Args:
            dout: ``[b, nq, N, H]``.
            out: ``[b, nq, N, H]``, joint over all keys of the row, not this block's alone.
            lse: ``[b, nq, N]``, joint, +inf where the row's gradient is to be 0.
        """
        ...


def _to_heads(x: Tensor, dtype: torch.dtype, num_folded: int) -> Tensor:
    """Return ``[b, n, N, ...]`` as ``[b, N // num_folded, num_folded * n, ...]``, rows of 16 bits then dense."""
    x = x.to(dtype).transpose(1, 2)
    if dtype in HALF_TYPES and x.stride(2) != x.shape[-1]:
        x = x.contiguous()
    return x if num_folded == 1 else x.unflatten(1, (-1, num_folded)).flatten(2, 3)


def _from_heads(x: Tensor, num_folded: int) -> Tensor:
    """Undo the shape of :func:`_to_heads`."""
    if num_folded > 1:
        x = x.unflatten(2, (num_folded, -1)).flatten(1, 2)
    return x.transpose(1, 2)


class CpuBackend:
    """The aten flash-for-CPU op and its backward.

    Its traps, met here: causal with unequal lengths is aligned top-left (never asked for); a fully masked row gives
    lse 0 (set to -inf); a mask must have q's dtype. Small blocks run in float32 also for 16-bit inputs: up to about
    500 x 500 pairs the op's 16-bit backward is slower (128 x 128: 2.3 times, 16 x 16: nearly ten times).

    16-bit values are copied heads-major where they are not: that costs a thousandth of a large call and saves 4% of it.
    Below 768 query rows the op takes blocks of 64 rows instead of 256. Where all keys are seen, the query heads of a
    key head are then folded into rows (512 x 1024, 4 heads a key head: 1.23 times faster), and 16 bits win from about
    300 x 300 pairs on.
    """

    is_ragged = False
    _small_pairs = 500 * 500
    _small_folded_pairs = 300 * 300
    _short_rows = 768

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None if device.type == "cpu" else f"it runs on CPU tensors, these are on {device}"

    def _split(self, q: Tensor, k: Tensor, mask: BlockMask) -> tuple[torch.dtype, int, int]:
        """Return the dtype to compute in, how many query heads to fold, and how many blocks to take at a time."""
        batch, num_queries, num_heads, head_dim = q.shape
        num_keys = k.shape[1]
        dtype, num_folded = q.dtype, 1
        if dtype in HALF_TYPES:
            if num_queries < self._short_rows and mask.first is None and not mask.is_causal:
                num_folded = num_heads // k.shape[2]
            if num_queries * num_keys <= (self._small_pairs if num_folded == 1 else self._small_folded_pairs):
                dtype, num_folded = torch.float32, 1
        elements = num_queries * num_keys if mask.first is not None else 1
        if dtype != q.dtype:
            elements = max(elements, num_queries * num_heads * head_dim, num_keys * k.shape[2] * head_dim)
        return dtype, num_folded, min(batch, max(1, _CPU_BLOCK_ELEMENTS // elements))

    @staticmethod
    def _additive(mask: BlockMask, begin: int, end: int, num_keys: int, dtype: torch.dtype) -> Tensor | None:
        if mask.first is None:
            return None
        visible = mask.visible(begin, end, num_keys)
        return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).unsqueeze(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        dtype, num_folded, step = self._split(q, k, mask)
        parts = []
        for begin in range(0, q.shape[0], step):
            end = min(begin + step, q.shape[0])
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _to_heads(q[begin:end], dtype, num_folded),
                _to_heads(k[begin:end], dtype, 1),
                _to_heads(v[begin:end], dtype, 1),
                0.0,
                mask.is_causal,
                attn_mask=self._additive(mask, begin, end, k.shape[1], dtype),
                scale=scale,
            )
            out, lse = _from_heads(out, num_folded), _from_heads(lse, num_folded)
            parts.append((out if step == q.shape[0] else out.to(q.dtype), lse))
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
        is_empty = mask.is_empty_row()
        return out, lse if is_empty is None else lse.masked_fill(is_empty.unsqueeze(-1), float("-inf"))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, num_folded, step = self._split(q, k, mask)
        parts = []
        for begin in range(0, q.shape[0], step):
            end = min(begin + step, q.shape[0])
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _to_heads(dout[begin:end], dtype, num_folded),
                _to_heads(q[begin:end], dtype, num_folded),
                _to_heads(k[begin:end], dtype, 1),
                _to_heads(v[begin:end], dtype, 1),
                _to_heads(out[begin:end], dtype, num_folded),
                _to_heads(lse[begin:end], lse.dtype, num_folded),
                0.0,
                mask.is_causal,
                attn_mask=self._additive(mask, begin, end, k.shape[1], dtype),
                scale=scale,
            )
            grads = _from_heads(dq, num_folded), _from_heads(dk, 1), _from_heads(dv, 1)
            parts.append(grads if step == q.shape[0] else [grad.to(q.dtype) for grad in grads])
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
        return dq, dk, dv


class NaiveBackend:
    """Dense softmax of each block in the accumulator type, on any device."""

    is_ragged = False

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @staticmethod
    def _scores(q: Tensor, k: Tensor, mask: BlockMask, scale: float) -> Tensor:
        """Return masked scores ``[b, K, R, nq, nk]`` with R = N // K."""
        batch, num_queries, _, head_dim = q.shape
        grouped = q.view(batch, num_queries, k.shape[2], -1, head_dim)
        scores = torch.einsum("bqkrh,btkh->bkrqt", grouped, k) * scale
        if mask.is_causal:
            columns = torch.arange(k.shape[1], device=q.device)
            return scores.masked_fill(columns > torch.arange(num_queries, device=q.device)[:, None], float("-inf"))
        if mask.first is not None:
            return scores.masked_fill(~mask.visible(0, batch, k.shape[1])[:, None, None], float("-inf"))
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        dtype = accumulator_dtype(q.dtype)
        q, k, v = q.to(dtype).contiguous(), k.to(dtype), v.to(dtype)
        scores = self._scores(q, k, mask, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[..., None]).nan_to_num(nan=0.0)
        out = torch.einsum("bkrqt,btkh->bqkrh", weights, v)
        return out.reshape(q.shape), lse.permute(0, 3, 1, 2).reshape(q.shape[:-1])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulator_dtype(q.dtype)
        dout, q, k, v, out = (x.to(dtype).contiguous() for x in (dout, q, k, v, out))
        batch, num_queries, _, head_dim = q.shape
        shape = (batch, num_queries, k.shape[2], -1, head_dim)
        grouped_lse = lse.view(shape[:4]).permute(0, 2, 3, 1)[..., None]
        weights = torch.exp(self._scores(q, k, mask, scale) - grouped_lse)
        delta = (dout * out).sum(-1).view(shape[:4]).permute(0, 2, 3, 1)[..., None]
        dv = torch.einsum("bkrqt,bqkrh->btkh", weights, dout.view(shape))
        dscores = weights * (torch.einsum("bqkrh,btkh->bkrqt", dout.view(shape), v) - delta) * scale
        dq = torch.einsum("bkrqt,btkh->bqkrh", dscores, k).reshape(q.shape)
        dk = torch.einsum("bkrqt,bqkrh->btkh", dscores, q.view(shape))
        return dq, dk, dv


@lru_cache(maxsize=1)
def _load_backends() -> dict[str, Backend]:
    """Return every backend by name, in the order in which "auto" tries them."""
    # Here, since that module needs this one.
    from specco.ops.kernels_gpu import FlashBackend, FlexBackend

    return {"cpu": CpuBackend(), "flash": FlashBackend(), "flex": FlexBackend(), "naive": NaiveBackend()}


BACKEND_NAMES = ("auto", "cpu", "flash", "flex", "naive")


@lru_cache(maxsize=64)
def get_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return a backend that can run on this device and dtype; "auto" logs its choice once.

    Raises:
        ValueError: an unknown name, or a backend that cannot run here, with the reason.
    """
    backends = _load_backends()
    if name == "auto":
        chosen = next(key for key, backend in backends.items() if backend.missing(device, dtype) is None)
        logger.info("branch attention on %s in %s uses the backend %r", device, dtype, chosen)
        return backends[chosen]
    if name not in backends:
        raise ValueError(f"backend={name!r} is unknown; allowed are {BACKEND_NAMES}")
    reason = backends[name].missing(device, dtype)
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot run: {reason}")
    return backends[name]
