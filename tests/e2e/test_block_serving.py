"""vLLM serves DFlash and DSpark drafts as they were trained: as exported, and after refits of all or of one weight."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_models
from helpers.acceptance_test import run_acceptance_test
from helpers.sample_test import run_sample_test
from helpers.served_drafts import VOCAB_SIZE, WIDTH, PredictFn, check_drafts, make_policy
from torch import Tensor
from transformers import Qwen3ForCausalLM

from specco.drafts.block import BlockConfig, BlockDraft
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.export import iterate_weights, save_draft
from specco.drafts.registry import build_draft
from specco.ops.layout import PackedLayout
from specco.packing import pack_documents
from specco.rl.engine import EngineConfig, RolloutEngine, SamplingConfig

NUM_LAYERS, MASK_ID = 6, 63
TARGET_LAYER_IDS = (1, 3, 4)
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "target_layer_ids": TARGET_LAYER_IDS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_hidden_layers": 3,
    "mask_token_id": MASK_ID,
    "num_anchors": 10_000,
}
SLIDING = {"layer_types": ("sliding_attention",) * 3, "sliding_window": 7}
CONFIGS: dict[str, BlockConfig] = {
    "dflash": DFlashConfig(**SHAPE, block_size=5),
    "dflash_sliding": DFlashConfig(**SHAPE, **SLIDING, block_size=5),
    "dspark": DSparkConfig(**SHAPE, block_size=4, markov_rank=16),
    "dspark_sliding": DSparkConfig(**SHAPE, **SLIDING, block_size=4, markov_rank=16),
    "dspark_no_confidence": DSparkConfig(**SHAPE, block_size=1, markov_rank=16, confidence_weight=0.0),
}


def make_draft(config: BlockConfig, seed: int) -> BlockDraft:
    """Return a draft whose every weight matters, norms and Markov head included."""
    torch.manual_seed(seed)
    draft = build_draft(config)
    draft.init_weights()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif name == "markov_head.markov_w2.weight":
                parameter.normal_(std=0.5)
    assert isinstance(draft, BlockDraft)
    return draft


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> tuple[Qwen3ForCausalLM, Path]:
    """A random Qwen3 policy and its directory."""
    directory = tmp_path_factory.mktemp("policy")
    return make_policy(directory, NUM_LAYERS), directory


def build_engine(policy: tuple[Qwen3ForCausalLM, Path], draft: BlockDraft, path: Path) -> RolloutEngine:
    save_draft(draft, path)
    return RolloutEngine(
        EngineConfig(
            policy_path=str(policy[1]),
            draft_path=str(path),
            method=draft.config.method,
            num_speculative_tokens=draft.num_slots,
            max_model_len=256,
            max_num_seqs=64,
            kv_cache_bytes=1 << 26,
        )
    )


def make_predict_fn(draft: BlockDraft, model: Qwen3ForCausalLM) -> PredictFn:
    """Return what the training network predicts in the block at the context's last token."""
    return partial(predict_with_training_network, draft, model)


