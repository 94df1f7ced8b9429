"""The CPU backend against the naive one, in the types and shapes that it chooses for 16-bit inputs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specco.ops.kernels import BlockMask, CpuBackend, NaiveBackend
from specco.testing.tolerances import OP_BFLOAT16, relative_error


class QueryRecorder(TorchDispatchMode):
    """Notes dtype and ``[b, heads, rows]`` of the queries of every attention kernel that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if "flash_attention_for_cpu" in name:
            q = args["backward" in name]
            self.queries.append((q.dtype, tuple(q.shape[:3])))
        return func(*args, **(kwargs or {}))


def draw_intervals(num_queries: int, num_keys: int) -> BlockMask:
    first = torch.randint(num_keys // 2, (1, num_queries))
    return BlockMask(first=first, last=first + num_keys // 2)


CASES = {
    "short rows, folded": ((1, 400, 300), (4, 2), BlockMask(), (torch.bfloat16, (1, 2, 800))),
    "a batch, folded": ((2, 400, 300), (6, 2), BlockMask(), (torch.bfloat16, (2, 2, 1200))),
    "one query head a key head": ((1, 400, 700), (2, 2), BlockMask(), (torch.bfloat16, (1, 2, 400))),
    "long rows": ((1, 800, 400), (4, 2), BlockMask(), (torch.bfloat16, (1, 4, 800))),
    "few pairs": ((1, 200, 300), (4, 2), BlockMask(), (torch.float32, (1, 4, 200))),
    "causal": ((1, 600, 600), (4, 2), BlockMask(is_causal=True), (torch.bfloat16, (1, 4, 600))),
    "intervals": ((1, 600, 600), (4, 2), draw_intervals(600, 600), (torch.bfloat16, (1, 4, 600))),
}
"""Blocks, queries and keys; query and key heads; mask; and the queries that the kernel is to get."""


@pytest.mark.parametrize("name", list(CASES))
def test_cpu_equals_naive_in_16_bits(name: str):
    (batch, num_queries, num_keys), (num_heads, num_kv_heads), mask, expected = CASES[name]
    q, dout = (torch.randn(batch, num_queries, num_heads, 32).bfloat16() for _ in range(2))
    k, v = (torch.randn(batch, num_keys, num_kv_heads, 32).bfloat16() for _ in range(2))
    out, lse = NaiveBackend().forward(q, k, v, mask, 0.2)
    joint = out.bfloat16(), lse + 0.5
    wanted = out, lse, *NaiveBackend().backward(dout, q, k, v, *joint, mask, 0.2)
    with QueryRecorder() as recorder:
        forward = CpuBackend().forward(q, k, v, mask, 0.2)
        backward = CpuBackend().backward(dout, q, k, v, *joint, mask, 0.2)
    assert recorder.queries == [expected, expected]
    for actual, exact in zip((*forward, *backward), wanted, strict=True):
        assert actual.shape == exact.shape
        assert relative_error(actual, exact) <= OP_BFLOAT16
