"""vLLM serves an exported EAGLE-3 draft as it was trained: its greedy drafts are the training network's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.served_drafts import VOCAB_SIZE, WIDTH, check_drafts, make_policy

from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import iterate_weights, save_draft
from specco.drafts.vocab import compute_target_ids
from specco.ops.layout import PackedLayout
from specco.packing import pack_documents
from specco.rl.engine import EngineConfig, RolloutEngine

NUM_LAYERS, NUM_DRAFTED = 8, 4
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
    if draft.d2t is not None:
        draft.set_vocabulary(torch.arange(1, VOCAB_SIZE, 2))
    return draft


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A random Qwen3 policy and its directory."""
    directory = tmp_path_factory.mktemp("policy")
    return make_policy(directory, NUM_LAYERS), directory


@torch.no_grad()
def draft_with_training_network(draft: Eagle3Draft, policy, context: list[int], drafted: list[int]) -> list[int]:
    """Return the most probable token of each pass at the anchor before the context's last token, fed ``drafted``."""
    ids = torch.tensor(context + drafted)
    (tokens,) = pack_documents([ids], [torch.ones_like(ids, dtype=torch.bool)], max_tokens=ids.numel())
    states = policy(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1][0] for layer in TARGET_LAYER_IDS], dim=-1)
    rows = draft(taps, policy.get_input_embeddings()(ids), tokens, PackedLayout.build(tokens.cu_seqlens))
    best = draft.lm_head(rows.hidden[rows.branch_ids == len(context) - 2]).argmax(-1)
    return (best if draft.d2t is None else compute_target_ids(draft.d2t)[best]).tolist()


@pytest.mark.parametrize(
    ("changes", "num_prompts"),
    [
        ({}, 3),
        ({"norm_before_residual": True, "fc_norm": True, "norm_output": True}, 1),
        ({"norm_before_fc": True}, 1),
        ({"draft_vocab_size": VOCAB_SIZE // 2}, 1),
    ],
    ids=["plain", "residual_fc_norm_output", "norm_before_fc", "reduced_vocabulary"],
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
        num_checked, _ = check_drafts(engine, partial(draft_with_training_network, draft, model), num_prompts)
        assert num_checked >= 70 * num_prompts
        engine.refit(version=1, draft=iterate_weights(other))
        num_checked, _ = check_drafts(engine, partial(draft_with_training_network, other, model), num_prompts)
        assert num_checked >= 70 * num_prompts
    finally:
        engine.close()