@torch.no_grad()
def predict_with_training_network(
    draft: BlockDraft, model: Qwen3ForCausalLM, context: list[int], drafted: list[int]
) -> list[int]:
    ids = torch.tensor(context + drafted)
    anchor = len(context) - 1
    (tokens,) = pack_documents([ids], [torch.arange(ids.numel()) >= anchor], max_tokens=ids.numel())
    states = model(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1][0] for layer in draft.target_layer_ids], dim=-1)
    embedding: Tensor = model.get_input_embeddings().weight
    layout = PackedLayout.build(tokens.cu_seqlens)
    rows = draft(taps, embedding[ids], tokens, layout, None, embedding[MASK_ID])
    logits = draft.compute_logits(rows, model.lm_head.weight)[rows.branch_ids == anchor]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_drafts_equal_the_training_networks(policy, tmp_path, name):
    """As loaded from the exported directory, and after a refit to other weights."""
    draft, other = make_draft(CONFIGS[name], seed=1), make_draft(CONFIGS[name], seed=2)
    num_prompts = 3 if name in ("dflash", "dspark") else 1
    least = 70 * num_prompts if draft.num_slots > 1 else 30
    engine = build_engine(policy, draft, tmp_path)
    try:
        assert check_drafts(engine, make_predict_fn(draft, policy[0]), num_prompts)[0] >= least
        engine.refit(version=1, draft=iterate_weights(other))
        assert check_drafts(engine, make_predict_fn(other, policy[0]), num_prompts)[0] >= least
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_refit_of_one_weight_changes_the_served_drafts(policy, tmp_path, name):
    """Keys of the context are kept in buffers of vLLM's own: a refit must reach them, too, and not the policy."""
    model, _ = policy
    draft, other = make_draft(CONFIGS[name], seed=1), make_draft(CONFIGS[name], seed=2)
    changed = ["layers.1.self_attn.k_proj.weight", "layers.2.self_attn.k_norm.weight", "hidden_norm.weight"]
    changed += ["markov_head.markov_w2.weight"] if name == "dspark" else []
    engine = build_engine(policy, draft, tmp_path)
    try:
        _, before = check_drafts(engine, make_predict_fn(draft, model), num_prompts=1)
        response = engine.generate([[1, 2, 3]], SamplingConfig(temperature=0.0, max_tokens=24))
        for weight in changed:
            mixed = make_draft(CONFIGS[name], seed=1)
            mixed.get_parameter(weight).data.copy_(3 * other.get_parameter(weight))
            engine.refit(version=1, draft=iterate_weights(mixed))
            _, after = check_drafts(engine, make_predict_fn(mixed, model), num_prompts=1)
            assert after != before, weight
            outputs = engine.generate([[1, 2, 3]], SamplingConfig(temperature=0.0, max_tokens=24))
            assert outputs[0][0].token_ids == response[0][0].token_ids
        assert name != "dspark" or engine._draft.model.confidence_head is not None, "a refit dropped the head"
    finally:
        engine.close()


@pytest.fixture(scope="module")
def trained_policy(tmp_path_factory) -> tuple[Qwen3ForCausalLM, Path]:
    """A policy that learnt a stream, so that a draft can half follow it."""
    directory = tmp_path_factory.mktemp("trained_policy")
    model = engine_models.train_policy(num_steps=100)
    model.save_pretrained(directory)
    return model, directory


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_trained_draft_is_served_as_trained(trained_policy, tmp_path, method):
    """Lossless, accepted as often as the training network says, and its greedy drafts that network's; also refitted.

    Drafts are accepted in part; tokens of a wrong distribution would show in either statistic of the samples.
    """
    blocks: dict[str, Any] = {"num_hidden_layers": 2, "mask_token_id": MASK_ID, "num_anchors": 8}
    if method == "dflash":
        draft = make_draft(DFlashConfig(**engine_models.SHAPE, **blocks, block_size=4), seed=1)
    else:
        draft = make_draft(DSparkConfig(**engine_models.SHAPE, **blocks, block_size=3, markov_rank=16), seed=1)
    model, _ = trained_policy
    engine_models.train_draft(draft, model, num_steps=200)
    engine = build_engine(trained_policy, draft, tmp_path)
    try:
        for temperature, top_p in ((1.0, 1.0), (0.7, 0.9)):
            result = run_sample_test(engine, model, temperature, top_p)
            acceptance = result.stats.num_accepted_tokens / result.stats.num_draft_tokens
            print(f"{method} T={temperature} top_p={top_p}: z={result.z:.2f} p={result.p_value:.3f} {acceptance=:.3f}")
            assert 0.1 < acceptance < 0.9
            assert abs(result.z) < 4
            assert result.p_value > 1e-4
        accepted = run_acceptance_test(engine, draft, model)
        print(f"{method}: served {accepted.rates}, expected {accepted.expected}, z={accepted.z}")
        assert accepted.num_verifications > 5000
        assert float(accepted.z.abs().max()) < 3
        assert check_drafts(engine, make_predict_fn(draft, model), num_prompts=7)[0] >= 200
        engine_models.train_draft(draft, model, num_steps=50)
        engine.refit(version=1, draft=iterate_weights(draft))
        assert check_drafts(engine, make_predict_fn(draft, model), num_prompts=7)[0] >= 200
    finally:
        engine.close()
