"""The figures of the TapChannel benchmark: overheads are paired within a round, intervals hold the median."""

import random

import pytest
from bench_tap_channel import VARIANTS, compute_interval, summarize


def test_overheads_are_paired_within_rounds():
    """Rounds differ twofold in speed; each variant is slower than ``none`` by a share of its own, in every round."""
    extra = dict(zip(VARIANTS, (0.0, 0.01, 0.02, 0.03, 0.04), strict=True))
    keys = ("wall_s", "cpu_s", "cpu_sum_s")
    rounds = [{name: dict.fromkeys(keys, scale * (1 + more)) for name, more in extra.items()} for scale in (1, 1.5, 2)]
    results = summarize(rounds)
    for name, more in extra.items():
        assert results[name]["overhead_wall_pct"] == pytest.approx(100 * more)
        assert results[name]["overhead_cpu_sum_interval"] == pytest.approx((100 * more, 100 * more))
        assert results[name]["wall_s"] == pytest.approx(1.5 * (1 + more))


def test_interval_holds_the_median_and_narrows_with_more_values():
    rng = random.Random(0)
    values = [rng.gauss(5, 1) for _ in range(400)]
    few, many = compute_interval(values[:20], rng), compute_interval(values, rng)
    assert few[0] < 5 < few[1] and many[0] < 5.3 and many[1] > 4.7
    assert many[1] - many[0] < (few[1] - few[0]) / 2
