"""Run the arms of one config from the same start, data and seeds, one after the other, and write the report.

    python -m recipes.compare --config tiny_eagle3 --arms none,frozen,cotrain --seeds 0,1,2 --ranks 2
    python -m recipes.compare --config tiny_eagle3 --arms none,cotrain -- --steps 20 --max_num_seqs 16

Every arm and seed is a ``recipes.grpo`` of its own, named NAME_ARM_seedS; what follows ``--`` is given to each. The
report, ``runs/NAME/report.html``, averages the seeds of an arm; its speed-ups are against the first arm. The first run
that fails ends the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

ARMS = ("none", "frozen", "cotrain")
REPORT = Path(__file__).parents[1] / "tools" / "report.py"
STOP_SECONDS = 40
"""What a run that is told to stop gets for it; its ranks end within 30 s."""


def main() -> None:
    """Run every arm with every seed, then the report."""
    args, fields = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, _exit)
    for seed in args.seeds:
        for arm in args.arms:
            name = f"{args.name}_{arm}_seed{seed}"
            print(f"\n== {name}", flush=True)
            status = run_command(make_command(args, arm, seed, name, fields))
            if status != 0:
                raise SystemExit(f"{name} ended with status {status}, for the reason above; no further run was started")
    folders = [f"runs/{args.name}_{arm}_seed{seed}" for arm in args.arms for seed in args.seeds]
    title = f"{args.config}: {', '.join(args.arms)}"
    report = [sys.executable, str(REPORT), *folders, "--out", f"runs/{args.name}", "--title", title]
    raise SystemExit(run_command(report))


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own arguments, and the fields after ``--``."""
    own, fields = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, fields = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="recipes.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="one of recipes.grpo_configs")
    parser.add_argument(
        "--arms", type=parse_arms, default=list(ARMS), help=f"of {','.join(ARMS)}, which is the default"
    )
    parser.add_argument("--seeds", type=parse_seeds, default=[0], help="such as 0,1,2; default: 0")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each run")
    parser.add_argument("--name", default="", help="of the comparison; default: the config's")
    args = parser.parse_args(own)
    args.name = args.name or args.config
    own_fields = {field.partition("=")[0] for field in fields} & {"--config", "--name", "--arm", "--seed"}
    if own_fields:
        parser.error(f"{', '.join(sorted(own_fields))} cannot follow --; the comparison sets them for each run")
    return args, fields


def parse_arms(text: str) -> list[str]:
    """Return the arms of a list with commas."""
    return _check_list(text.split(","), ARMS)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list with commas."""
    seeds = text.split(",")
    for seed in seeds:
        if not seed.isdecimal():
            raise argparse.ArgumentTypeError(f"{seed!r} is no seed; seeds are integers from 0 on")
    return _check_list([int(seed) for seed in seeds], None)


def _check_list(values: list[Any], allowed: tuple[str, ...] | None) -> list[Any]:
    for value in values:
        if allowed is not None and value not in allowed:
            raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(allowed)}")
        if values.count(value) > 1:
            raise argparse.ArgumentTypeError(f"{value!r} is there twice")
    return values


def make_command(args: argparse.Namespace, arm: str, seed: int, name: str, fields: list[str]) -> list[str]:
    """Return the command of one run."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    recipe = ["-m", "recipes.grpo", "--config", args.config, "--name", name, "--arm", arm, "--seed", str(seed)]
    return [sys.executable, *torchrun, *recipe, *fields]


def run_command(command: list[str]) -> int:
    """Run a command on this terminal and return its status; it does not outlive this process."""
    process = subprocess.Popen(command)
    with _stop_at_exit(process):
        return process.wait()


@contextlib.contextmanager
def _stop_at_exit(process: subprocess.Popen[bytes]) -> Generator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun stops its ranks
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _exit(signum: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
