"""Engines with and without a draft that take turns in one process: their rollouts' speed and acceptance.

Rates are medians over rounds; speed-ups are medians of the ratios to the plain engine's rate in the same round, with a
95% bootstrap interval: a machine that slows down between rounds changes rates, not ratios.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from specco.drafts.load import read_draft_config
from specco.rl.engine import Completion, EngineConfig, RolloutEngine, SamplingConfig

PLAIN = 0
"""The number of draft tokens of the engine without a draft."""
BOOTSTRAP = 2000

Batch = tuple[list[list[int]], SamplingConfig]
"""(prompts, how they are sampled)."""


def build_engines(
    policy: str,
    draft: str,
    num_draft_tokens: Sequence[int],
    *,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_bytes: int,
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic",
) -> dict[int, RolloutEngine]:
    """Return engines by their number of draft tokens, the plain one first.

    Args:
        policy: directory of the policy.
        draft: directory of the draft, of any family.
        num_draft_tokens: of the engines that speculate.
        max_model_len: see ``EngineConfig``, as for the others.
        max_num_seqs: sequences decoded together.
        kv_cache_bytes: of each engine.
        draft_sample_method: "probabilistic" or "greedy".
    """
    method = read_draft_config(draft).method
    return {
        k: RolloutEngine(
            EngineConfig(
                policy_path=policy,
                draft_path=None if k == PLAIN else draft,
                method=method,
                num_speculative_tokens=max(k, 1),
                draft_sample_method=draft_sample_method,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_bytes=kv_cache_bytes,
            )
        )
        for k in (PLAIN, *num_draft_tokens)
    }


def time_rollout(engine: RolloutEngine, batch: Batch) -> tuple[dict[str, Any], list[list[Completion]]]:
    """Roll out one batch; return rates and counts, and what was sampled."""
    prompts, sampling = batch
    engine.stats()
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, sampling)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    stats = engine.stats()
    figures = {
        "tokens": stats.num_generated_tokens,
        "tokens_per_s": stats.num_generated_tokens / seconds,
        "tokens_per_cpu_s": stats.num_generated_tokens / cpu_seconds,
        "num_drafts": stats.num_drafts,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
    }
    return figures, outputs


def take_turns(
    engines: dict[int, RolloutEngine],
    num_rounds: int,
    make_batch: Callable[[int], Batch],
    watch: Callable[[int, int, list[list[Completion]]], None] | None = None,
) -> dict[int, list[dict[str, Any]]]:
    """Let every engine roll out the batch of each round, in an order that turns from round to round.

    Args:
        engines: by their number of draft tokens.
        num_rounds: that count; one of warm-up, round 0, comes before them.
        make_batch: of a round.
        watch: called with (round, number of draft tokens, what was sampled).

    Returns:
        Figures of the rounds that count, by engine.
    """
    order = list(engines)
    rounds: dict[int, list[dict[str, Any]]] = {k: [] for k in order}
    for index in range(num_rounds + 1):
        start = index % len(order)
        for k in order[start:] + order[:start]:
            figures, outputs = time_rollout(engines[k], make_batch(index))
            if watch is not None:
                watch(index, k, outputs)
            if index > 0:
                rounds[k].append(figures)
    return rounds


def summarize(k: int, batch: int, rounds: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the rates, and of their ratios to the plain engine's round by round.

    Args:
        k: draft tokens of the engine.
        batch: sequences of a round.
        rounds: of the engine.
        plain: rounds of the plain engine.
    """
    drafts = sum(r["num_drafts"] for r in rounds)
    result: dict[str, Any] = {"batch": batch, "k": k, "tokens": sum(r["tokens"] for r in rounds)}
    result["acceptance_length"] = 1 + sum(r["num_accepted_tokens"] for r in rounds) / drafts if drafts else None
    for name, speedup in (("tokens_per_s", "speedup"), ("tokens_per_cpu_s", "cpu_speedup")):
        result[name] = statistics.median(r[name] for r in rounds)
        ratios = [r[name] / p[name] for r, p in zip(rounds, plain, strict=True)]
        result[speedup] = statistics.median(ratios)
        result[f"{speedup}_interval"] = bootstrap_interval(ratios)
    if drafts:
        result["check_cost"] = result["acceptance_length"] / result["cpu_speedup"]
    return result


def bootstrap_interval(values: Sequence[float]) -> list[float]:
    """Return the 95% interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAP))
    return [medians[round(0.025 * (BOOTSTRAP - 1))], medians[round(0.975 * (BOOTSTRAP - 1))]]


def write_results(report: dict[str, Any], path: Path | None) -> None:
    """Write a report as JSON and say where; None: nowhere."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {path}")
