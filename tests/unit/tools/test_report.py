"""The report: figures by hand, any subset of metrics, a page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import math
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import report
from report_plots import Curve, Panel, average_phases, average_runs, compute_validation_stderr, draw_panel, smooth

NUM_STEPS = 12
ARMS = {"none": 0.0, "frozen": 1.0, "cotrain": 2.0}


def make_rows(arm: str, seed: int) -> list[dict[str, Any]]:
    """Return rows whose figures are simple functions of arm, seed and step."""
    level = ARMS[arm]
    rows: list[dict[str, Any]] = []
    for step in range(NUM_STEPS + 1):
        row: dict[str, Any] = {"step": step}
        if step % 6 == 0:
            row |= {"validation_accuracy": 0.2 + 0.05 * step + 0.01 * seed, "validation_accuracy_stderr": 0.03}
            if arm != "none":
                row |= {"validation_acceptance_length": 3 + level / 4}
            if arm == "cotrain":
                row |= {f"validation_acceptance_rate_{k}_start_draft": 0.5 for k in range(2)}
                row |= {"validation_acceptance_length_start_draft": 2.0}
        if step > 0:
            seconds = 9.0 if step == 1 else 1.0 + seed
            row |= {"reward": step / NUM_STEPS, "response_tokens": 30.0 + step, "mismatch_kl": 1e-9 * step}
            row |= {"rollout_tokens_per_s": 100 * (1 + level), "seconds/rollout": seconds, "seconds/learner": 0.5}
            row |= {"seconds/step": seconds + 0.75, "seconds/rollout_cpu": 2 * seconds, "seconds/validation": 4.0}
            row |= {"grad_norm/policy": 0.1, "skipped/policy": 0.0}
            if arm != "none":
                row |= {"acceptance_length": 2 + step / 10, "acceptance_rate_0": 0.9, "acceptance_rate_1": 0.6}
        rows.append(row)
    return rows


def write_run(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """Write a run's folder; without a configuration it gets no run.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config:
        info = {"config": config, "arm": config["arm"], "seed": config["seed"], "date": "2026-01-01"}
        info |= {"versions": {"torch": "2.13.0"}, "machine": {"cpu": "test CPU", "ranks": 2}, "command": "python -m x"}
        (folder / "run.json").write_text(json.dumps(info))
    return folder


def write_arms(folder: Path, seeds: range) -> list[Path]:
    return [
        write_run(folder / f"{arm}{seed}", make_rows(arm, seed), name=f"{arm}{seed}", arm=arm, seed=seed, lr={"a": 1.0})
        for arm in ARMS
        for seed in seeds
    ]


def read_groups(paths: list[Path]) -> list[report.Group]:
    return report.group_runs([report.read_run(path) for path in paths])


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: dict[str, bytes] = {}
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        source = values.get("src") or values.get("href")
        if tag == "img":
            assert source is not None
            kind, _, data = source.partition(",")
            assert kind == "data:image/png;base64"
            self.images[str(values["alt"])] = base64.b64decode(data, validate=True)
        elif source is not None:
            self.links.append(source)


def test_page_is_whole_and_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_arms(tmp_path, range(2))
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, paths), "--title", "<b>arms & seeds</b>"])
    report.main()
    text = (paths[0] / "report.html").read_text()
    page = Page(text)
    assert page.links == [] and "script" not in page.tags
    assert "http://" not in text and "https://" not in text and "url(" not in text
    files = {path.read_bytes() for path in paths[0].glob("*.png")}
    assert len(page.images) == len(files) == 11 and set(page.images.values()) == files
    assert all(data.startswith(b"\x89PNG") for data in files)
    assert "&lt;b&gt;arms &amp; seeds&lt;/b&gt;" in text and "<b>arms" not in text
    for fact in ("test CPU", "2.13.0", "python -m x", "lr.a"):
        assert fact in text
    assert "Not in these files" not in text
    output = capsys.readouterr().out
    assert "no draft" in output and "co-trained draft" in output and "report.html" in output


def test_figures_by_hand(tmp_path: Path) -> None:
    groups = read_groups(write_arms(tmp_path, range(3)))
    assert [group.label for group in groups] == ["no draft", "frozen draft", "co-trained draft"]
    assert [len(group.runs) for group in groups] == [3, 3, 3]
    columns = {column.title: column for column in report.COLUMNS}
    # over seeds .8, .81, .82: their error and that over prompts add up as squares
    figure = report.measure_group(groups[2], columns["validation accuracy at the end"])
    assert figure is not None and figure.mean == pytest.approx(0.81)
    over_seeds = statistics.stdev([0.8, 0.81, 0.82]) / math.sqrt(3)
    assert figure.stderr == pytest.approx(math.hypot(over_seeds, 0.03))
    # the last five of steps 1 to 12 in rollouts: 3.0 to 3.2
    figure = report.measure_group(groups[1], columns["acceptance length in rollouts, last 5 steps"])
    assert figure == report.Figure(pytest.approx(3.0), 0.0)
    # seconds 1, 2, 3 for the seeds, the first step's 9 left out; the rate is one constant
    figure = report.measure_group(groups[0], columns["whole step, seconds"])
    assert figure is not None and figure.mean == pytest.approx(2.75)
    assert figure.stderr == pytest.approx(1 / math.sqrt(3))
    figure = report.measure_group(groups[2], columns["rollout, tokens per CPU-second"])
    assert figure is not None and figure.mean == pytest.approx(150)
    lines = dict(report.summarize(groups))
    assert lines["speed-up of rollout against no draft"] == ["1", "2 ± 0", "3 ± 0"]
    assert lines["on the same policy: gain of the run's draft over the start draft"] == ["", "", "1.500 ± 0.000"]
    assert lines["speed-up of whole step against no draft"][1].startswith("1 ± 0.29")
    assert lines["on the same policy: acceptance length of the start draft"] == ["", "", "2 ± 0"]
    assert lines["largest mismatch KL, nats a token"][0] == "1.2e-08 ± 0"


