"""Branch attention on one CUDA device, 8K to 256K tokens in bfloat16: time, and the share of the device's matrix rate.

python tools/bench_gpu.py [--budget-s 120] [--out bench_gpu.json]

Matrix rate: the best of several 8192 x 8192 x 8192 bfloat16 products in the same run. Floating-point operations of the
attention, with P the (query, key) pairs that the masks let through, N query heads and head size H::

    forward   4 N H P     two products of 2 H operations a pair and head
    backward 10 N H P     five products: the scores again, dV, dP, dQ, dK

P = sum over documents of L (L + 1) / 2 for each pass over every row, plus d - 1 own keys for each row of pass d; for
a block of W at position a of its document W a + W W. Times are medians between CUDA events, forward and backward;
peak_mib is the growth of torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specco.ops.branch_attention import Trunk
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout

MIB = 2**20
# Qwen3-8B's attention: 32 query heads, 8 KV heads of 128.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
BLOCK = 16
# A case stops repeating after this many milliseconds.
LONG_MS = 8e3


@dataclass(frozen=True)
class GpuCase:
    """``passes`` of EAGLE-3's TTT, or one DFlash pass at ``num_anchors``, over documents of equal length."""

    num_tokens: int
    num_documents: int = 1
    passes: int = 0
    num_anchors: int = 0
    backend: str = "flash"

    @property
    def name(self) -> str:
        what = f"eagle3-{self.passes}" if self.passes else f"dflash-{self.num_anchors}"
        return f"{what} {self.num_documents} x {self.num_tokens // self.num_documents} {self.backend}"

    def draw_anchors(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_anchors)
        return torch.randperm(self.num_tokens, generator=generator)[: self.num_anchors]

    def count_pairs(self) -> int:
        """Visible (query, key) pairs, see the module's docstring."""
        length = self.num_tokens // self.num_documents
        if self.passes:
            trunk = self.passes * self.num_documents * length * (length + 1) // 2
            return trunk + self.num_tokens * sum(range(self.passes))
        positions = self.draw_anchors() % length
        return BLOCK * int(positions.sum()) + self.num_anchors * BLOCK * BLOCK


CASES = [
    *(GpuCase(1024 * k, passes=3) for k in (8, 32, 64, 128, 256)),
    GpuCase(64 * 1024, num_documents=64, passes=3),
    GpuCase(256 * 1024, num_documents=16, passes=3),
    *(GpuCase(1024 * k, num_anchors=512) for k in (8, 64, 256)),
    GpuCase(32 * 1024, passes=3, backend="flex"),
    GpuCase(64 * 1024, num_documents=64, passes=3, backend="flex"),
]


def build_step(case: GpuCase, device: torch.device) -> Callable[[], None]:
    """Return a function that runs forward and backward once."""
    layout = PackedLayout.build(torch.arange(case.num_documents + 1) * (case.num_tokens // case.num_documents))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, device=device, dtype=DTYPE, requires_grad=True)

    k, v = (draw(case.num_tokens, NUM_KV_HEADS) for _ in range(2))
    if case.passes:
        queries = [draw(case.num_tokens, 1, NUM_HEADS) for _ in range(case.passes)]
        keys, values = ([draw(case.num_tokens, 1, NUM_KV_HEADS) for _ in range(case.passes - 1)] for _ in range(2))
        calls = [(q, keys[:d], values[:d]) for d, q in enumerate(queries)]
        options: dict = {"trunk_inclusive": True, "return_lse": True}
    else:
        block = (case.num_anchors, BLOCK)
        calls = [(draw(*block, NUM_HEADS), draw(*block, NUM_KV_HEADS), draw(*block, NUM_KV_HEADS))]
        options = {"trunk_inclusive": False, "anchors": case.draw_anchors().to(device), "return_lse": True}
    grads = [torch.randn_like(call[0]) for call in calls]
    leaves = [k, v, *(call[0] for call in calls)]
    for _, *branch in calls[-1:]:
        for part in branch:
            leaves += part if isinstance(part, list) else [part]

    def step() -> None:
        for x in leaves:
            x.grad = None
        trunk = Trunk(k, v, layout, backend=case.backend)
        torch.autograd.backward([trunk.attend(*call, **options)[0] for call in calls], grads)

    return step


def time_ms(step: Callable[[], object], most_repeats: int) -> float:
    """Median milliseconds of ``step`` between CUDA events, after a warm-up; long steps are repeated less."""
    times: list[float] = []
    while len(times) <= most_repeats and sum(times[1:]) < LONG_MS:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def measure_matrix_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large bfloat16 product."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(2))
    return 2 * size**3 / (min(time_ms(lambda: a @ b, 5) for _ in range(4)) / 1e3)


def measure_case(case: GpuCase, device: torch.device, matrix_rate: float, repeats: int) -> dict:
    step = build_step(case, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    milliseconds = time_ms(step, repeats)
    flops = 14 * NUM_HEADS * HEAD_DIM * case.count_pairs()
    rate = flops / (milliseconds / 1e3)
    peak = torch.cuda.max_memory_allocated() - before
    figures = {"ms": milliseconds, "tflops": rate / 1e12, "share": rate / matrix_rate, "peak_mib": peak / MIB}
    return {"name": case.name, "tokens": case.num_tokens, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=120, help="no case begins after this many seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False")
    device, began = torch.device("cuda", 0), time.perf_counter()
    matrix_rate = measure_matrix_rate(device)
    machine = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "matrix_tflops": matrix_rate / 1e12,
    }
    print(f"{machine['gpu']}, torch {machine['torch']}, matrix rate {machine['matrix_tflops']} TFLOP/s")
    print(f"{'case':32}{'ms':>10}{'TFLOP/s':>10}{'share':>8}{'peak MiB':>10}")
    results = []
    for case in CASES:
        try:
            get_backend(case.backend, device, DTYPE)
        except ValueError as error:
            print(f"{case.name:32} left out: {error}")
            continue
        if time.perf_counter() - began > options.budget_s:
            print(f"{case.name:32} left out: {options.budget_s:.0f} s are over")
            continue
        row = measure_case(case, device, matrix_rate, options.repeats)
        results.append(row)
        figures = f"{row['ms']:10.2f}{row['tflops']:10.1f}{row['share']:8.2f}{row['peak_mib']:10.0f}"
        print(f"{row['name']:32}{figures}", flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
