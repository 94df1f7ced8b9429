"""Branch attention under context parallelism: one exact op for every draft family.

A *trunk* is the packed sequence; a *branch* hangs on one of its rows, the anchor. A branch query sees, under one
softmax, the trunk rows of its own document before the anchor (strictly, or up to and including it), and the keys of its
own branch. Here the trunk is one document of 6 rows with two branches of G = M = 2 at rows 2 and 4, ``t < anchor``,
and in-branch mask "causal"::

                  trunk keys      own keys
                  0 1 2 3 4 5     0 1
    branch at 2   # # . . . .     # .      query 0
                  # # . . . .     # #      query 1
    branch at 4   # # # # . .     # .
                  # # # # . .     # #

| family               | branches        | G x M           | trunk       | in-branch mask |
|----------------------|-----------------|-----------------|-------------|----------------|
| EAGLE-3, TTT pass d  | every row       | 1 x (d - 1)     | t <= anchor | all            |
| DFlash               | sampled anchors | W x W           | t < anchor  | all            |
| DSpark               | sampled anchors | gamma x gamma   | t < anchor  | all            |
| JetSpec              | sampled anchors | W x W           | t < anchor  | causal         |
| P-EAGLE              | every row       | (K-1) x (K-1)   | t <= anchor | causal         |
| causal layer, MTP    | none            |                 | t <= row    |                |

Trunk keys ride the ring (or are gathered once); branch keys never leave their rank.

Source: training-time test of EAGLE-3 (arXiv 2503.01840) for the mask; ring attention (arXiv 2310.01889) and the zigzag
order of zhuzilin/ring-flash-attention for the trunk, here per document, with float32 partial gradients and without
padding in any kernel call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from specco.ops.branch_keys import BranchKeys, as_mask, sink_gradient
from specco.ops.checks import find_pass_problem, find_trunk_problem, raise_together
from specco.ops.custom_op import attend_once
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype
from specco.ops.passes import PassInputs, backward_pass, build_query_pass, forward_pass
from specco.ops.ring import GatheredShards, RingShards, TrafficCounters
from specco.ops.rows import as_dense

GATHER_BUDGET_BYTES = 2**29
"""``mode="auto"`` gathers where the whole trunk's K, V, dK and dV take at most this many bytes a rank."""


class _Gather(torch.autograd.Function):
    """Tie gathered shards to K and V: every pass takes the token, so that dK and dV go home after the last of them."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, shards: GatheredShards) -> Tensor:
        ctx.shards = shards
        return k.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*ctx.shards.send_home(), None)


class _Attend(torch.autograd.Function):
    """One pass over a trunk. ``k`` and ``v`` are the trunk's in ring mode, the token and None in gather mode."""

    @staticmethod
    def forward(ctx, query_pass, make_shards, mask, scale, num_keys, q, k, v, sinks, *branch_tensors):
        branch = None
        if branch_tensors:
            branch = BranchKeys(list(branch_tensors[:num_keys]), list(branch_tensors[num_keys:]), mask)
        out, lse = forward_pass(PassInputs(query_pass, make_shards(k, v), as_dense(q), branch, scale), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *branch_tensors)
        ctx.query_pass, ctx.make_shards, ctx.scale = query_pass, make_shards, scale
        ctx.mask, ctx.num_keys = mask, num_keys
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
        branch = BranchKeys(tensors[: ctx.num_keys], tensors[ctx.num_keys :], ctx.mask) if tensors else None
        inputs = PassInputs(ctx.query_pass, ctx.make_shards(k, v), as_dense(q), branch, ctx.scale)
        dq, dtrunk, dkeys, dvalues = backward_pass(inputs, dout, out, lse)
        dk, dv = (torch.zeros_like(k), None) if dtrunk is None else dtrunk
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return (None, None, None, None, None, dq, dk, dv, dsinks, *dkeys, *dvalues)


