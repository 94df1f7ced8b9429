"""Measure branch attention under context parallelism: ours against what others do, interleaved in one run.

    python tools/bench_branch_attention.py --cases eagle3-3 eagle3-7 dflash-64 --tokens 4096 8192 --cp 1 2 4 \\
        --out bench.json --plot bench.png
    python tools/bench_branch_attention.py --check          # every variant against the dense oracle
    python tools/bench_branch_attention.py --pairs          # balance of visible and computed pairs

Cases: ``eagle3-P``, P passes of TTT; ``dflash-A``, A sampled anchors with blocks of 16. ``--documents single`` is one
document, ``packed`` is documents of 256 to 2,048 tokens. One process per rank, one thread each, gloo.

Variants: ``ours-ring``, ``ours-gather``; ``allgather`` and ``usp-UxR`` (Ulysses x ring, see bench_baselines.py and
bench_usp.py; with more Ulysses ranks than KV heads, which SpecForge refuses, KV heads are repeated); at one rank
``ours-ring`` and ``single``. Every figure is the median over repeats, in which all variants
take turns, the order turning by one each time:

cpu_s       CPU seconds of the busiest rank, forward and backward (time.process_time: all threads of the process)
wall_s      seconds of the slowest rank; means something only where each rank has a core of its own
peak_mib    growth of the resident peak during a step, median of ``--memory-steps`` untimed ones before the timed ones
            (VmHWM, reset through /proc/self/clear_refs, over VmRSS before it; malloc is told from the start to map
            every block of 64 KiB or more, so that freed memory leaves VmRSS at once)
saved_mib   what forward keeps for backward, its inputs too: storages that saved_tensors_hooks sees or our Trunk holds,
            each once
sent_mib    bytes sent by a rank, the largest over ranks; wait_s: seconds that rank stood waiting
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_baselines import AllGather, AllGatherPlan, Traffic
from bench_memory import MIB, map_blocks_from, read_growth, reset_peak
from bench_plot import plot_results
from bench_usp import Usp, UspPlan
from torch import Tensor

from specco.ops.branch_attention import Trunk
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention
from specco.ops.passes import build_query_pass, count_pairs

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
FIGURES = ("cpu_s", "wall_s", "peak_mib", "saved_mib", "sent_mib", "wait_s")


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: ``size`` passes of EAGLE-3's TTT, or ``size`` anchors of DFlash with blocks of ``width``."""

    family: str
    size: int
    tokens: int
    documents: str
    cp: int
    heads: tuple[int, int, int] = (8, 2, 64)
    dtype: str = "bfloat16"
    width: int = 16

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size} {self.documents} {self.tokens} cp{self.cp}"

    @property
    def lengths(self) -> list[int]:
        """Document lengths, multiples of 8 so that no variant needs padding at up to 4 ranks."""
        if self.documents == "single":
            return [self.tokens]
        draw, lengths = random.Random(self.tokens), []
        while sum(lengths) < self.tokens:
            lengths.append(min(8 * draw.randint(32, 256), self.tokens - sum(lengths)))
        return lengths

    def draw_anchors(self) -> Tensor | None:
        """int64 [B], ascending global rows; None for EAGLE-3."""
        if self.family == "eagle3":
            return None
        generator = torch.Generator().manual_seed(self.size)
        return torch.randperm(self.tokens, generator=generator)[: self.size].sort().values

    def draw_inputs(self) -> dict[str, list[Tensor]]:
        """Global tensors: q and its output's gradient, k, v; one entry a pass, or trunk then branch for DFlash."""
        torch.manual_seed(self.tokens + self.size)
        n, kv, h = self.heads
        if self.family == "eagle3":
            shapes = {"q": [(self.tokens, n, h)] * self.size, "k": [(self.tokens, kv, h)] * self.size}
        else:
            block = (self.size, self.width)
            shapes = {"q": [(*block, n, h)], "k": [(self.tokens, kv, h), (*block, kv, h)]}
        shapes |= {"v": shapes["k"], "grad": shapes["q"]}
        return {key: [torch.randn(s).to(DTYPES[self.dtype]) for s in sizes] for key, sizes in shapes.items()}


