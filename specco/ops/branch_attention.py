"""Branch attention: one softmax over a document's prefix in the trunk and the few keys of the branch itself."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention


class Trunk:
    """Keys and values of the trunk, attended by one or more passes of branch queries.

    Args:
        k_trunk: ``[T, K, H]``, this rank's rows in layout order.
        v_trunk: ``[T, K, H]``.
        layout: of the trunk.
        group: context-parallel group; None at one rank.
        mode: "ring", "gather" or "auto".
        backend: "auto", "cpu", "flash", "flex" or "naive".
    """

    def __init__(
        self,
        k_trunk: Tensor,
        v_trunk: Tensor,
        layout: PackedLayout,
        group: dist.ProcessGroup | None = None,
        mode: str = "auto",
        *,
        backend: str = "auto",
    ) -> None:
        layout.check_group(group)
        self.k_trunk, self.v_trunk, self.layout, self.group = k_trunk, v_trunk, layout, group

    def attend(
        self,
        q: Tensor,
        k_branch: Tensor | None = None,
        v_branch: Tensor | None = None,
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
        """Attend with the queries of one pass; arguments as in :func:`branch_attention`."""
        out, lse = naive_branch_attention(
            q,
            self.k_trunk,
            self.v_trunk,
            k_branch,
            v_branch,
            cu_seqlens=self.layout.cu_seqlens,
            anchors=anchors,
            trunk_inclusive=trunk_inclusive,
            branch_mask=branch_mask,
            window=window,
            query_offset=query_offset,
            sinks=sinks,
            scale=scale,
        )
        return (out, lse.detach()) if return_lse else out


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
    """Attend each branch query to its document's trunk rows before its anchor and to its branch's own keys."""
    trunk = Trunk(k_trunk, v_trunk, layout, group, "ring", backend=backend)
    return trunk.attend(
        q,
        k_branch,
        v_branch,
        anchors=anchors,
        trunk_inclusive=trunk_inclusive,
        branch_mask=branch_mask,
        window=window,
        query_offset=query_offset,
        sinks=sinks,
        scale=scale,
        return_lse=return_lse,
    )


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
    """Causal attention over packed documents: the trunk alone. ``q [T, N, H]``, ``k, v [T, K, H]``."""
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
