"""Bytes that one update sends, counted by mesh axis, beside what the formulas say.

    PYTHONPATH=.:tools torchrun --nproc-per-node 4 tools/count_traffic.py POLICY DRAFT --cp 2 --tp 1

A row is one axis: bytes that a rank sends in one step of one microbatch, mean over ranks, for the policy alone and with
the draft. A collective of n ranks counts as what a rank must send at least: n - 1 shards for an all-gather or a
reduce-scatter, 2 (n - 1) / n of its tensor for an all-reduce. "fsdp" holds the ranks of "cp", as in torchtitan; what is
exchanged between pairs of ranks (keys, values, single rows) is "cp". The few bytes of counts and checks are in the row
of whatever axis has their ranks.

Formulas of the policy, with P parameters, T rows a cp rank of D values of b bytes (gradients of a), L layers, K key
heads a tp rank of size H:

    fsdp    (n-1)/n (2 P b - H b + P a)     each unit is gathered in the forward and, but for norm and head (H), in the
                                            backward; gradients are scattered
    cp      L (cp-1) T 2KH (b + b + a)      keys and values ride the ring forward; backward again, with their gradients
    tp      (8 L + 4) (n-1)/n T D b         rows are gathered before and scattered after each block, both ways
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from specco.titan import cpu_support

cpu_support.apply()

from bench_learner import build_learner, make_batch, pack_batch  # noqa: E402
from torchtitan.config.configs import ParallelismConfig  # noqa: E402

from specco.drafts.base import get_local_tensor  # noqa: E402
from specco.ops.ring import RingComm  # noqa: E402
from specco.packing import PackedTokens  # noqa: E402
from specco.rl.grpo import GrpoLoss  # noqa: E402
from specco.titan.learner import Learner  # noqa: E402

AXES = ("dp_replicate", "fsdp", "tp", "cp", "batch")


class TrafficCounter(TorchDispatchMode):
    """Adds up what this rank sends while it is active: in collectives by their ranks, and in exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: dict[tuple[int, ...], float] = defaultdict(float)
        self.exchanges = 0.0

    def __enter__(self) -> TrafficCounter:
        # an op that is registered as a whole hides what it sends from a dispatch mode
        self._patch = patch.object(RingComm, "post", self._wrap_post(RingComm.post))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patch.stop()

    def _wrap_post(self, post: Any) -> Any:
        def count_and_post(comm: RingComm, sends: Sequence[tuple[Tensor, int]], receives: Any) -> None:
            self.exchanges += sum(_get_bytes(tensor) for tensor, _ in sends)
            post(comm, sends, receives)

        return count_and_post

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._opname
        if func.namespace == "c10d" and name == "alltoall_base_":
            self.exchanges += _count_exchange(args[1], args[4], dist.ProcessGroup.unbox(args[2]))
        elif func.namespace == "c10d" and name in _C10D:
            count, position = _C10D[name]
            group = dist.ProcessGroup.unbox(args[position])
            self.collectives[_get_ranks(group)] += count(args, group.size())
        elif func.namespace == "_c10d_functional" and name in _FUNCTIONAL:
            group = _resolve_process_group(args[-1])
            self.collectives[_get_ranks(group)] += _FUNCTIONAL[name](args, group.size())
        return func(*args, **(kwargs or {}))


