"""Rollouts with and without speculation, engines taking turns in one process: speed, acceptance, what pays in the end.

    PYTHONPATH=. python tools/bench_rollout.py runs/NAME/policy runs/NAME/draft --batch 16 64 --k 1 2 3 4 5
    PYTHONPATH=. python tools/bench_rollout.py POLICY DRAFT --plain-run runs/NAME_none_seed0 \\
        --draft-run runs/NAME_cotrain_seed0

One engine without a draft and one for each number of draft tokens (K) are up at once; in every round each of them
rolls out the same fresh prompts of the demo's task, in an order that turns from round to round. Rates are medians over
rounds; speed-ups are medians of the ratios to the plain engine's rate in the same round, with a 95% bootstrap interval.

With the folders of two runs, one without and one with a draft trained along, the measured speed-up and the phases of
their metrics files give an estimate of the whole step, and the rollout time from which on speculation pays.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from report import read_run
from report_plots import Group, average_phases
from rich.console import Console
from rich.table import Table
from rollout_timing import PLAIN, Batch, build_engines, summarize, take_turns, write_results

from recipes.carry import EOS_ID, MAX_RESPONSE_TOKENS, CarryEnvironment
from recipes.run_info import read_machine, read_versions
from specco.rl.engine import RolloutEngine, SamplingConfig

GROUP_SIZE = 8
"""Samples of a prompt, as in the demo."""
MAX_MODEL_LEN = 128
KV_CACHE_BYTES = 1 << 26


def main() -> None:
    args = parse_arguments()
    engines = build_engines(
        args.policy,
        args.draft,
        args.k,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(args.batch),
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    results = []
    for batch in args.batch:
        results += measure_batch(engines, batch, args.rounds)
    for engine in engines.values():
        engine.close()
    report: dict[str, Any] = {
        "policy": args.policy,
        "draft": args.draft,
        "rounds": args.rounds,
        "machine": read_machine(),
        "versions": read_versions(),
        "results": results,
    }
    print_results(results, f"{args.policy}: rollouts, {args.rounds} rounds, engines in turn")
    if args.plain_run is not None:
        phases = [read_phases(path) for path in (args.plain_run, args.draft_run)]
        report["whole_step"] = [estimate_step(result, *phases) for result in results if result["k"] != PLAIN]
        print_estimates(report["whole_step"], *phases)
    write_results(report, args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="directory of the policy")
    parser.add_argument("draft", help="directory of its draft")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64], help=f"sequences, multiples of {GROUP_SIZE}")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="numbers of draft tokens")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--plain-run", type=Path, help="folder of a run without a draft, for the whole step")
    parser.add_argument("--draft-run", type=Path, help="folder of a run that trains its draft")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if any(batch < GROUP_SIZE or batch % GROUP_SIZE for batch in args.batch):
        parser.error(f"--batch is {args.batch}; allowed are multiples of {GROUP_SIZE}")
    if min(args.k) < 1 or len(set(args.k)) < len(args.k):
        parser.error(f"--k is {args.k}; allowed are different numbers from 1 on (the plain engine is always there)")
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; an interval needs 2 or more")
    if (args.plain_run is None) != (args.draft_run is None):
        parser.error("--plain-run and --draft-run go together")
    return args


def make_batch(batch: int, index: int) -> Batch:
    """Return ``batch`` sequences of the demo's task, fresh ones in each round."""
    environment = CarryEnvironment(seed=1)
    prompts = [environment.make_prompt(index * batch + i) for i in range(batch // GROUP_SIZE)]
    return prompts, SamplingConfig(n=GROUP_SIZE, max_tokens=MAX_RESPONSE_TOKENS, stop_token_ids=(EOS_ID,), seed=index)


def measure_batch(engines: dict[int, RolloutEngine], batch: int, num_rounds: int) -> list[dict[str, Any]]:
    """Let the engines take turns, one round of warm-up first; return one result an engine."""
    rounds = take_turns(engines, num_rounds, partial(make_batch, batch))
    return [summarize(k, batch, rounds[k], rounds[PLAIN]) for k in engines]


def read_phases(folder: Path) -> dict[str, float]:
    """Return mean seconds a step by phase from a run's metrics file."""
    run = read_run(folder)
    phases = average_phases(Group(label=run.name, runs=[run]))
    if "rollout" not in phases:
        raise SystemExit(f"{folder} has no seconds of the rollout from step 2 on")
    return phases


def estimate_step(result: dict[str, Any], plain: dict[str, float], drafted: dict[str, float]) -> dict[str, Any]:
    """Put a measured rollout speed-up into the phases of a plain run and of one that trains a draft.

    Args:
        result: of ``summarize``.
        plain: seconds by phase without a draft.
        drafted: with one; its rollout is replaced by the plain one's, made faster.

    Returns:
        ``step_speedup``, and ``rollout_seconds_to_pay``: the plain rollout time from which on the step gets faster at
        this speed-up of the rollout; None where no rollout is long enough.
    """
    speedup = result["cpu_speedup"]
    rest_plain, rest_drafted = (sum(v for name, v in p.items() if name != "rollout") for p in (plain, drafted))
    extra = rest_drafted - rest_plain
    step = (plain["rollout"] + rest_plain) / (plain["rollout"] / speedup + rest_drafted)
    pays_from = max(extra, 0.0) / (1 - 1 / speedup) if speedup > 1 else None
    return {
        "batch": result["batch"],
        "k": result["k"],
        "rollout_speedup": speedup,
        "step_speedup": step,
        "rollout_share": plain["rollout"] / (plain["rollout"] + rest_plain),
        "draft_seconds": extra,
        "rollout_seconds_to_pay": pays_from,
    }


def print_results(results: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    headings = ("batch", "K", "tokens/s", "tokens/CPU-s", "speed-up", "by CPU time (95%)", "acceptance", "check cost")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in results:
        low, high = r["cpu_speedup_interval"]
        cells = [str(r["batch"]), "plain" if r["k"] == PLAIN else str(r["k"])]
        cells += [f"{r['tokens_per_s']:.0f}", f"{r['tokens_per_cpu_s']:.0f}"]
        if r["k"] != PLAIN:
            cells += [f"{r['speedup']:.2f}x", f"{r['cpu_speedup']:.2f}x ({low:.2f} to {high:.2f})"]
            cells += [f"{r['acceptance_length']:.2f}", f"{r['check_cost']:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table)
    print("check cost: CPU time of drafting and checking, for each sequence, in steps of the plain engine")


def print_estimates(estimates: Sequence[dict[str, Any]], plain: dict[str, float], drafted: dict[str, float]) -> None:
    table = Table(title="whole step, estimated from the measured phases")
    for heading in ("batch", "K", "rollout", "step", "rollout must take", "now takes"):
        table.add_column(heading, justify="right")
    for e in estimates:
        pays_from = e["rollout_seconds_to_pay"]
        cells = [str(e["batch"]), str(e["k"]), f"{e['rollout_speedup']:.2f}x", f"{e['step_speedup']:.2f}x"]
        cells += ["never pays" if pays_from is None else f"{pays_from:.2f} s", f"{plain['rollout']:.2f} s"]
        table.add_row(*cells)
    Console(width=120).print(table)
    for name, phases in (("without a draft", plain), ("with one", drafted)):
        print(f"{name}: " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()))


if __name__ == "__main__":
    main()
