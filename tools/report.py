"""Compare runs by their metrics files: one self-contained HTML page, its plots as PNG files, and a table.

    python tools/report.py runs/tiny_eagle3_none_seed0 runs/tiny_eagle3_cotrain_seed0

Each argument is the folder of a run with ``metrics.jsonl`` and, if there is one, ``run.json`` (configuration, versions,
machine). Runs whose configurations differ in the seed alone are one group: its mean and standard error are shown.
Speed-ups are against the first run's group. What the files do not hold is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from report_plots import FIRST_TIMED_STEP, Group, Row, Run, compute_validation_stderr, draw_plots, take_series
from rich.console import Console
from rich.table import Table

ARM_LABELS = {"cotrain": "co-trained draft", "frozen": "frozen draft", "none": "no draft"}
WINDOW = 5
"""Rows at the start and at the end of a run whose mean stands for "first" and "last"."""

# Fields that name or place a run and change none of its numbers, and the two seeds.
UNGROUPED_FIELDS = (
    "name",
    "seed",
    "learner.debug.seed",
    "resume",
    "checkpoint_every",
    "checkpoint_keep",
    "export_every",
)


@dataclass(frozen=True)
class Figure:
    """The mean of a group's runs and its standard error, NaN for one run."""

    mean: float
    stderr: float = math.nan

    def __str__(self) -> str:
        text = format_number(self.mean)
        if math.isnan(self.stderr):
            return text
        if "e" in text or self.mean.is_integer():
            return f"{text} ± {format_number(self.stderr)}"
        return f"{text} ± {self.stderr:.{len(text.partition('.')[2])}f}"  # as many decimals


@dataclass(frozen=True)
class Column:
    """One line of the summary: a figure of each run.

    Args:
        title: what it is.
        measure: value of a run, None where its rows lack it.
        is_speed_of: the line's speed-up is shown too: "more" where more is faster, "less" where less is.
        validation: index of the validation that the line is of; its standard error is over prompts as well.
    """

    title: str
    measure: Callable[[Run], float | None]
    is_speed_of: str = ""
    validation: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="folder of report.html and the PNGs; default: the first run's")
    parser.add_argument("--title", default="", help="heading of the page; default: the groups' names")
    args = parser.parse_args()
    groups = group_runs([read_run(path) for path in args.runs])
    out = args.out or args.runs[0]
    out.mkdir(parents=True, exist_ok=True)
    path = write_report(groups, out, title=args.title or ", ".join(group.label for group in groups))
    print_summary(groups)
    print(f"report: {path}")


