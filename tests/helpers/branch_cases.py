"""Workloads of branch attention, run by the op on any device and by the dense oracle. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specco.ops.branch_attention import Trunk
from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


@dataclass(frozen=True)
class Workload:
    """One pass over packed documents; ``num_anchors`` None = every row.

    Args:
        num_queries: G.
        num_keys: M.
        options: further arguments of the op, the same at every number of ranks.
        has_sinks: whether there are attention sinks.
        lengths: of the documents, in tokens.
    """

    num_anchors: int | None = None
    num_queries: int = 1
    num_keys: int = 0
    options: dict = field(default_factory=dict)
    has_sinks: bool = False
    lengths: tuple[int, ...] = (1, 130, 300, 77, 516)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def draw_anchors(self) -> Tensor:
        """Int64 ``[B]``, global rows: every row, or some, unsorted and with a repeat."""
        num_rows = sum(self.lengths)
        if self.num_anchors is None:
            return torch.arange(num_rows)
        anchors = torch.randint(num_rows, (self.num_anchors,), generator=torch.Generator().manual_seed(3))
        return torch.cat([anchors, anchors[:1]])

    def draw_inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Global tensors: q and its output's gradient by branch, trunk and branch keys, sinks."""
        generator = torch.Generator().manual_seed(7)
        num_branches, num_rows = self.draw_anchors().numel(), sum(self.lengths)
        query, own = (num_branches, self.num_queries, NUM_HEADS), (num_branches, self.num_keys, NUM_KV_HEADS)
        shapes = dict.fromkeys(("q", "dout"), (*query, HEAD_DIM))
        shapes |= dict.fromkeys(("k", "v"), (num_rows, NUM_KV_HEADS, HEAD_DIM))
        shapes |= {name: (*own, HEAD_DIM) for name in ("k_branch", "v_branch") if self.num_keys}
        if self.has_sinks:
            shapes["sinks"] = (NUM_HEADS,)
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


WORKLOADS = {
    "causal layer": Workload(options={"trunk_inclusive": True}),
    "eagle3": Workload(num_keys=2, options={"trunk_inclusive": True}),
    "p-eagle": Workload(num_queries=3, num_keys=3, options={"trunk_inclusive": True, "branch_mask": "causal"}),
    "dflash": Workload(40, 8, 8, {"trunk_inclusive": False}),
    "jetspec": Workload(40, 8, 8, {"trunk_inclusive": False, "branch_mask": "causal"}),
    "window": Workload(num_keys=1, options={"trunk_inclusive": True, "window": 60}),
    "window blocks": Workload(40, 8, 8, {"trunk_inclusive": False, "window": 60}),
    "sinks": Workload(num_keys=1, options={"trunk_inclusive": True}, has_sinks=True),
}


def run_op(
    work: Workload, inputs: dict[str, Tensor], device: torch.device, backend: str, mode: str = "ring", group=None
) -> dict[str, Tensor]:
    """Run the op forward and backward on this rank's part; return what it owns, by the oracle's names, on the CPU.

    Collective over ``group``. Branch tensors come back with the global branch ids under ``branches``, trunk gradients
    with the global rows under ``rows``.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    layout = PackedLayout.build(work.cu_seqlens, size, rank)
    owners, local_rows = layout.locate(work.draw_anchors())
    branches = (owners == rank).nonzero().view(-1)
    anchors = local_rows[branches].to(device)
    local = {}
    for name, x in inputs.items():
        if name in ("k", "v"):
            x = layout.shard(x)
        elif name != "sinks":
            x = x[branches]
        local[name] = x.to(device).clone().requires_grad_(name != "dout")
    if work.num_anchors is None and size == 1:
        anchors = None
    trunk = Trunk(local["k"], local["v"], layout, group, mode, backend=backend)
    out, lse = trunk.attend(
        local["q"],
        local.get("k_branch"),
        local.get("v_branch"),
        anchors=anchors,
        sinks=local.get("sinks"),
        return_lse=True,
        **work.options,
    )
    out.backward(local["dout"])
    found = {"out": out.detach(), "lse": lse} | {f"d{name}": x.grad for name, x in local.items() if name != "dout"}
    is_real = layout.global_rows >= 0
    found = {name: x.cpu() for name, x in found.items()}
    found |= {name: found[name][is_real] for name in ("dk", "dv")}
    return found | {"branches": branches, "rows": layout.global_rows[is_real]}


def run_oracle(work: Workload, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Dense attention of the same values in ``dtype`` on the CPU, all branches and rows."""
    leaves = {name: x.to(dtype, copy=True).requires_grad_(name != "dout") for name, x in inputs.items()}
    out, lse = naive_branch_attention(
        *(leaves.get(name) for name in ("q", "k", "v", "k_branch", "v_branch")),
        cu_seqlens=work.cu_seqlens,
        anchors=work.draw_anchors(),
        sinks=leaves.get("sinks"),
        **work.options,
    )
    out.backward(leaves["dout"])
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": x.grad for name, x in leaves.items() if name != "dout"}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each tensor over the largest entry of the oracle's; -inf must be where the oracle has it."""
    errors = {}
    for name, whole in expected.items():
        if name == "dsinks":
            continue
        part = whole[found["rows"]] if name in ("dk", "dv") else whole[found["branches"]]
        mine = found[name].double()
        assert torch.equal(torch.isneginf(mine), torch.isneginf(part)), f"{name}: -inf at other places"
        difference = torch.where(torch.isneginf(mine), 0.0, mine - part.double()).abs()
        assert torch.isfinite(difference).all(), f"{name} has NaN or inf"
        scale = whole[torch.isfinite(whole)].abs().max().item()
        errors[name] = difference.max().item() / scale if difference.numel() else 0.0
    return errors