class Trunk:
    """Keys and values of a trunk, attended by several passes of branch queries (the passes of TTT).

    Two modes give the same results. ``ring``: K/V ride again for each pass, memory of two shards. ``gather``: each
    chunk that this rank sees comes once, for all passes; dK/dV are summed over passes in the accumulator type and sent
    home once.

    Collective over ``group``, forward and backward: every rank must make the same passes in the same order.

    Args:
        k_trunk: ``[T, K, H]``, this rank's rows in layout order.
        v_trunk: ``[T, K, H]``.
        layout: of the trunk.
        group: context-parallel group; None at one rank.
        mode: "ring", "gather", or "auto": gather where the whole trunk fits ``GATHER_BUDGET_BYTES``, else ring.
        window: largest sliding window, in tokens, of any pass; what lies outside is not gathered. None = all.
        backend: "auto", "cpu", "flash", "flex" or "naive".

    Attributes:
        counters: what this rank sent and how long it waited, over all passes, forward and backward. The agreement on
            bad input (8 bytes) is not counted.
        mode: "ring" or "gather", as decided.

    Raises:
        ValueError: shapes, dtypes, group or names that do not fit, on every rank alike.
    """

    def __init__(
        self,
        k_trunk: Tensor,
        v_trunk: Tensor,
        layout: PackedLayout,
        group: dist.ProcessGroup | None = None,
        mode: str = "auto",
        *,
        window: int | None = None,
        backend: str = "auto",
    ) -> None:
        problem = layout.find_group_problem(group) or find_trunk_problem(k_trunk, v_trunk, layout)
        if problem is None and mode not in ("ring", "gather", "auto"):
            problem = f"mode={mode!r}; allowed are 'ring', 'gather' and 'auto'"
        raise_together(problem, group, k_trunk.device)
        self.backend = get_backend(backend, k_trunk.device, k_trunk.dtype)
        self.layout, self.group, self.window = layout, group, window
        self.counters = TrafficCounters()
        self._k, self._v = k_trunk, v_trunk
        self.mode = self._decide() if mode == "auto" else mode
        self._gathered: GatheredShards | None = None
        if self.mode == "gather":
            self._gathered = GatheredShards(k_trunk.detach(), v_trunk.detach(), layout, group, self.counters, window)
            self._token = _Gather.apply(k_trunk, v_trunk, self._gathered)

    def _decide(self) -> str:
        item_bytes = self._k.element_size() + accumulator_dtype(self._k.dtype).itemsize
        whole = 2 * self._k.numel() * self.layout.cp_size * item_bytes
        return "gather" if whole <= GATHER_BUDGET_BYTES else "ring"

    def attend(
        self,
        q: Tensor,
        k_branch: Tensor | Sequence[Tensor] | None = None,
        v_branch: Tensor | Sequence[Tensor] | None = None,
        *,
        anchors: Tensor | None = None,
        trunk_inclusive: bool,
        branch_mask: Tensor | str | None = None,
        window: int | None = None,
        query_offset: Tensor | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend with the queries of one pass; arguments, result and errors as in :func:`branch_attention`.

        ``k_branch`` and ``v_branch`` may also be sequences of ``[B, m, K, H]``, taken end to end: pass d of TTT hands
        over the keys of the passes before it as they are, and nothing is copied or saved twice.
        """
        keys, values = _as_list(k_branch), _as_list(v_branch)
        problem = find_pass_problem(
            q, self._k, keys, values, anchors, self.layout, branch_mask, window, query_offset, sinks
        )
        if problem is None and self._gathered is not None and self.window is not None:
            is_early = query_offset is not None and bool((query_offset < 0).any())
            if window is None or window > self.window or is_early:
                problem = f"window={window}, query_offset={query_offset}, but the trunk was gathered for {self.window=}"
        raise_together(problem, self.group, q.device)
        query_pass = build_query_pass(
            self.layout, self.backend, q, self._k.shape[1], anchors, trunk_inclusive, window, query_offset
        )
        gathered, layout, group, counters = self._gathered, self.layout, self.group, self.counters

        def make_shards(k: Tensor, v: Tensor) -> RingShards | GatheredShards:
            return RingShards(k, v, layout, group, counters) if gathered is None else gathered

        k, v = (self._k, self._v) if gathered is None else (self._token, None)
        mask = as_mask(branch_mask, q.shape[1], q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = _Attend.apply(query_pass, make_shards, mask, scale, len(keys), q, k, v, sinks, *keys, *values)
        return (out, lse) if return_lse else out


def _as_list(keys: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """Return the tensors that hold any key."""
    tensors = [] if keys is None else [keys] if isinstance(keys, Tensor) else list(keys)
    return [tensor for tensor in tensors if tensor.dim() != 4 or tensor.shape[1] > 0]


def branch_attention(
    q: Tensor,
    k_trunk: Tensor,
    v_trunk: Tensor,
    k_branch: Tensor | None = None,
    v_branch: Tensor | None = None,
    *,
    anchors: Tensor | None = None,
    layout: PackedLayout,
    trunk_inclusive: bool,
    branch_mask: Tensor | str | None = None,
    window: int | None = None,
    query_offset: Tensor | None = None,
    sinks: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend each branch query to its document's trunk rows before its anchor and to its branch's own keys.

    ``Trunk(k_trunk, v_trunk, layout, group, "ring").attend(...)`` once, as one registered op (``specco::attend``) that
    autograd and torch.compile see whole. Collective over ``group``, forward and backward: every rank must call, also
    one without branches.

    Args:
        q: ``[B, G, N, H]``, branch queries of the B branches whose anchors this rank owns.
        k_trunk: ``[T, K, H]``, this rank's rows of the trunk in layout order; N is a multiple of K.
        v_trunk: ``[T, K, H]``.
        k_branch: ``[B, M, K, H]``, keys of the branches; None or M = 0: there are none.
        v_branch: ``[B, M, K, H]``.
        anchors: int64 ``[B]``, local trunk rows, any order, repeats allowed; None = every row, in order.
        layout: of the trunk.
        trunk_inclusive: whether a query sees the trunk row of its anchor (t <= anchor) or not (t < anchor).
        branch_mask: None = all, "causal" (query g sees keys 0..g), or bool ``[G, M]`` or ``[B, G, M]``, True = seen.
        window: a query sees trunk rows with position > its own - window, in tokens; None = all. The branch's own keys
            are not cut by it.
        query_offset: int ``[G]``: query g stands at position(anchor) + query_offset[g], for the window; None = 0..G-1.
        sinks: ``[N]``, float, an unscaled logit in the softmax's denominator only. The gradient is this rank's part.
        group: context-parallel group; None at one rank.
        scale: factor of the scores; None = H ** -0.5.
        backend: "auto", "cpu", "flash", "flex" or "naive".
        return_lse: also return lse.

    Returns:
        ``out [B, G, N, H]`` in q's dtype, and with ``return_lse`` also ``lse [B, G, N]``: natural log of the
        denominator (the sink included), in the accumulator type, no gradient. A row with no visible key (so every
        padding row) gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes, anchors, group or names that do not fit, on every rank alike.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attend_once(
        q, k_trunk, v_trunk, k_branch, v_branch, anchors, layout, trunk_inclusive, branch_mask, window, query_offset,
        sinks, group, scale, backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: PackedLayout,
    window: int | None = None,
    sinks: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend causally over packed documents, sharded over context-parallel ranks: the trunk alone.

    Args:
        q: ``[T, N, H]``, this rank's rows in layout order.
        k: ``[T, K, H]``.
        v: ``[T, K, H]``.
        layout: of the rows.
        window: a row sees rows of position > its own - window, itself included, in tokens; None = all.
        sinks: as in :func:`branch_attention`, like the arguments that follow.

    Returns:
        ``out [T, N, H]``, and with ``return_lse`` also ``lse [T, N]``. Padding rows give 0 and -inf.

    Raises:
        ValueError: as :func:`branch_attention`.
    """
    result = branch_attention(
        q.unsqueeze(1),
        k,
        v,
        layout=layout,
        trunk_inclusive=True,
        window=window,
        sinks=sinks,
        group=group,
        scale=scale,
        backend=backend,
        return_lse=return_lse,
    )
    if isinstance(result, tuple):
        return result[0].squeeze(1), result[1].squeeze(1)
    return result.squeeze(1)