def read_run(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        SystemExit: no metrics there, or none that can be read.
    """
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise SystemExit(f"{metrics} is not there; give the folder of a run")
    # a killed run may have left half a line at the end
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    rows = [add_derived(json.loads(line)) for line in lines]
    if not rows:
        raise SystemExit(f"{metrics} holds no row; the run ended before its first")
    info = path / "run.json"
    return Run(name=path.name, rows=rows, info=json.loads(info.read_text()) if info.is_file() else {})


def add_derived(row: Row) -> Row:
    """Add what follows from a row's own figures: tokens of the step, and tokens per CPU-second of the rollout."""
    rate, seconds, cpu_seconds = (
        row.get(n) for n in ("rollout_tokens_per_s", "seconds/rollout", "seconds/rollout_cpu")
    )
    if rate is not None and seconds is not None:
        row = row | {"rollout_tokens": rate * seconds}
        if cpu_seconds:
            row["rollout_tokens_per_cpu_s"] = rate * seconds / cpu_seconds
    return row


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together whose configurations differ in ``UNGROUPED_FIELDS`` alone, in order of appearance.

    A group bears the name of its arm; where several have the same arm, or one has none, that of its first run.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        fields = {k: v for k, v in flatten(run.info.get("config", {})).items() if k not in UNGROUPED_FIELDS}
        key = json.dumps([fields, run.info["machine"]["ranks"]]) if fields else run.name
        members.setdefault(key, []).append(run)
    arms = [group[0].info.get("arm", "") for group in members.values()]
    groups = []
    for arm, group in zip(arms, members.values(), strict=True):
        label = ARM_LABELS.get(arm, arm) if arm and arms.count(arm) == 1 else group[0].name
        groups.append(Group(label=label, runs=group))
    return groups


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration with one dotted name a field."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        nested = flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        fields |= nested
    return fields


def take_mean(metric: str, part: slice) -> Callable[[Run], float | None]:
    """Return a measure: the mean of a metric over the rows ``part`` of those that have it."""

    def measure(run: Run) -> float | None:
        values = [value for _, value in take_series(run, metric)][part]
        return statistics.fmean(values) if values else None

    return measure


def take_gain(run: Run) -> float | None:
    """Return the last validation's acceptance length with the run's draft minus that with the start draft."""
    own, start = (take_series(run, f"validation_acceptance_length{suffix}") for suffix in ("", "_start_draft"))
    return own[-1][1] - start[-1][1] if own and start else None


def take_max(metric: str) -> Callable[[Run], float | None]:
    """Return a measure: the largest value of a metric."""
    return lambda run: max((value for _, value in take_series(run, metric)), default=None)


def take_ratio(numerator: str, denominator: str) -> Callable[[Run], float | None]:
    """Return a measure: the ratio of two metrics' sums, start-up left out; the number of rows for ``""``."""

    def measure(run: Run) -> float | None:
        names = [name for name in (numerator, denominator) if name]
        rows = [
            row for row in run.rows if row["step"] >= FIRST_TIMED_STEP and all(row.get(n) is not None for n in names)
        ]
        if not rows:
            return None
        return sum(row[numerator] for row in rows) / (
            sum(row[denominator] for row in rows) if denominator else len(rows)
        )

    return measure


FIRST, LAST, ONE, END = slice(0, WINDOW), slice(-WINDOW, None), slice(0, 1), slice(-1, None)
COLUMNS = (
    Column("validation accuracy at the start", take_mean("validation_accuracy", ONE), validation=0),
    Column("validation accuracy at the end", take_mean("validation_accuracy", END), validation=-1),
    Column(f"reward, mean of the last {WINDOW} steps", take_mean("reward", LAST)),
    Column(f"acceptance length in rollouts, first {WINDOW} steps", take_mean("acceptance_length", FIRST)),
    Column(f"acceptance length in rollouts, last {WINDOW} steps", take_mean("acceptance_length", LAST)),
    Column("on the final policy: acceptance length of the run's draft", take_mean("validation_acceptance_length", END)),
    Column(
        "on the same policy: acceptance length of the start draft",
        take_mean("validation_acceptance_length_start_draft", END),
    ),
    Column("on the same policy: gain of the run's draft over the start draft", take_gain),
    Column("largest mismatch KL, nats a token", take_max("mismatch_kl")),
    Column(f"response length, first {WINDOW} steps, tokens", take_mean("response_tokens", FIRST)),
    Column(f"response length, last {WINDOW} steps, tokens", take_mean("response_tokens", LAST)),
    Column("rollout, tokens/s", take_ratio("rollout_tokens", "seconds/rollout"), "more"),
    Column("rollout, tokens per CPU-second", take_ratio("rollout_tokens", "seconds/rollout_cpu"), "more"),
    Column("whole step, seconds", take_ratio("seconds/step", ""), "less"),
    Column("skipped steps of the policy", take_max("skipped/policy")),
    Column("skipped steps of the draft", take_max("skipped/draft")),
)


def combine(values: Sequence[float]) -> Figure:
    """Return the mean of runs and its standard error."""
    if len(values) < 2:
        return Figure(values[0])
    return Figure(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def measure_group(group: Group, column: Column) -> Figure | None:
    """Return a line of the summary for a group; None where no run has it."""
    values = [value for run in group.runs if (value := column.measure(run)) is not None]
    if not values:
        return None
    if column.validation is None:
        return combine(values)
    steps = sorted(step for run in group.runs for step, _ in take_series(run, "validation_accuracy"))
    return Figure(combine(values).mean, compute_validation_stderr(group, steps[column.validation]))


def divide(a: Figure, b: Figure) -> Figure:
    """Return a / b of independent figures; the error to first order."""
    ratio = a.mean / b.mean
    return Figure(ratio, abs(ratio) * math.hypot(a.stderr / a.mean, b.stderr / b.mean))


def summarize(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Return the summary: (title, one text a group) a line; speed-ups stand below what they are of."""
    lines: list[tuple[str, list[str]]] = []
    for column in COLUMNS:
        figures = [measure_group(group, column) for group in groups]
        if all(figure is None for figure in figures):
            continue
        lines.append((column.title, ["" if figure is None else str(figure) for figure in figures]))
        base = figures[0]
        if column.is_speed_of and len(groups) > 1 and base is not None:
            pairs = [(f, base) if column.is_speed_of == "more" else (base, f) for f in figures]
            title = f"speed-up of {column.title.partition(',')[0]} against {groups[0].label}"
            if "CPU" in column.title:
                title += ", by CPU time"
            texts = ["" if a is None or b is None else str(divide(a, b)) for a, b in pairs]
            lines.append((title, ["1", *texts[1:]]))
    return lines


def format_number(value: float) -> str:
    """Return three or four digits that tell runs apart."""
    if not math.isfinite(value):
        return "-"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e4):
        return f"{int(value)}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def describe_runs(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return what is known of each run beside its rows, for the page."""
    described = []
    for group in groups:
        for run in group.runs:
            info = run.info
            facts = {"group": group.label, "last step": run.rows[-1]["step"]}
            facts |= {name: info[name] for name in ("seed", "first_step", "date", "command") if name in info}
            facts |= info.get("versions", {}) | info.get("machine", {})
            described.append({"name": run.name, "facts": facts, "config": flatten(info.get("config", {}))})
    return described


def find_differences(runs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields of the configurations that are not the same in all runs that have one."""
    known = [run["config"] for run in runs if run["config"]]
    names = {name: None for config in known for name in config}
    values = {name: [config.get(name, "") for config in known] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def write_report(groups: Sequence[Group], folder: Path, *, title: str) -> Path:
    """Draw the plots into ``folder``, write ``report.html`` there, and return its path."""
    plots, missing = draw_plots(groups, folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    runs = describe_runs(groups)
    page = environment.get_template("report_template.html").render(
        title=title,
        groups=groups,
        summary=summarize(groups),
        plots=[(plot, base64.b64encode((folder / f"{plot.name}.png").read_bytes()).decode()) for plot in plots],
        missing=missing,
        runs=runs,
        differences=find_differences(runs),
        known_names=[run["name"] for run in runs if run["config"]],
        arms=[group.runs[0].info.get("arm", "") for group in groups],
        window=WINDOW,
        first_timed_step=FIRST_TIMED_STEP,
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def print_summary(groups: Sequence[Group]) -> None:
    """Print the summary as a table."""
    table = Table(title="mean ± standard error; times leave out each run's first step")
    table.add_column("")
    for group in groups:
        table.add_column(f"{group.label}\n{len(group.runs)} run{'s' if len(group.runs) > 1 else ''}", justify="right")
    for title, texts in summarize(groups):
        table.add_row(title, *texts)
    Console(width=70 + 22 * len(groups)).print(table)


if __name__ == "__main__":
    main()
