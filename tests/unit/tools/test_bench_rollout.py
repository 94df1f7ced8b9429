"""The arithmetic of the rollout benchmark: paired speed-ups, and what they mean for a whole step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from bench_rollout import estimate_step
from rollout_timing import bootstrap_interval, summarize


def make_round(rate: float, num_drafts: int = 0, num_accepted_tokens: int = 0) -> dict[str, float]:
    counts = {"tokens": 100, "num_drafts": num_drafts, "num_accepted_tokens": num_accepted_tokens}
    return {"tokens_per_s": rate, "tokens_per_cpu_s": rate * 2, **counts}


def test_speedups_are_paired_by_round() -> None:
    """A machine that slows down between rounds changes rates, not ratios."""
    plain = [make_round(rate) for rate in (100, 50, 10)]
    rounds = [make_round(rate, 10, 20 + i) for i, rate in enumerate((150, 80, 14))]
    result = summarize(3, 16, rounds, plain)
    assert result["tokens_per_s"] == 80 and result["speedup"] == result["cpu_speedup"] == pytest.approx(1.5)
    assert result["cpu_speedup_interval"] == [pytest.approx(1.4), pytest.approx(1.6)]
    assert result["acceptance_length"] == pytest.approx(1 + 63 / 30)
    assert result["check_cost"] == pytest.approx(3.1 / 1.5)
    result = summarize(0, 16, plain, plain)
    assert result["acceptance_length"] is None and result["speedup"] == 1


def test_interval_narrows_with_equal_values() -> None:
    assert bootstrap_interval([2.0] * 5) == [2.0, 2.0]
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0] * 10)
    assert 2 <= low < 3 < high <= 4


@pytest.mark.parametrize(
    ("speedup", "step_speedup", "pays_from"),
    [
        (2.0, 8 / 6.5, 3.0),  # 1.5 s dearer without the rollout, of which half is saved
        (1.25, 8 / 8.3, 7.5),
        (0.8, 8 / 11, None),
    ],
)
def test_whole_step(speedup: float, step_speedup: float, pays_from: float | None) -> None:
    result: dict[str, Any] = {"batch": 16, "k": 3, "cpu_speedup": speedup}
    plain = {"rollout": 6.0, "learner": 1.5, "refit": 0.5}
    drafted = {"rollout": 4.0, "learner": 2.5, "refit": 0.75, "other": 0.25}
    estimate = estimate_step(result, plain, drafted)
    assert estimate["draft_seconds"] == pytest.approx(1.5)
    assert estimate["rollout_share"] == pytest.approx(0.75)
    assert estimate["step_speedup"] == pytest.approx(step_speedup)
    assert estimate["rollout_seconds_to_pay"] == (None if pays_from is None else pytest.approx(pays_from))
    if pays_from is not None:  # at that rollout time the step is as long as without
        even = estimate_step(result, plain | {"rollout": pays_from}, drafted)
        assert even["step_speedup"] == pytest.approx(1.0)
