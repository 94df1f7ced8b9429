"""What a pipeline's step costs more with taps on the way to the last stage: TapChannel against other ways, in turn.

    PYTHONPATH=. torchrun --nproc-per-node 2 tools/bench_tap_channel.py --out taps.json --plot taps.png

Variants, all under 1F1B with the same stages, weights and batch, one step each in random order in every round:

- ``none``: no taps leave a stage.
- ``shm``, ``p2p``: TapChannel with that transport.
- ``relay``: taps travel hop by hop as further outputs of the stages, as vLLM's pipeline relayed them at first
  (vllm-project/vllm#50514).
- ``hooks``: forward hooks send and receive on the pipeline's own group (NVIDIA-NeMo/RL#4060). A receive is posted only
  when the taps are wanted, and a source waits for its last send before its next forward. A send that blocks in the hook
  itself cannot run: the stage would have to be received from before it sends its activation. ``--blocking`` tries it.

The taps of each stage are all its layers and, of stage 0, the embedding; the last stage keeps them and computes nothing
with them. A step's time is that of the slowest rank. Overheads are paired with ``none`` of the same round, with a
bootstrap interval of 95% over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from bench_branch_attention import describe_machine
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from specco.distributed.pipeline import attach_taps
from specco.distributed.pipeline_order import read_order
from specco.distributed.taps import Tap, TapChannel, TapPlan, Taps

VARIANTS = ("none", "shm", "p2p", "relay", "hooks")
HOOK_TAG = 7


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stage(nn.Module):
    """Layers of one stage; stage 0 has an embedding before them, a linear layer of its inputs."""

    def __init__(self, index: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Linear(args.dim, args.dim) if index == 0 else nn.Identity()
        ids = range(index * args.layers, (index + 1) * args.layers)
        self.layers = nn.ModuleDict({str(i): Block(args.dim) for i in ids})
        self.is_first, self.is_relaying = index == 0, False
        self.taps: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *relayed: Tensor, taps: Taps | None = None) -> Tensor | tuple[Tensor, ...]:
        x = self.embedding(x)
        own = [x.detach()] if self.is_first else []
        for layer in self.layers.values():
            x = layer(x)
            own.append(x.detach())
        self.taps = (*relayed, *(taps.rows.values() if taps is not None else ()))
        return (x, *relayed, *own) if self.is_relaying else x


class HookTaps:
    """The variant ``hooks``: isend in a source's forward, a blocking receive in the last stage's."""

    def __init__(self, model: Stage, group: dist.ProcessGroup, args: argparse.Namespace) -> None:
        self.group, self.rank, self.last, self.is_blocking = group, group.rank(), group.size() - 1, False
        self.buffers = [torch.empty(count_taps(r, args), args.rows, args.dim) for r in range(self.last)]
        self.works: list[dist.Work | None] = []
        if self.rank == self.last:
            self.handles = [model.register_forward_pre_hook(self.receive)]
        else:
            modules = [*([model.embedding] if self.rank == 0 else []), *model.layers.values()]
            self.handles = [m.register_forward_hook(self.make_send(i)) for i, m in enumerate(modules)]

    def make_send(self, index: int) -> Callable[..., None]:
        def send(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if index == 0:
                self.finish()
            self.buffers[self.rank][index].copy_(output.detach()[0])
            if index == len(self.buffers[self.rank]) - 1:
                options = {"group": self.group, "group_dst": self.last, "tag": HOOK_TAG + self.rank}
                if self.is_blocking:
                    dist.send(self.buffers[self.rank], **options)
                else:
                    self.works.append(dist.isend(self.buffers[self.rank], **options))

        return send

    def receive(self, module: nn.Module, inputs: Any) -> None:
        for source, buffer in enumerate(self.buffers):
            dist.recv(buffer, group=self.group, group_src=source, tag=HOOK_TAG + source)

    def finish(self) -> None:
        while self.works:
            work = self.works.pop()
            assert work is not None
            work.wait()

    def remove(self) -> None:
        self.finish()
        for handle in self.handles:
            handle.remove()


def count_taps(stage: int, args: argparse.Namespace) -> int:
    return args.layers + (stage == 0)


class Bench:
    """One rank's stage and the variants of its step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.size = args, dist.get_rank(), dist.get_world_size()
        self.group = self.new_group(120)
        torch.manual_seed(self.rank)
        self.model = Stage(self.rank, args)
        self.batch = torch.randn(args.microbatches, args.rows, args.dim)
        self.plain, self.stage = self.build_schedule(self.group, [0] * (self.size + 1))
        num_extra = [sum(count_taps(s, args) for s in range(rank)) for rank in range(self.size + 1)]
        self.relay, _ = self.build_schedule(self.group, num_extra)
        plan = TapPlan.build(read_order(self.plain), self.list_taps(), max_rows=args.rows)
        self.channels = {
            name: TapChannel(plan, self.new_group(120), dtype=torch.float32, transport=name) for name in ("shm", "p2p")
        }

    def new_group(self, timeout_s: float) -> dist.ProcessGroup:
        group = dist.new_group(list(range(self.size)), timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def list_taps(self) -> list[Tap]:
        args = self.args
        num_layers = (self.size - 1) * args.layers
        layers = [Tap(f"layers.{i}", i // args.layers, args.dim) for i in range(num_layers)]
        return [Tap("embedding", 0, args.dim), *layers]

    def build_schedule(self, group: dist.ProcessGroup, extra: list[int]) -> tuple[Schedule1F1B, PipelineStage]:
        """Build a schedule over the stage's model with static shapes; ``extra``: relayed taps that reach each rank."""
        x = torch.empty(1, self.args.rows, self.args.dim)

        def describe(count: int, needs_grad: bool) -> tuple[Tensor, ...]:
            return (x.clone().requires_grad_(needs_grad), *(x.clone() for _ in range(count)))

        is_last = self.rank == self.size - 1
        stage = PipelineStage(
            self.model,
            self.rank,
            self.size,
            torch.device("cpu"),
            input_args=describe(extra[self.rank], self.rank > 0),
            output_args=describe(0 if is_last else extra[self.rank + 1], True),
            group=group,
        )
        return Schedule1F1B(stage, self.args.microbatches, loss_fn=compute_loss), stage

    def step(self, variant: str) -> None:
        """Run one step of a variant."""
        self.model.is_relaying = variant == "relay" and self.rank < self.size - 1
        schedule = self.relay if variant == "relay" else self.plain
        taps: Any = None
        if variant in self.channels:
            taps = attach_taps(schedule, [self.stage], self.channels[variant])
        elif variant == "hooks":
            taps = HookTaps(self.model, self.group, self.args)
        args = (self.batch,) if self.rank == 0 else ()
        schedule.step(*args, target=self.batch if self.rank == self.size - 1 else None, return_outputs=False)
        if taps is not None:
            taps.remove()
        self.model.zero_grad(set_to_none=False)

    def time_step(self, variant: str) -> dict[str, float]:
        """Return wall seconds of the slowest rank, CPU seconds of the busiest, and all ranks' CPU seconds."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step(variant)
        times = gather((time.perf_counter() - start, time.process_time() - cpu_start))
        walls, cpus = zip(*times, strict=True)
        return {"wall_s": max(walls), "cpu_s": max(cpus), "cpu_sum_s": sum(cpus)}

    def time_bare_transfer(self, variant: str) -> float:
        """Return the seconds of a message's way when nothing else is done: the draft waits as the source writes."""
        channel = self.channels[variant]
        output = torch.randn(1, self.args.rows, self.args.dim)
        seconds = 0.0
        for microbatch in channel.plan.microbatches:
            dist.barrier()
            start = time.perf_counter()
            for source in channel.plan.sources:
                if source.rank == self.rank:
                    channel.send(source.stage, microbatch, {tap.name: output for tap in source.taps})
            if self.rank == channel.plan.draft_rank:
                channel.receive(microbatch)
                seconds += time.perf_counter() - start
        return share(seconds, self.size - 1) / channel.plan.num_microbatches

    def try_blocking(self) -> str:
        """Say what becomes of sends that block in the hooks."""
        group = self.new_group(5)
        schedule, _ = self.build_schedule(group, [0] * (self.size + 1))
        self.model.is_relaying = False
        taps = HookTaps(self.model, group, self.args)
        taps.is_blocking = True
        try:
            args = (self.batch,) if self.rank == 0 else ()
            schedule.step(*args, target=self.batch if self.rank == self.size - 1 else None, return_outputs=False)
            return "runs"
        except RuntimeError as error:
            reason = f"{error.__cause__} {error}"  # torch wraps what a forward raises
            return "deadlocks" if "Timed out" in reason or "Connection" in reason else reason
        finally:
            taps.works.clear()
            taps.remove()


def compute_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gather(value: Any) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def share(value: Any, rank: int) -> Any:
    """Return a value of one rank on all."""
    values = [value]
    dist.broadcast_object_list(values, src=rank)
    return values[0]


def compute_interval(values: list[float], rng: random.Random) -> tuple[float, float]:
    """Return a bootstrap interval of 95% of the median."""
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return the medians of each variant and its overhead over ``none``, in per cent, wall and CPU."""
    rng = random.Random(0)
    results: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        row: dict[str, Any] = {key: statistics.median(r[variant][key] for r in rounds) for key in rounds[0][variant]}
        for key in ("wall_s", "cpu_s", "cpu_sum_s"):
            ratios = [100 * (r[variant][key] / r["none"][key] - 1) for r in rounds]
            row[f"overhead_{key[:-2]}_pct"] = statistics.median(ratios)
            row[f"overhead_{key[:-2]}_interval"] = compute_interval(ratios, rng)
        results[variant] = row
    return results


def describe_waits(bench: Bench, num_steps: int) -> dict[str, dict[str, float]]:
    """Return, for each transport, bytes and waits a step and the part of the transfer that the slack hides."""
    waits = {}
    for name, channel in bench.channels.items():
        stats = gather(channel.stats)
        transfer_s = bench.time_bare_transfer(name) * channel.plan.num_microbatches
        tap_wait_s = sum(stats[-1].tap_wait_s.values()) / num_steps
        slacks = list(stats[-1].slack_s.values())
        waits[name] = {
            "bytes": sum(sum(s.num_bytes.values()) for s in stats) / num_steps,
            "messages": sum(sum(s.num_messages.values()) for s in stats) / num_steps,
            "slot_wait_s": sum(sum(s.slot_wait_s.values()) for s in stats) / num_steps,
            "tap_wait_s": tap_wait_s,
            "bare_transfer_s": transfer_s,
            "hidden_share": 1 - tap_wait_s / transfer_s,
            "median_slack_s": statistics.median(slacks),
            "least_slack_s": min(slacks),
        }
    return waits


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the overhead of each variant with its interval."""
    names = [name for name in VARIANTS if name != "none"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for ax, (key, title) in zip(axes, {"wall": "wall time", "cpu_sum": "CPU time, all ranks"}.items(), strict=True):
        rows = [result["variants"][name] for name in names]
        middle = [row[f"overhead_{key}_pct"] for row in rows]
        low, high = zip(*(row[f"overhead_{key}_interval"] for row in rows), strict=True)
        errors = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        ax.bar(names, middle, yerr=errors, capsize=4, color=[f"C{i}" for i in range(len(names))])
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_title(f"{title} of a step over no taps, %")
    machine = result["machine"]
    figure.suptitle(
        f"{result['ranks']} stages, {result['variants']['none']['wall_s']:.2f} s a step; {machine['cpu']}, "
        f"{machine['cores']} cores, torch {machine['torch']}",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_table(result: dict[str, Any]) -> None:
    print("variant    wall s   over none, % [95%]        CPU s (all)   over none, % [95%]")
    for name, row in result["variants"].items():
        parts = []
        for key in ("wall", "cpu_sum"):
            low, high = row[f"overhead_{key}_interval"]
            parts.append(f"{row[f'{key}_s']:7.3f}   {row[f'overhead_{key}_pct']:+6.2f} [{low:+.2f}, {high:+.2f}]")
        print(f"{name:8s} {'      '.join(parts)}")
    print(json.dumps(result["waits"], indent=2))
    if "blocking" in result:
        print(f"sends that block in the hooks: {result['blocking']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rows", type=int, default=512, help="token rows of a microbatch")
    parser.add_argument("--layers", type=int, default=2, help="layers of a stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--blocking", action="store_true", help="also try sends that block in the hooks")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--plot", type=Path, help="image file of the overheads")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    bench, order = Bench(args), random.Random(0)
    for variant in VARIANTS:
        bench.step(variant)
    rounds = []
    for _ in range(args.rounds):
        names = order.sample(VARIANTS, len(VARIANTS))
        times = {name: bench.time_step(name) for name in names}
        rounds.append(times)
    result: dict[str, Any] = {
        "ranks": bench.size,
        "args": {key: str(value) for key, value in vars(args).items()},
        "machine": describe_machine(),
        "variants": summarize(rounds),
        "waits": describe_waits(bench, args.rounds + 1),
        "rounds": rounds,
    }
    for channel in bench.channels.values():
        channel.close()
    if args.blocking:
        result["blocking"] = bench.try_blocking()
    if bench.rank == 0:
        print_table(result)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2))
        if args.plot:
            plot(result, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
