"""The DTensor edge of the ops: rows sharded over a "cp" axis of the mesh, heads over "tp", in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from specco.ops.layout import PackedLayout


def build_layout(cu_seqlens: Tensor | Sequence[int], mesh: DeviceMesh | None, cp_axis: str = "cp") -> PackedLayout:
    """Build the layout of this rank from the "cp" axis of a mesh; without that axis, of one rank alone."""
    if mesh is None or cp_axis not in (mesh.mesh_dim_names or ()):
        return PackedLayout.build(cu_seqlens)
    return PackedLayout.build(cu_seqlens, mesh[cp_axis].size(), mesh.get_local_rank(cp_axis))


def shard_rows(x: Tensor, layout: PackedLayout, mesh: DeviceMesh, cp_axis: str = "cp") -> DTensor:
    """Shard packed rows that every rank holds.

    Args:
        x: ``[S, ...]``, the same on every rank.
        layout: of the rows.
        mesh: with the axis ``cp_axis``; ``x`` is replicated over the others.

    Returns:
        ``[cp_size * T, ...]``, Shard(0) over "cp": the ranks' rows in layout order, padding rows zero.
    """
    return DTensor.from_local(layout.shard(x), mesh, _placements(mesh, {cp_axis: Shard(0)}), run_check=False)


def unshard_rows(x: DTensor, layout: PackedLayout, cp_axis: str = "cp") -> Tensor:
    """Gather packed rows: undo :func:`shard_rows`. Collective over "cp". No gradient.

    Returns:
        ``[S, ...]`` on every rank, padding dropped; other axes of the mesh stay as they are.
    """
    return layout.unshard(x.to_local(), x.device_mesh.get_group(cp_axis))


def _placements(mesh: DeviceMesh, by_axis: dict[str, Placement]) -> list[Placement]:
    return [by_axis.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


def _find_problem(name: str, x: Tensor, mesh: DeviceMesh, cp_axis: str, tp_axis: str) -> str | None:
    """Return what is wrong unless rows are Shard over "cp" and heads (the dim before the last) over "tp"."""
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        return f"{name} is no DTensor of the mesh of q; either all tensors are, or none is"
    wanted = {cp_axis: Shard(0), tp_axis: Shard(x.dim() - 2)}
    for axis, placement in zip(mesh.mesh_dim_names or (), x.placements, strict=True):
        expected = wanted.get(axis, Replicate())
        if placement != expected and mesh[axis].size() > 1:
            return f"{name} has placement {placement} over the axis {axis!r}; it must be {expected}"
    return None


def attend_dtensors(
    attention_fn: Callable[..., Tensor],
    q: Tensor,
    *keys: Tensor | None,
    layout: PackedLayout,
    cp_axis: str = "cp",
    tp_axis: str = "tp",
) -> Tensor:
    """Run an attention op on DTensors: rows are Shard(0) over "cp" and heads are Shard over "tp", in and out.

    Plain tensors go to the op as they are, for one device. Under "tp" a rank holds whole groups of query heads with
    their key heads. Collective over "cp", forward and backward. For example::

        attend = partial(branch_attention, anchors=anchors, trunk_inclusive=False)
        out = attend_dtensors(attend, q, k_trunk, v_trunk, k_branch, v_branch, layout=layout)

    Args:
        attention_fn: ``branch_attention`` or ``ring_attention`` with its options bound, but for ``layout`` and
            ``group``. Anchors are this rank's local rows and sinks this rank's heads, as plain tensors.
        q: ``[cp_size * T, N, H]``, or ``[B, G, N, H]``, where the ranks' numbers of branches may differ.
        keys: the op's further tensors, in its order: ``[cp_size * T, K, H]`` of the trunk, ``[B, M, K, H]`` of
        branches.
        layout: of this rank.

    Returns:
        ``out``, placed like ``q``.

    Raises:
        ValueError: tensors that are partly DTensors, or placed otherwise; else as the op.
    """
    tensors = (q, *keys)
    if not any(isinstance(x, DTensor) for x in tensors):
        return attention_fn(*tensors, layout=layout)
    if not isinstance(q, DTensor):
        raise ValueError("q is a plain tensor among DTensors; either all tensors are DTensors, or none is")
    mesh = q.device_mesh
    for i, x in enumerate(tensors):
        problem = None if x is None else _find_problem(f"tensor {i}", x, mesh, cp_axis, tp_axis)
        if problem is not None:
            raise ValueError(problem)
    has_cp = cp_axis in (mesh.mesh_dim_names or ()) and mesh[cp_axis].size() > 1
    local = [x.to_local() if isinstance(x, DTensor) else None for x in tensors]
    out = attention_fn(*local, layout=layout, group=mesh.get_group(cp_axis) if has_cp else None)
    return DTensor.from_local(out, mesh, q.placements, run_check=False, shape=q.shape, stride=_dense_stride(q.shape))


def _dense_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
