"""What an engine drafts, beside what the training network would: token by token, at temperature 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from specco.rl.engine import RolloutEngine, SamplingConfig

VOCAB_SIZE, WIDTH = 64, 64

PredictFn = Callable[[list[int], list[int]], list[int]]
"""(context with the token sampled last, tokens drafted after it) -> most probable token of each prediction."""


def make_policy(directory: Path, num_layers: int) -> Qwen3ForCausalLM:
    """Return a random Qwen3 policy, saved in ``directory``."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def record_drafts(engine: RolloutEngine, prompt: list[int], num_tokens: int) -> tuple[list[int], list[list[int]]]:
    """Generate greedily; return the response and what the engine drafted at each verification."""
    drafted: list[list[int]] = []

    def watch(worker) -> None:
        drafter = worker.model_runner.drafter
        propose = type(drafter).propose

        def propose_recorded(*args, **kwargs):
            ids = propose(drafter, *args, **kwargs)
            drafted.append(ids[0].tolist())
            return ids

        drafter.propose = propose_recorded

    engine._engine.collective_rpc(watch)
    ((completion,),) = engine.generate([prompt], SamplingConfig(temperature=0.0, max_tokens=num_tokens))
    return completion.token_ids, drafted


def check_drafts(engine: RolloutEngine, predict_fn: PredictFn, num_prompts: int) -> tuple[int, list[list[int]]]:
    """Compare every drafted token of some generations; return their number and what was drafted."""
    num_checked, seen = 0, []
    for seed in range(num_prompts):
        prompt = torch.randint(VOCAB_SIZE, (5 + 7 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        response, all_drafted = record_drafts(engine, prompt, num_tokens=40)
        length = 1
        for drafted in all_drafted:
            if length + len(drafted) > len(response):
                break  # what follows may be drafted for tokens that were cut off
            assert predict_fn(prompt + response[:length], drafted) == drafted
            num_checked += len(drafted)
            num_accepted = 0
            while num_accepted < len(drafted) and drafted[num_accepted] == response[length + num_accepted]:
                num_accepted += 1
            length += num_accepted + 1
        seen += all_drafted
    return num_checked, seen
