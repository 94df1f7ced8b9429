"""The plots of the report: which curves of which metric, and how they are drawn. One PNG a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
SMOOTH = 5
"""Steps of the running mean that noisy curves get; the curve itself stays, pale."""
FIRST_TIMED_STEP = 2
"""The first step pays for allocations and caches, so times begin with the next."""
NORMAL_95 = 1.96
NOT_A_PHASE = ("seconds/step", "seconds/rollout_cpu", "seconds/validation")


@dataclass(frozen=True)
class Run:
    """Rows of metrics.jsonl, and run.json or an empty dict."""

    name: str
    rows: list[Row]
    info: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    label: str
    runs: list[Run]


@dataclass(frozen=True)
class Curve:
    """One metric, drawn for each group."""

    metric: str
    label: str = ""
    style: str = "-"
    is_smooth: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    unit: str
    curves: tuple[Curve, ...]
    title: str = ""
    is_log: bool = False
    has_validation_band: bool = False


@dataclass(frozen=True)
class Plot:
    """One figure: its file is ``NAME.png``."""

    name: str
    title: str
    explanation: str
    panels: tuple[Panel, ...] = field(default=())


def take_series(run: Run, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of the rows that have the metric as a finite number."""
    return [(row["step"], row[metric]) for row in run.rows if row.get(metric) is not None]


def average_runs(group: Group, metric: str) -> tuple[list[int], list[float], list[float]]:
    """Return steps, the mean over the group's runs and its standard error (NaN where one run alone has the step)."""
    by_step: dict[int, list[float]] = {}
    for run in group.runs:
        for step, value in take_series(run, metric):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    errors = [
        statistics.stdev(by_step[s]) / math.sqrt(len(by_step[s])) if len(by_step[s]) > 1 else math.nan for s in steps
    ]
    return steps, [statistics.fmean(by_step[s]) for s in steps], errors