def _get_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _get_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count_exchange(tensor: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> float:
    """Return the bytes of the rows that do not stay on this rank; no splits: all ranks get the same."""
    rows = list(splits) or [tensor.shape[0] // group.size()] * group.size()
    return _get_bytes(tensor) * (1 - rows[group.rank()] / max(sum(rows), 1))


_C10D: dict[str, tuple[Any, int]] = {
    "allreduce_": (lambda args, n: 2 * (n - 1) / n * sum(map(_get_bytes, args[0])), 1),
    "_allgather_base_": (lambda args, n: (n - 1) * _get_bytes(args[1]), 2),
    "_reduce_scatter_base_": (lambda args, n: (n - 1) * _get_bytes(args[0]), 2),
}
"""(bytes from arguments and number of ranks, place of the group) by op."""

_FUNCTIONAL: dict[str, Any] = {
    "all_reduce": lambda args, n: 2 * (n - 1) / n * _get_bytes(args[0]),
    "all_gather_into_tensor": lambda args, n: (n - 1) * _get_bytes(args[0]),
    "reduce_scatter_tensor": lambda args, n: (n - 1) / n * _get_bytes(args[0]),
}
"""The same for functional collectives, whose group comes last, by name."""


def count_update(learner: Learner, tokens: PackedTokens) -> dict[str, float]:
    """Return bytes a rank by axis of one step, after one that is not counted."""
    learner.step([tokens], GrpoLoss())
    counter = TrafficCounter()
    with counter:
        learner.step([tokens], GrpoLoss())
    counted = {"cp": counter.exchanges}
    for axis in AXES:
        mesh = learner.parallel_dims.get_optional_mesh(axis)
        if mesh is not None:
            collectives = counter.collectives.pop(_get_ranks(mesh.get_group()), 0.0)
            counted[axis] = counted.get(axis, 0.0) + collectives
    return average(counted)


def average(values: dict[str, float]) -> dict[str, float]:
    """Return the means over all ranks, by axis. Collective: every rank must call."""
    total = torch.tensor([values.get(axis, 0.0) for axis in AXES], dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(AXES, (total / dist.get_world_size()).tolist(), strict=True))


def compute_formulas(learner: Learner, num_rows: int) -> dict[str, float]:
    """Return bytes a rank by axis of the policy alone, see the head of this file.

    Args:
        learner: without a draft.
        num_rows: T of one cp rank.
    """
    dims, config = learner.parallel_dims, learner.policy.config
    attention, num_layers, item = config.layers[0].attention, len(config.layers), 4
    num_kv_heads = attention.n_kv_heads or attention.n_heads
    parameters = {name: get_local_tensor(parameter) for name, parameter in learner.policy.named_parameters()}
    sizes = {name: parameter.numel() * item for name, parameter in parameters.items()}
    head = sum(size for name, size in sizes.items() if name.startswith(("norm.", "lm_head.")))
    shard = sum(sizes.values())
    num_fsdp = dims.dp_shard * dims.cp
    ring = num_layers * (dims.cp - 1) * num_rows * 2 * num_kv_heads // dims.tp * attention.head_dim
    return {
        "fsdp": (num_fsdp - 1) * (3 * shard - head),
        "cp": ring * 3 * item,
        "tp": (8 * num_layers + 4) * (dims.tp - 1) / dims.tp * num_rows * config.dim * item,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy_path")
    parser.add_argument("draft_path")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--samples", type=int, default=32, help="samples of a data-parallel rank")
    args = parser.parse_args()
    degrees = {"context_parallel_degree": args.cp, "tensor_parallel_degree": args.tp}
    counts: dict[str, dict[str, float]] = {}
    for name, draft_path in (("policy", None), ("joint", args.draft_path)):
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
        learner = build_learner(args.policy_path, draft_path, parallelism)
        tokens = pack_batch(make_batch(args.samples, learner.data_parallel_rank))
        if draft_path is None:
            counts["formula"] = average(compute_formulas(learner, learner.build_layout(tokens).num_rows))
        counts[name] = count_update(learner, tokens)
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": dist.get_world_size(), **degrees, "tokens": tokens.num_tokens, "bytes": counts}))
        print(f"{'axis':<14}{'policy':>14}{'formula':>14}{'with draft':>14}    bytes a rank")
        for axis in AXES:
            print(f"{axis:<14}" + "".join(f"{counts[name][axis]:>14,.0f}" for name in ("policy", "formula", "joint")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
