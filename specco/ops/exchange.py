"""Rows of a layout-sharded tensor by global index: the halo of a teacher, the features at anchors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from specco.ops.checks import raise_together
from specco.ops.layout import PackedLayout
from specco.ops.naive import accumulator_dtype


class _RowRoutes:
    """Who sends which of its rows to whom, for one request of every rank.

    Args:
        wanted: int64 ``[R]``, global rows this rank wants, in ``0 .. num_tokens - 1``.
        layout: of the tensor.
        group: context-parallel group, None at one rank.
        device: of the tensor, on which the requests travel.

    Attributes:
        places: int64 ``[R]``, for each wanted row its place among the rows that arrive, which are sorted by owner.
        sent_rows: int64, local rows that this rank sends, readers in order of rank.
        num_sent: rows sent to each rank.
        num_received: rows received from each rank.
    """

    def __init__(
        self, wanted: Tensor, layout: PackedLayout, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.group = group
        unique, inverse = torch.unique(wanted.cpu(), return_inverse=True)
        owners, rows = layout.locate(unique)
        order = torch.argsort(owners, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        self.places = place[inverse].to(device)
        num_received = torch.bincount(owners, minlength=layout.cp_size)
        requests = rows[order].to(device)
        if group is None:
            self.num_received = self.num_sent = num_received.tolist()
            self.sent_rows = requests
            return
        num_sent = torch.empty_like(num_received, device=device)
        dist.all_to_all_single(num_sent, num_received.to(device), group=group)
        self.num_received, self.num_sent = num_received.tolist(), num_sent.tolist()
        self.sent_rows = requests.new_empty(sum(self.num_sent))
        dist.all_to_all_single(self.sent_rows, requests, self.num_sent, self.num_received, group=group)

    def send(self, rows: Tensor) -> Tensor:
        """Send ``rows [sum(num_sent), ...]`` to the ranks that want them; return what arrives, sorted by owner."""
        return self._exchange(rows, self.num_received, self.num_sent)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send ``rows [sum(num_received), ...]`` to their owners; return what arrives, in the order of sent_rows."""
        return self._exchange(rows, self.num_sent, self.num_received)

    def _exchange(self, rows: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        if self.group is None:
            return rows
        out = rows.new_empty(sum(num_out), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), num_out, num_in, group=self.group)
        return out


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, routes: _RowRoutes) -> Tensor:
        ctx.routes, ctx.num_rows = routes, x.shape[0]
        return routes.send(x.index_select(0, routes.sent_rows)).index_select(0, routes.places)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, None]:
        routes = ctx.routes
        dtype = accumulator_dtype(dout.dtype)
        arrived = dout.new_zeros(sum(routes.num_received), *dout.shape[1:], dtype=dtype)
        arrived.index_add_(0, routes.places, dout.to(dtype))
        dx = dout.new_zeros(ctx.num_rows, *dout.shape[1:], dtype=dtype)
        dx.index_add_(0, routes.sent_rows, routes.send_back(arrived))
        return dx.to(dout.dtype), None


def fetch_rows(x: Tensor, rows: Tensor, layout: PackedLayout, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return rows of a sharded tensor by global index, wherever they live.

    Collective over ``group``, forward and backward: every rank must call, also one that wants no row. A row that is
    wanted several times travels once. Per rank that is rows x row bytes forward; backward carries the gradients home in
    the accumulator type (float32; float64 for float64); 8 bytes a row ask for it.

    Args:
        x: ``[T, ...]``, this rank's rows in layout order.
        rows: int64 ``[R]``, global rows wanted by this rank, any order, repeats allowed, R may be 0.
        layout: of ``x``.
        group: context-parallel group; None at one rank.

    Returns:
        ``[R, ...]``, differentiable with respect to ``x``.

    Raises:
        ValueError: a row outside the sequence, or shapes or a group that do not fit, on every rank alike.
    """
    problem = layout.find_group_problem(group)
    if problem is None and x.shape[0] != layout.num_rows:
        problem = f"x has {x.shape[0]} rows, but the layout has num_rows={layout.num_rows}"
    if problem is None and (rows.dtype != torch.int64 or rows.dim() != 1):
        problem = f"rows has shape {tuple(rows.shape)} and dtype {rows.dtype}; it must be int64 [R]"
    if problem is None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < layout.num_tokens:
        problem = (
            f"rows spans {int(rows.min())} to {int(rows.max())}; allowed are global rows 0 to {layout.num_tokens - 1}"
        )
    raise_together(problem, group, x.device)
    return _FetchRows.apply(x, _RowRoutes(rows, layout, group, x.device))
