"""vLLM serves exported policies as they are trained, Qwen3-MoE and Llama 3, at the start and after a refit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specco.rl.engine import Completion, EngineConfig, RolloutEngine, SamplingConfig
from specco.titan.export import named_policy_weights, save_policy
from specco.titan.policy import Policy
from specco.titan.sizes import make_policy_config

VOCAB_SIZE = 64
SIZES = {"num_layers": 3, "dim": 64, "hidden_dim": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
# documents are longer than what the scaling of Llama 3 leaves as it is
SCALING = {"scaling": "llama", "scaling_factor": 4.0, "original_max_position_embeddings": 32}
POLICIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architecture": "qwen3", "num_experts": 4, "top_k": 2},
    "llama3": {"architecture": "llama3", "rope_theta": 10_000.0, "rope_scaling": SCALING},
}


@torch.no_grad()
def compute_largest_error(policy: Policy, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Return the largest difference between what the engine says of its tokens and what the policy does, in nats."""
    errors = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = policy(torch.tensor([prompt + completion.token_ids[:-1]]))
        assert isinstance(logits, Tensor)
        logprobs = logits[0, len(prompt) - 1 :].double().log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        errors.append((torch.tensor(completion.logprobs, dtype=torch.float64) - expected).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", POLICIES)
def test_served_logprobs_are_the_policys_before_and_after_a_refit(name: str, tmp_path) -> None:
    config = make_policy_config(**POLICIES[name], **SIZES, vocab_size=VOCAB_SIZE, max_seq_len=128, init_std=0.15)
    torch.manual_seed(0)
    policy = config.build()
    policy.init_states()
    save_policy(policy, tmp_path / "policy", tokenizer_path=tmp_path, eos_token_id=0)
    prompts = [torch.randint(VOCAB_SIZE, (length,)).tolist() for length in (3, 9, 40, 17)]
    sampling = SamplingConfig(max_tokens=40)
    engine = RolloutEngine(EngineConfig(policy_path=str(tmp_path / "policy"), max_model_len=128, max_num_seqs=8))
    try:
        for version in (0, 1):
            completions = [group[0] for group in engine.generate(prompts, sampling)]
            error = compute_largest_error(policy, prompts, completions)
            print(f"{name} version {version}: {error:.1e} nats")
            assert error < 1e-4
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape))
            assert compute_largest_error(policy, prompts, completions) > 0.1, "another policy says the same"
            engine.refit(policy=named_policy_weights(policy), version=version + 1)
    finally:
        engine.close()
