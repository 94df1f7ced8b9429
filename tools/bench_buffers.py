"""Measure the K/V and dK/dV buffers of branch attention: ring, gather and the all-gather baseline.

    python tools/bench_buffers.py --cp 2 4

One EAGLE-3 pass over one document, forward and backward. Counted are the storages that live at once, at the worst
moment of the worst rank, and hold keys, values or their gradients: sent, received, gathered, summed or copied for a
kernel; the inputs are not. Query heads have a factor 7 that nothing else has, so these are the storages whose number of
elements has none. ``2/cp`` is what two shards are of a whole trunk.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
import weakref
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_branch_attention import MIB, Case, build_variant, run_forward, take_shard
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VARIANTS = ("ours-ring", "ours-gather", "allgather")
HEADS = (14, 2, 64)


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of storages that operations made, of tensors without a factor 7 in their number of elements.

    Attributes:
        peak: most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known | self.live.keys():
                self.follow(x)
        return result

    def follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if (storage.nbytes() // x.element_size()) % 7 == 0 or x.dim() < 3:
            return
        self.live[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))


def worker(rank: int, cp: int, store: str, tokens: int, out: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cp)
    case, peaks = Case("eagle3", 1, tokens, "single", cp, HEADS), []
    inputs = case.draw_inputs()
    for name in VARIANTS:
        variant = build_variant(name, case, rank, {})
        local = take_shard(case, variant, inputs)
        with LiveBytes() as live:
            torch.autograd.backward(run_forward(case, variant, local), local["grad"])
        peaks.append(live.peak)
    largest = torch.tensor(peaks)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        Path(out).write_text(json.dumps(dict(zip(VARIANTS, largest.tolist(), strict=True))))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", nargs="+", type=int, default=[2, 4], choices=[2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    print(f"{'cp':>3}  {'variant':12}{'MiB':>8}{'of allgather':>14}{'2/cp':>6}")
    for cp in options.cp:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "peaks.json")
            mp.spawn(worker, (cp, str(Path(folder) / "store"), options.tokens, out), cp)
            peaks = json.loads(Path(out).read_text())
        for name, peak in peaks.items():
            print(f"{cp:3}  {name:12}{peak / MIB:8.2f}{peak / peaks['allgather']:14.2f}{2 / cp:6.2f}")


if __name__ == "__main__":
    main()