def test_numbers_and_errors_have_the_same_decimals() -> None:
    cases = {
        (3235.4, 7.236): "3235 ± 7",
        (3.25, 0.0031): "3.250 ± 0.003",
        (2.0, 0.5): "2 ± 0.500",
        (5e-13, 0.0): "5.0e-13 ± 0",
    }
    for (mean, stderr), text in cases.items():
        assert str(report.Figure(mean, stderr)) == text
    assert str(report.Figure(3.25)) == "3.250" and str(report.Figure(math.nan)) == "-"


def test_speedup_of_seconds_is_the_other_way_round(tmp_path: Path) -> None:
    slow, fast = make_rows("none", 3), make_rows("frozen", 0)
    lines = dict(report.summarize(read_groups([write_run(tmp_path / "a", slow), write_run(tmp_path / "b", fast)])))
    assert lines["speed-up of whole step against a"] == ["1", "2.714"]  # 4.75 / 1.75
    assert lines["speed-up of rollout against a, by CPU time"] == ["1", "2"]


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    (group,) = read_groups([write_run(tmp_path / "a", make_rows("none", 0))])
    phases = average_phases(group)
    assert phases == {"rollout": pytest.approx(1.0), "learner": pytest.approx(0.5), "other": pytest.approx(0.25)}


def test_any_subset_of_metrics(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward": 0.5, "draft_loss": None}, {"step": 2, "reward": None, "unknown": 3.0}]
    path = write_run(tmp_path / "a", rows)
    groups = read_groups([path])
    page = report.write_report(groups, tmp_path, title="x").read_text()
    assert list(Page(page).images) == ["Reward"]
    assert "Not in these files" in page and "Rollout speed" in page and "no run.json" in page
    assert dict(report.summarize(groups)) == {"reward, mean of the last 5 steps": ["0.500"]}


def test_plots_of_an_earlier_report_go(tmp_path: Path) -> None:
    """Beside a page without them they would be taken for this report's."""
    groups = read_groups([write_run(tmp_path / "a", [{"step": 1, "response_tokens": 3.0}])])
    for name in ("reward.png", "mine.png"):
        (tmp_path / name).write_bytes(b"old")
    report.write_report(groups, tmp_path, title="x")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["mine.png", "response_length.png"]


def test_last_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", make_rows("none", 0))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    assert report.read_run(path).rows[-1]["step"] == NUM_STEPS


def test_folders_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not there"):
        report.read_run(tmp_path)
    with pytest.raises(SystemExit, match="holds no row"):
        report.read_run(write_run(tmp_path / "a", []))


def test_other_configurations_are_other_groups(tmp_path: Path) -> None:
    rows = make_rows("cotrain", 0)
    first = write_run(tmp_path / "a", rows, name="a", arm="cotrain", seed=0, lr=1.0, resume=False)
    again = write_run(tmp_path / "b", rows, name="b", arm="cotrain", seed=1, lr=1.0, resume=True)
    other = write_run(tmp_path / "c", rows, name="c", arm="cotrain", seed=0, lr=2.0, resume=False)
    groups = read_groups([first, again, other])
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [("a", ["a", "b"]), ("c", ["c"])]
    differences = report.find_differences(report.describe_runs(groups))
    assert differences["lr"] == [1.0, 1.0, 2.0] and "arm" not in differences


def test_band_needs_an_error(tmp_path: Path) -> None:
    """Without a standard error no band is drawn, least of all one over the whole plot."""
    known, unknown = make_rows("none", 0), [{"step": 0, "validation_accuracy": 0.5}]
    panel = Panel("", (Curve("validation_accuracy"),), has_validation_band=True)
    heights = []
    for name, rows in (("a", known), ("b", unknown)):
        figure, ax = plt.subplots()
        draw_panel(ax, panel, read_groups([write_run(tmp_path / name, rows)]))
        points = [y for band in ax.collections for path in band.get_paths() for y in path.vertices[:, 1]]
        heights.append(max(points) - min(points) if points else 0.0)
        plt.close(figure)
    assert heights == [pytest.approx(0.6 + 2 * 1.96 * 0.03), 0.0]


def test_averages(tmp_path: Path) -> None:
    (group,) = read_groups([write_run(tmp_path / "x", make_rows("none", 0))])
    steps, means, errors = average_runs(group, "validation_accuracy")
    assert steps == [0, 6, 12] and means == pytest.approx([0.2, 0.5, 0.8]) and all(map(math.isnan, errors))
    assert compute_validation_stderr(group, 6) == 0.03
    assert smooth([1.0, 2.0, 3.0, 4.0, 10.0, 4.0]) == pytest.approx([2.0, 2.5, 4.0, 4.6, 5.25, 6.0])