class Ours:
    """specco's op as a variant; attributes and methods as of ``bench_usp.Usp``."""

    def __init__(self, case: Case, rank: int, group: dist.ProcessGroup | None, mode: str) -> None:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
        self.layout = PackedLayout.build(cu_seqlens, case.cp, rank)
        self.group, self.mode, self.rows = group, mode, self.layout.global_rows
        self.note_held: Callable[[Tensor], object] | None = None
        if (anchors := case.draw_anchors()) is not None:
            owners, local_rows = self.layout.locate(anchors)
            self.own_anchors, self.anchors = anchors[owners == rank], local_rows[owners == rank]

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.counters.bytes, self.counters.messages, self.counters.wait_seconds)

    def make_trunk(self, k: Tensor, v: Tensor) -> Trunk:
        trunk = Trunk(k, v, self.layout, self.group, self.mode)
        self.counters = trunk.counters
        if self.note_held is not None:
            note_tensors(trunk, self.note_held)
        return trunk

    def run_passes(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        trunk = self.make_trunk(k[0], v[0])
        keys, values = ([x.unsqueeze(1) for x in tensors[1:]] for tensors in (k, v))
        calls = ((x.unsqueeze(1), keys[:d], values[:d]) for d, x in enumerate(q))
        outs = [trunk.attend(*call, trunk_inclusive=True, return_lse=True)[0] for call in calls]
        return [out.squeeze(1) for out in outs]

    def run_blocks(self, q: Tensor, k: Tensor, v: Tensor, k_branch: Tensor, v_branch: Tensor) -> Tensor:
        options = {"anchors": self.anchors, "trunk_inclusive": False, "return_lse": True}
        return self.make_trunk(k, v).attend(q, k_branch, v_branch, **options)[0]


def note_tensors(holder: object, note: Callable[[Tensor], object]) -> None:
    """Call ``note`` for every tensor that an object of specco.ops holds in attributes, lists and dicts."""
    if isinstance(holder, Tensor):
        note(holder)
    elif isinstance(holder, (list, tuple)):
        for item in holder:
            note_tensors(item, note)
    elif isinstance(holder, dict):
        note_tensors(list(holder.values()), note)
    elif type(holder).__module__.startswith("specco.ops") and not isinstance(holder, PackedLayout):
        note_tensors(vars(holder), note)


def build_variant(name: str, case: Case, rank: int, groups: dict):
    """Return the variant's object for this rank (attributes and methods as of ``bench_usp.Usp``)."""
    anchors, dtype = case.draw_anchors(), DTYPES[case.dtype]
    if name.startswith("ours"):
        return Ours(case, rank, dist.group.WORLD if case.cp > 1 else None, name.removeprefix("ours-"))
    if name == "allgather":
        return AllGather(AllGatherPlan(case.lengths, case.cp, rank), None, dtype, anchors, case.width)
    if name == "single" or name.startswith("usp"):
        ulysses, ring = (1, 1) if name == "single" else map(int, name.removeprefix("usp-").split("x"))
        pair = groups.get((ulysses, ring), (None, None))
        return Usp(UspPlan(case.lengths, ulysses, ring, rank, pair, anchors, case.width, dtype))
    raise ValueError(f"variant {name!r} is unknown; at {case.cp} ranks there are {list_variants(case.cp)}")


def list_variants(cp: int) -> list[str]:
    if cp == 1:
        return ["ours-ring", "single"]
    splits = [f"usp-{u}x{cp // u}" for u in (1, 2, 4) if cp % u == 0 and u <= cp]
    return ["ours-ring", "ours-gather", "allgather", *splits]


def make_groups(cp: int) -> dict:
    """(Ulysses group, ring group) of this rank for every split; collective, same order on every rank."""
    rank, groups = dist.get_rank(), {}
    for ulysses in (u for u in (1, 2, 4) if cp % u == 0 and u <= cp):
        pair: list = [None, None]
        for low in range(0, cp, ulysses):
            members = list(range(low, low + ulysses))
            group = dist.new_group(members)
            pair[0] = group if rank in members else pair[0]
        for low in range(ulysses):
            members = list(range(low, cp, ulysses))
            group = dist.new_group(members)
            pair[1] = group if rank in members else pair[1]
        groups[ulysses, cp // ulysses] = tuple(pair)
    return groups


def take_shard(case: Case, variant, inputs: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Local copies of the global inputs, q, k and v as leaves."""
    local = {}
    for key, tensors in inputs.items():
        rows = [variant.rows] * len(tensors)
        if (anchors := case.draw_anchors()) is not None:
            own = torch.searchsorted(anchors, variant.own_anchors)
            rows = [variant.rows, own] if key in "kv" else [own]
        local[key] = [x.detach()[r].requires_grad_(key != "grad") for x, r in zip(tensors, rows, strict=True)]
    return local


def run_forward(case: Case, variant, local: dict[str, list[Tensor]]) -> list[Tensor]:
    if case.family == "eagle3":
        return variant.run_passes(local["q"], local["k"], local["v"])
    (q,), (k, k_branch), (v, v_branch) = local["q"], local["k"], local["v"]
    return [variant.run_blocks(q, k, v, k_branch, v_branch)]


def clear_gradients(local: dict[str, list[Tensor]]) -> None:
    for tensors in local.values():
        for x in tensors:
            x.grad = None


def time_step(case: Case, variant, local) -> dict[str, float]:
    """One forward and backward of this rank. Collective."""
    clear_gradients(local)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    torch.autograd.backward(run_forward(case, variant, local), local["grad"])
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    traffic = variant.traffic
    return {"cpu_s": cpu, "wall_s": wall, "sent_mib": traffic.bytes_sent / MIB, "wait_s": traffic.wait_s}


def measure_memory(case: Case, variant, local) -> dict[str, float]:
    """Peak growth and saved bytes of one step, see the module's docstring. Collective."""
    clear_gradients(local)
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    gc.collect()
    dist.barrier()
    resident = reset_peak()
    variant.note_held = note
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outs = run_forward(case, variant, local)
    variant.note_held = None
    torch.autograd.backward(outs, local["grad"])
    peak = read_growth(resident)
    return {"peak_mib": peak, "saved_mib": sum(saved.values()) / MIB}


def bench_case(case: Case, variants: list[str], repeats: int, memory_steps: int, groups: dict) -> list[dict]:
    """Interleave the variants; return this rank's figures of every (variant, repeat). Collective."""
    inputs, rank = case.draw_inputs(), dist.get_rank()
    built = {}
    for name in variants:
        variant = build_variant(name, case, rank, groups)
        built[name] = variant, take_shard(case, variant, inputs)
    del inputs
    rows: list[dict] = []
    for variant, local in built.values():
        time_step(case, variant, local)
    memory = [{name: measure_memory(case, *built[name]) for name in variants} for _ in range(memory_steps)]
    map_blocks_from(32 * MIB)
    for repeat in range(repeats):
        turn = repeat % len(variants)
        for name in variants[turn:] + variants[:turn]:
            rows.append({"variant": name, "repeat": repeat, **time_step(case, *built[name])})
    return [row | memory[row["repeat"] % memory_steps][str(row["variant"])] for row in rows]


def worker(rank: int, case: Case, store: str, options: argparse.Namespace, out: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # collectives renamed in torch 2.13, kept for 2.11
    torch.set_num_threads(1)
    map_blocks_from(MIB // 16)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.cp)
    groups, variants = make_groups(case.cp), options.variants or list_variants(case.cp)
    if options.check:
        results = check_case(case, variants, groups)
    else:
        per_rank: list = [None] * case.cp
        dist.all_gather_object(per_rank, bench_case(case, variants, options.repeats, options.memory_steps, groups))
        results = reduce_ranks(case, per_rank)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def reduce_ranks(case: Case, per_rank: list[list[dict]]) -> list[dict]:
    """Largest over ranks, then median over repeats; ratios to the best of ours are medians of paired ratios."""
    rows = []
    for steps in zip(*per_rank, strict=True):
        rows.append(steps[0] | {key: max(step[key] for step in steps) for key in FIGURES})
    names = list(dict.fromkeys(row["variant"] for row in rows))
    series = {name: {key: [r[key] for r in rows if r["variant"] == name] for key in FIGURES} for name in names}
    table = []
    ours = [name for name in names if name.startswith("ours")]
    best = min(ours, key=lambda name: statistics.median(series[name]["cpu_s"]), default=None)
    for name in names:
        row = {"case": dataclasses.asdict(case), "name": case.name, "variant": name}
        row |= {key: statistics.median(values) for key, values in series[name].items()}
        row["cpu_s_all"] = series[name]["cpu_s"]
        if best is not None:
            pairs = zip(series[name]["cpu_s"], series[best]["cpu_s"], strict=True)
            row["ratio"] = statistics.median(theirs / own for theirs, own in pairs)
        table.append(row)
    return table


def check_case(case: Case, variants: list[str], groups: dict) -> list[dict]:
    """Largest error of outputs and gradients of each variant, relative to the oracle's largest entry. Collective."""
    inputs, rank, rows = case.draw_inputs(), dist.get_rank(), []
    expected_outs, expected_grads = run_oracle(case, inputs)
    for name in variants:
        variant = build_variant(name, case, rank, groups)
        local = take_shard(case, variant, inputs)
        outs = run_forward(case, variant, local)
        torch.autograd.backward(outs, local["grad"])
        pairs: list = list(zip(outs, take_shard(case, variant, {"q": expected_outs})["q"], expected_outs, strict=True))
        wanted = take_shard(case, variant, expected_grads)
        for key in "qkv":
            pairs += list(zip([x.grad for x in local[key]], wanted[key], expected_grads[key], strict=True))
        errors = [((x - y).abs().max() / whole.abs().max()).item() for x, y, whole in pairs if y.numel()]
        largest = torch.tensor(max(errors, default=0.0), dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        rows.append({"name": case.name, "variant": name, "dtype": case.dtype, "error": largest.item()})
    return rows


def run_oracle(case: Case, inputs: dict[str, list[Tensor]]) -> tuple[list[Tensor], dict]:
    """Outputs and gradients of dense attention in float64."""
    leaves = {key: [x.to(torch.float64, copy=True).requires_grad_() for x in inputs[key]] for key in "qkv"}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
    if case.family == "eagle3":
        own = [(torch.stack(k[1:d], 1), torch.stack(v[1:d], 1)) for d in range(2, len(q) + 1)]
        branches = [(None, None), *own]
        calls = [(x.unsqueeze(1), *branch) for x, branch in zip(q, branches, strict=True)]
        options: dict = {"trunk_inclusive": True}
    else:
        calls = [(q[0], k[1], v[1])]
        options = {"trunk_inclusive": False, "anchors": case.draw_anchors()}
    outs = [naive_branch_attention(x, k[0], v[0], *own, cu_seqlens=cu_seqlens, **options)[0] for x, *own in calls]
    outs = [out.view_as(x) for out, x in zip(outs, q, strict=True)]
    torch.autograd.backward(outs, [g.double() for g in inputs["grad"]])
    return [x.detach() for x in outs], {key: [x.grad for x in leaves[key]] for key in "qkv"}


TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}


def print_checks(results: list[dict]) -> bool:
    """Print the largest relative errors; return whether all are within ``TOLERANCES``."""
    good = True
    for row in results:
        within = row["error"] <= TOLERANCES[row["dtype"]]
        good &= within
        print(f"{row['name']:32} {row['variant']:12} {row['dtype']:9} {row['error']:.1e} {'ok' if within else 'WRONG'}")
    return good


def print_table(rows: list[dict]) -> None:
    print(f"\n{rows[0]['name']}, heads {'/'.join(map(str, rows[0]['case']['heads']))}, {rows[0]['case']['dtype']}")
    print(f"{'variant':12}{'ratio':>7}" + "".join(f"{key:>11}" for key in FIGURES))
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
        print(f"{row['variant']:12}{ratio:>7}" + "".join(f"{row[key]:11.3f}" for key in FIGURES), flush=True)


def run_case(case: Case, options: argparse.Namespace) -> list[dict]:
    """Spawn the ranks of one case and return its rows. No case inherits the heap that another one left."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        mp.spawn(worker, (case, str(Path(folder) / "store"), options, str(out)), case.cp)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["eagle3-3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096])
    parser.add_argument("--documents", nargs="+", default=["single"], choices=["single", "packed"])
    parser.add_argument("--cp", nargs="+", type=int, default=[2], choices=[1, 2, 4])
    parser.add_argument("--heads", nargs=3, type=int, default=[8, 2, 64], help="query heads, KV heads, head size")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--variants", nargs="+", help="all of them when not given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-steps", type=int, default=3, help="untimed steps of which peaks are the median")
    parser.add_argument("--check", action="store_true", help="compare with the dense oracle instead of timing")
    parser.add_argument("--pairs", action="store_true", help="print the balance of (query, key) pairs instead")
    parser.add_argument("--plot", type=Path, help="image of the ratios")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    options = parser.parse_args()
    for name in ("repeats", "memory_steps"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {given}: at least 1 is allowed")
    cases = []
    for name, tokens, documents, cp, dtype in itertools.product(
        options.cases, options.tokens, options.documents, options.cp, options.dtype
    ):
        family, _, size = name.partition("-")
        if family not in ("eagle3", "dflash") or not size.isdigit():
            parser.error(f"case {name!r}; allowed are eagle3-PASSES and dflash-ANCHORS")
        cases.append(Case(family, int(size), tokens, documents, cp, tuple(options.heads), dtype))
    if options.pairs:
        report_pairs(options.cp)
        return
    results = []
    for case in sorted(cases, key=lambda case: case.cp):
        results += run_case(case, options)
        if not options.check:
            print_table([row for row in results if row["name"] == case.name])
    if options.check and not print_checks(results):
        raise SystemExit(1)
    if options.plot:
        plot_results(results, describe_machine(), options.plot)
    if options.out:
        options.out.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1))


def report_pairs(degrees: list[int]) -> None:
    """Print the balance of visible pairs over ranks and the share of computed ones, over 20 random packings each."""
    print(f"{'documents':18}{'pass':>12}{'cp':>4}{'visible max/mean':>18}{'computed/visible':>18}")
    backend = get_backend("cpu", torch.device("cpu"), torch.bfloat16)
    for (low, high), width, cp in itertools.product([(64, 2048), (16, 256), (2, 32)], (1, 16), degrees):
        balance, share = [], []
        for seed in range(20):
            draw = random.Random(seed)
            lengths = [draw.randint(low, high) for _ in range(64)]
            layouts = [PackedLayout.build([0, *itertools.accumulate(lengths)], cp, rank) for rank in range(cp)]
            owners, rows = layouts[0].locate(torch.tensor(draw.choices(range(sum(lengths)), k=512)))
            counts = []
            for rank, layout in enumerate(layouts):
                anchors = None if width == 1 else rows[owners == rank]
                q = torch.empty(0, width, 8, 64)
                counts.append(count_pairs(build_query_pass(layout, backend, q, 2, anchors, width == 1, None, None)))
            visible = [count.visible for count in counts]
            balance.append(max(visible) * cp / sum(visible))
            share.append(sum(count.computed for count in counts) / sum(visible))
        what = "every row" if width == 1 else "512 anchors"
        figures = (
            f"{statistics.mean(balance):8.3f} <= {max(balance):.3f}{statistics.mean(share):9.3f} <= {max(share):.3f}"
        )
        print(f"64 of {low}..{high}".ljust(18) + f"{what:>12}{cp:4}  {figures}")


def describe_machine() -> dict[str, str]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    cpu = model[0].split(":")[1].strip() if model else platform.processor()
    return {"cpu": cpu, "cores": str(os.cpu_count()), "torch": torch.__version__, "commit": commit}


if __name__ == "__main__":
    main()
