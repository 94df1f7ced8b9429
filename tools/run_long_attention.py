"""Run branch attention once, forward and backward, over one very long document; print time and memory growth per rank.

    torchrun --nproc-per-node 2 tools/run_long_attention.py --tokens 65536 131072 262144

One query head and one KV head of 64, bfloat16, ring mode, one thread a rank: EAGLE-3 with 3 passes, and DFlash with 64
anchors and blocks of 16. Memory is the growth of the resident peak (VmHWM) over what was resident before the step,
inputs included; freed blocks leave it at once, so that no run uses what an earlier one left in malloc's heap.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
import torch.distributed as dist
from bench_memory import MIB, map_blocks_from, read_growth, reset_peak
from torch import Tensor

from specco.ops.branch_attention import Trunk
from specco.ops.layout import PackedLayout

HEAD_DIM, BLOCK_SIZE, NUM_ANCHORS, TTT_STEPS = 64, 16, 64, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def run_eagle3(trunk: Trunk, num_rows: int) -> list:
    keys, values = ([draw(num_rows, 1, 1, HEAD_DIM) for _ in range(TTT_STEPS - 1)] for _ in range(2))
    queries = [draw(num_rows, 1, 1, HEAD_DIM) for _ in range(TTT_STEPS)]
    return [trunk.attend(q, keys[:d], values[:d], trunk_inclusive=True) for d, q in enumerate(queries)]


def run_dflash(trunk: Trunk, layout: PackedLayout) -> list:
    generator = torch.Generator().manual_seed(0)
    owners, rows = layout.locate(torch.randint(0, layout.num_tokens, (NUM_ANCHORS,), generator=generator))
    anchors = rows[owners == layout.cp_rank]
    q, k, v = (draw(len(anchors), BLOCK_SIZE, 1, HEAD_DIM) for _ in range(3))
    return [trunk.attend(q, k, v, anchors=anchors, trunk_inclusive=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[65536, 131072, 262144])
    parser.add_argument("--families", nargs="+", choices=["eagle3", "dflash"], default=["dflash", "eagle3"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    map_blocks_from(MIB // 16)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for num_tokens in options.tokens:
        layout = PackedLayout.build([0, num_tokens], size, rank)
        for family in options.families:
            gc.collect()
            dist.barrier()
            resident, cpu, wall = reset_peak(), time.process_time(), time.perf_counter()
            k, v = draw(layout.num_rows, 1, HEAD_DIM), draw(layout.num_rows, 1, HEAD_DIM)
            trunk = Trunk(k, v, layout, dist.group.WORLD if size > 1 else None, "ring")
            outs = run_eagle3(trunk, layout.num_rows) if family == "eagle3" else run_dflash(trunk, layout)
            torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            growth = read_growth(resident)
            assert k.grad is not None
            assert bool(k.grad.isfinite().all())
            print(
                f"{family} {num_tokens} tokens, rank {rank} of {size}: {wall:.1f} s wall, {cpu:.1f} s CPU, "
                f"{growth:.0f} MiB growth, {trunk.counters.bytes / MIB:.0f} MiB sent, "
                f"{trunk.counters.wait_seconds:.1f} s waited",
                flush=True,
            )
            del k, v, trunk, outs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
