"""Whether sampled tokens follow the policy's exact distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from helpers.engine_models import VOCAB_SIZE, compute_logprobs, sample_stream
from specco.rl.engine import Completion, EngineStats, RolloutEngine, SamplingConfig


def list_tokens(outputs: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in outputs for completion in group]


@dataclass
class SampleTest:
    """How far sampled tokens are from the distributions that they should come from."""

    z: float
    p_value: float
    logprob_errors: Tensor
    stats: EngineStats


def keep_nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Return the logprobs of the fewest most probable tokens with a mass of ``top_p`` or more, -inf for the others."""
    values, order = logprobs.sort(dim=-1, descending=True)
    is_out = values.exp().cumsum(-1) - values.exp() >= top_p
    return logprobs.masked_fill(is_out.scatter(-1, order, is_out), -torch.inf).log_softmax(-1)


def run_sample_test(
    engine: RolloutEngine, policy: Qwen3ForCausalLM, temperature: float, top_p: float = 1.0
) -> SampleTest:
    """Sample 1,024 responses of 24 tokens and compare them with the policy's exact distributions.

    z: sum over tokens of the surprise minus its expectation, over the standard deviation of that sum; tokens are
    dependent, their deviations are a martingale. Chi-square: counts of the vocabulary minus expected counts, under the
    summed covariance; tokens expected fewer than 10 times are pooled.
    """
    prompts = sample_stream(64, 8, seed=5)
    engine.stats()
    sampling = SamplingConfig(n=16, temperature=temperature, top_p=top_p, max_tokens=24, seed=11)
    outputs = engine.generate(prompts.tolist(), sampling)
    stats = engine.stats()
    responses = torch.tensor(list_tokens(outputs))
    logprobs = compute_logprobs(policy, prompts.repeat_interleave(16, 0), responses, temperature).flatten(0, 1)
    logprobs = keep_nucleus(logprobs, top_p)
    picked = logprobs.gather(1, responses.flatten()[:, None]).squeeze(1)
    probs, finite = logprobs.exp(), logprobs.clamp(min=-1e9)
    mean = (probs * finite).sum(1)
    variance = (probs * finite.square()).sum(1) - mean.square()
    z = float((picked - mean).sum() / variance.sum().sqrt())
    expected = probs.sum(0)
    pool = torch.zeros(VOCAB_SIZE, int((expected >= 10).sum()) + 1, dtype=torch.float64)
    pool[torch.arange(VOCAB_SIZE), torch.where(expected >= 10, (expected >= 10).cumsum(0) - 1, pool.shape[1] - 1)] = 1
    pool = pool[:, pool.sum(0) > 0]
    covariance = pool.T @ (torch.diag(expected) - probs.T @ probs) @ pool
    counts = torch.bincount(responses.flatten(), minlength=VOCAB_SIZE).double()
    difference = ((counts - expected) @ pool)[:-1]  # one bin is given by the others
    chi_square = difference @ torch.linalg.solve(covariance[:-1, :-1], difference)
    degrees = torch.tensor(difference.numel() / 2.0, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(degrees, chi_square / 2))
    reported = torch.tensor([c.logprobs for group in outputs for c in group], dtype=torch.float64).flatten()
    return SampleTest(z, p_value, (reported - picked).abs(), stats)