def compute_validation_stderr(group: Group, step: int) -> float:
    """Return the standard error of a validation over prompts and, with several runs, over seeds.

    All runs validate on the same prompts, whose error therefore does not shrink with the number of runs: variances over
    seeds and over prompts add up. NaN where neither is known.
    """
    steps, _, over_seeds = average_runs(group, "validation_accuracy")
    prompt_steps, over_prompts, _ = average_runs(group, "validation_accuracy_stderr")
    errors = [dict(zip(steps, over_seeds, strict=True)).get(step, math.nan)]
    errors.append(dict(zip(prompt_steps, over_prompts, strict=True)).get(step, math.nan))
    known = [error for error in errors if not math.isnan(error)]
    return math.hypot(*known) if known else math.nan


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over ``SMOOTH`` values, fewer at both ends."""
    half = SMOOTH // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


TASK_PLOTS = (
    Plot(
        "validation_accuracy",
        "Validation accuracy",
        "Share of right answers to a fixed set of prompts that training never uses; the band is the 95% confidence "
        "interval over prompts (and seeds, where there are several): it should be the same whatever the draft, "
        "because the draft must not change what the policy learns.",
        (Panel("share right", (Curve("validation_accuracy"),), has_validation_band=True),),
    ),
    Plot(
        "reward",
        "Reward",
        "Mean reward of the responses that each step trains on (pale), and its running mean over "
        f"{SMOOTH} steps: training works when it rises.",
        (Panel("mean reward", (Curve("reward", is_smooth=True),)),),
    ),
)
ACCEPTANCE_PLOTS = (
    Plot(
        "acceptance_length",
        "Acceptance length in rollouts",
        "Tokens that the policy gains per check of a draft, its own token included, as the serving engine counted "
        "them (1: the draft is useless); the dotted line is an estimate made in training, without the engine, "
        "biased low.",
        (
            Panel(
                "tokens per check",
                (
                    Curve("acceptance_length", "engine", is_smooth=True),
                    Curve("acceptance_length_estimate", "training-side estimate", ":"),
                ),
            ),
        ),
    ),
    Plot(
        "acceptance_same_policy",
        "Both drafts on the same policy",
        "At each validation the engine serves the run's draft (solid) and then the draft that the run started from "
        "(dashed) on one and the same policy: the gap between them is what training the draft along is worth.",
        (
            Panel(
                "tokens per check",
                (
                    Curve("validation_acceptance_length", "the run's draft"),
                    Curve("validation_acceptance_length_start_draft", "start draft", "--"),
                ),
            ),
        ),
    ),
)
PHASES = Plot(
    "phases",
    "Where a step's time goes",
    "Mean seconds of a training step by phase, its first step left out: speculation can only shorten the rollout, and "
    "training a draft lengthens the learner's part.",
)
SPEEDUPS = Plot(
    "speedups",
    "Speed-up against the first group",
    "How many times faster the rollout and the whole training step are than the first group's at the same step "
    f"(running mean over {SMOOTH} steps): above 1 is faster.",
)
SPEED_PLOTS = (
    Plot(
        "rollout_speed",
        "Rollout speed",
        "Tokens that all engines together wrote per second of wall time, and per second of processor time, which "
        "other programs on the machine disturb less: higher is faster.",
        (
            Panel("tokens/s", (Curve("rollout_tokens_per_s", is_smooth=True),), "by the clock"),
            Panel("tokens per CPU-second", (Curve("rollout_tokens_per_cpu_s", is_smooth=True),), "by CPU time"),
        ),
    ),
    SPEEDUPS,
    PHASES,
    Plot(
        "response_length",
        "Response length",
        "Mean number of tokens of a response: longer ones cost more rollout time at the same speed.",
        (Panel("tokens", (Curve("response_tokens", is_smooth=True),)),),
    ),
)
STABILITY_PLOTS = (
    Plot(
        "mismatch_kl",
        "Mismatch between trainer and engine",
        "Estimated divergence between the probabilities that the engine sampled with and those that the trainer "
        "computes for the same tokens: it should stay near zero, else the policy is trained on data that are not "
        "its own.",
        (Panel("KL, nats a token", (Curve("mismatch_kl"),), is_log=True),),
    ),
    Plot(
        "gradient_norms",
        "Gradient norms",
        "Length of the gradients of policy and draft before clipping: spikes show where training is unstable.",
        (
            Panel("norm", (Curve("grad_norm/policy"),), "policy", is_log=True),
            Panel("", (Curve("grad_norm/draft"),), "draft", is_log=True),
        ),
    ),
)


def make_plots(groups: Sequence[Group]) -> list[Plot]:
    """Return the line plots, from the top of the page on."""
    return [*TASK_PLOTS, *ACCEPTANCE_PLOTS, make_position_plot(groups), *SPEED_PLOTS, *STABILITY_PLOTS]


def make_position_plot(groups: Sequence[Group]) -> Plot:
    """Return the plot with a panel for each draft position that the rows have."""
    names = {name for group in groups for run in group.runs for row in run.rows for name in row}
    num_positions = sum(1 for name in names if name.removeprefix("acceptance_rate_").isdigit())
    panels = tuple(
        Panel(
            "share of checks" if k == 0 else "",
            (
                Curve(f"acceptance_rate_{k}", "in rollouts", is_smooth=True),
                Curve(f"validation_acceptance_rate_{k}_start_draft", "start draft, same policy", "--"),
            ),
            f"draft token {k + 1}",
        )
        for k in range(num_positions)
    )
    return Plot(
        "acceptance_per_position",
        "Acceptance by position",
        "Share of checks in which the engine accepted the draft's first, second, ... token (and so all before it); "
        "later tokens are harder.",
        panels,
    )


def draw_plots(groups: Sequence[Group], folder: Path) -> tuple[list[Plot], list[str]]:
    """Draw every plot that the rows have something for, as PNG files in ``folder``.

    Returns:
        The plots that were drawn, and the titles of those for which no run has a figure.
    """
    drawn, missing = [], []
    draw_fns = {PHASES.name: draw_phases, SPEEDUPS.name: draw_speedups}
    for plot in make_plots(groups):
        draw_fn = draw_fns.get(plot.name)
        path = folder / f"{plot.name}.png"
        is_drawn = draw_lines(plot, groups, path) if draw_fn is None else draw_fn(groups, path)
        if is_drawn:
            drawn.append(plot)
        else:
            missing.append(plot.title)
            path.unlink(missing_ok=True)  # an earlier report's
    return drawn, missing


def draw_lines(plot: Plot, groups: Sequence[Group], path: Path) -> bool:
    """Draw the panels that some run has a figure for; False where none has."""
    panels = [panel for panel in plot.panels if any(has_metric(groups, curve.metric) for curve in panel.curves)]
    if not panels:
        return False
    figure, axes = make_figure(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        draw_panel(ax, panel, groups)
    save(figure, axes, path)
    return True


def has_metric(groups: Sequence[Group], metric: str) -> bool:
    return any(take_series(run, metric) for group in groups for run in group.runs)


def make_figure(num_panels: int) -> tuple[Any, list[Axes]]:
    """Return a figure with panels side by side."""
    figure, axes = plt.subplots(1, num_panels, figsize=(8 if num_panels < 3 else 3.4 * num_panels, 3.6), squeeze=False)
    return figure, list(axes[0])


def draw_panel(ax: Axes, panel: Panel, groups: Sequence[Group]) -> None:
    """Draw each curve for each group: the group gives the colour, the curve the line style."""
    labels = [curve.label for curve in panel.curves if has_metric(groups, curve.metric)]
    for color, group in zip(cycle_colors(len(groups)), groups, strict=True):
        for curve in panel.curves:
            steps, means, errors = average_runs(group, curve.metric)
            if not steps:
                continue
            label = f"{group.label}: {curve.label}" if len(labels) > 1 else group.label
            marker = "o" if len(steps) < 15 else None
            is_smooth = curve.is_smooth and len(steps) > 2 * SMOOTH
            if is_smooth:
                ax.plot(steps, means, color=color, alpha=0.25, linewidth=1)
                means, errors = smooth(means), smooth(errors)
            ax.plot(steps, means, curve.style, color=color, label=label, marker=marker, markersize=3.5)
            if panel.has_validation_band:
                errors = [NORMAL_95 * compute_validation_stderr(group, step) for step in steps]
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            ax.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    if panel.is_log:
        ax.set_yscale("log")
    ax.set_title(panel.title, fontsize=10)
    ax.set_ylabel(panel.unit)
    ax.set_xlabel("training step")


def draw_speedups(groups: Sequence[Group], path: Path) -> bool:
    """Draw rates of each group over those of the first; False where there is nothing to compare."""
    panels = [
        ("rollout_tokens_per_s", "rollout, by the clock", 1),
        ("rollout_tokens_per_cpu_s", "rollout, by CPU time", 1),
        ("seconds/step", "whole step, by the clock", -1),
    ]
    panels = [panel for panel in panels if has_metric(groups[:1], panel[0]) and has_metric(groups[1:], panel[0])]
    if not panels:
        return False
    figure, axes = make_figure(len(panels))
    for ax, (metric, title, sign) in zip(axes, panels, strict=True):
        base = dict(zip(*average_smoothly(groups[0], metric), strict=True))
        for color, group in zip(cycle_colors(len(groups)), groups, strict=True):
            pairs = [(s, v) for s, v in zip(*average_smoothly(group, metric), strict=True) if s in base]
            if pairs:
                ratios = [(value / base[step]) ** sign for step, value in pairs]
                ax.plot([step for step, _ in pairs], ratios, color=color, label=group.label)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("training step")
    axes[0].set_ylabel("times as fast")
    save(figure, axes, path)
    return True


def average_smoothly(group: Group, metric: str) -> tuple[list[int], list[float]]:
    """Return steps and running mean of a metric, start-up left out."""
    steps, means, _ = average_runs(group, metric)
    kept = [(step, mean) for step, mean in zip(steps, means, strict=True) if step >= FIRST_TIMED_STEP]
    return [step for step, _ in kept], smooth([mean for _, mean in kept])


def average_phases(group: Group) -> dict[str, float]:
    """Return mean seconds a step by phase; "other" is what no phase accounts for."""
    rows = [r for run in group.runs for r in run.rows if r["step"] >= FIRST_TIMED_STEP and r.get("seconds/step")]
    if not rows:
        return {}
    names = {name: None for row in rows for name in row if name.startswith("seconds/") and name not in NOT_A_PHASE}
    phases = {n.removeprefix("seconds/"): sum(r.get(n) or 0.0 for r in rows) / len(rows) for n in names}
    whole = sum(row["seconds/step"] for row in rows) / len(rows)
    return phases | {"other": max(whole - sum(phases.values()), 0.0)}


def draw_phases(groups: Sequence[Group], path: Path) -> bool:
    """Draw one bar a group, stacked by phase; False where no run has a step's time."""
    by_group = [(group.label, phases) for group in groups if (phases := average_phases(group))]
    if not by_group:
        return False
    figure, ax = plt.subplots(figsize=(8, 1.6 + 0.5 * len(by_group)))
    names = list({name: None for _, phases in by_group for name in phases})
    labels = [label for label, _ in by_group]
    left = [0.0] * len(by_group)
    for color, name in zip(cycle_colors(len(names)), names, strict=True):
        widths = [phases.get(name, 0.0) for _, phases in by_group]
        bars = ax.barh(range(len(labels)), widths, left=left, color=color, label=name, height=0.6)
        shown = [f"{w:.2f}" if w > 0.06 * max(sum(p.values()) for _, p in by_group) else "" for w in widths]
        ax.bar_label(bars, labels=shown, label_type="center", color="white", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("seconds a step")
    save(figure, [ax], path)
    return True


def cycle_colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def save(figure: Any, axes: Sequence[Axes], path: Path) -> None:
    """Add grid and one legend below, write the file."""
    handles: dict[str, Any] = {}
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = 2 if len(handles) > 3 else len(handles)
    figure.tight_layout()
    figure.legend(
        handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=columns, frameon=False
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
