"""vLLM serves an exported EAGLE-3 draft as it was trained: its greedy drafts are the training network's."""

from __future__ import annotations

import pytest
import torch

from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import iterate_weights, save_draft
from specco.ops.layout import PackedLayout
from specco.packing import pack_documents
from specco.rl.engine import EngineConfig, RolloutEngine, SamplingConfig

VOCAB_SIZE, WIDTH, NUM_LAYERS, NUM_DRAFTED = 64, 64, 8, 4
TARGET_LAYER_IDS = (1, 3, 6)


def make_draft(seed: int, **changes) -> Eagle3Draft:
    config = Eagle3Config(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        target_layer_ids=TARGET_LAYER_IDS,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        ttt_steps=NUM_DRAFTED,
        **changes,
    )
    torch.manual_seed(seed)
    draft = Eagle3Draft(config)
    draft.init_weights()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return draft


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A random Qwen3 policy and its directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = Qwen3ForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("policy")
    model.save_pretrained(directory)
    return model, directory


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


@torch.no_grad()
def draft_with_training_network(draft: Eagle3Draft, policy, context: list[int], drafted: list[int]) -> list[int]:
    """Return the most probable token of each pass at the anchor before the context's last token, fed ``drafted``."""
    ids = torch.tensor(context + drafted)
    (tokens,) = pack_documents([ids], [torch.ones_like(ids, dtype=torch.bool)], max_tokens=ids.numel())
    states = policy(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1][0] for layer in TARGET_LAYER_IDS], dim=-1)
    rows = draft(taps, policy.get_input_embeddings()(ids), tokens, PackedLayout.build(tokens.cu_seqlens))
    logits = draft.lm_head(rows.hidden[rows.branch_ids == len(context) - 2])
    return logits.argmax(-1).tolist()


def check_drafts(engine: RolloutEngine, draft: Eagle3Draft, policy, num_prompts: int) -> int:
    """Compare every drafted token of some generations; return their number."""
    num_checked = 0
    for seed in range(num_prompts):
        prompt = torch.randint(VOCAB_SIZE, (5 + 7 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        response, all_drafted = record_drafts(engine, prompt, num_tokens=40)
        length = 1
        for drafted in all_drafted:
            if length + NUM_DRAFTED > len(response):
                break  # what follows may be drafted for tokens that were cut off
            assert draft_with_training_network(draft, policy, prompt + response[:length], drafted) == drafted
            num_checked += len(drafted)
            num_accepted = 0
            while num_accepted < NUM_DRAFTED and drafted[num_accepted] == response[length + num_accepted]:
                num_accepted += 1
            length += num_accepted + 1
    return num_checked


@pytest.mark.parametrize(
    ("changes", "num_prompts"),
    [
        ({}, 3),
        ({"norm_before_residual": True, "fc_norm": True, "norm_output": True}, 1),
        ({"norm_before_fc": True}, 1),
    ],
    ids=["plain", "residual_fc_norm_output", "norm_before_fc"],
)
def test_greedy_drafts_equal_the_training_networks(policy, tmp_path, changes, num_prompts):
    """As loaded from the exported directory, and after a refit to other weights."""
    model, directory = policy
    draft, other = make_draft(seed=1, **changes), make_draft(seed=2, **changes)
    save_draft(draft, tmp_path)
    engine = RolloutEngine(
        EngineConfig(
            policy_path=str(directory),
            draft_path=str(tmp_path),
            num_speculative_tokens=NUM_DRAFTED,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_bytes=1 << 26,
        )
    )
    try:
        assert check_drafts(engine, draft, model, num_prompts) >= 70 * num_prompts
        engine.refit(version=1, draft=iterate_weights(other))
        assert check_drafts(engine, other, model, num_prompts) >= 70 * num_prompts
    finally:
        engine.close()
