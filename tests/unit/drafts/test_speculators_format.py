"""Checkpoints as speculators writes them: nested config, keys at transformers' defaults left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_cases import (
    change_config,
    change_weights,
    make_config,
    make_dflash_config,
    make_document,
    make_draft,
    make_dspark_config,
    make_embedding_table,
    run_draft,
)

from specco.drafts.base import DraftConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.export import build_config, save_draft
from specco.drafts.load import load_draft, read_draft_config

BLOCK_KEYS: dict[str, Any] = {"aux_hidden_state_layer_ids": [2, 4, 7], "block_size": 4, "mask_token_id": 10}
KEYS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 6,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
        "embed_requires_grad": False,
    },
    "dflash": {"architectures": ["DFlashSpeculator"], "sample_from_anchor": False, **BLOCK_KEYS},
    "dspark": {
        "architectures": ["DSparkSpeculator"],
        "sample_from_anchor": True,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **BLOCK_KEYS,
    },
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
CONFIGS: dict[str, DraftConfig] = {
    "eagle3": make_config(draft_vocab_size=6, norm_before_residual=True, loss_decay=1.0, max_position_embeddings=2048),
    "dflash": make_dflash_config(max_position_embeddings=32768),
    "dspark": make_dspark_config(max_position_embeddings=32768),
}


def save_as_speculators(directory: Path, name: str) -> Any:
    """Save a draft with the config that speculators would write."""
    draft = make_draft(CONFIGS[name])
    if draft.d2t is not None:
        draft.set_vocabulary(torch.tensor([0, 2, 3, 5, 8, 10]))
    save_draft(draft, directory)
    flat = build_config(draft.config, torch.float64)
    # rms_norm_eps, max_position_embeddings and the like are at transformers' defaults, and so left out
    names = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {key: flat[key] for key in (*names, "vocab_size", "num_hidden_layers")}
    layer["rope_parameters"] = {"rope_theta": flat["rope_theta"], "rope_type": "default"}
    keys = {"speculators_model_type": name, "transformer_layer_config": layer, "target_hidden_size": None} | KEYS[name]
    (directory / "config.json").write_text(json.dumps(keys))
    return draft


@pytest.mark.parametrize("name", list(KEYS))
def test_config_and_weights(tmp_path, name):
    draft = save_as_speculators(tmp_path, name)
    choices = {} if name == "eagle3" else {"num_anchors": 3}
    assert read_draft_config(tmp_path, **choices) == draft.config
    loaded = load_draft(tmp_path, dtype=torch.float64)
    document = make_document(9, 2, seed=0)
    draft.config = loaded.config
    assert torch.equal(run_draft(draft, [document]).hidden, run_draft(loaded, [document]).hidden)


def test_eagle3_with_layers_0_and_the_policys_embedding(tmp_path):
    draft, table = save_as_speculators(tmp_path, "eagle3"), make_embedding_table()

    def rename(weights):
        for name in [n for n in weights if n.startswith("midlayer.")]:
            weights[name.replace("midlayer.", "layers.0.")] = weights.pop(name)
        weights["embed_tokens.weight"] = table

    change_weights(tmp_path, rename)
    loaded = load_draft(tmp_path, dtype=torch.float64, policy_embedding=table)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), loaded.parameters(), strict=True))
    assert torch.equal(loaded.d2t, draft.d2t)
    with pytest.raises(ValueError, match="pass policy_embedding"):
        load_draft(tmp_path)


def test_dspark_without_a_confidence_head(tmp_path):
    save_as_speculators(tmp_path, "dspark")
    change_config(tmp_path, enable_confidence_head=None)
    config = read_draft_config(tmp_path, num_anchors=3)
    assert isinstance(config, DSparkConfig)
    assert replace(config, confidence_weight=1.0) == CONFIGS["dspark"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle3", {"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ("eagle3", {"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ("eagle3", {"norm_before_residual": None}, "norm_before_residual is missing"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids is missing"),
        ("eagle3", {"target_hidden_size": 24}, "target_hidden_size is 24"),
        ("eagle3", {"layer": {"model_type": "qwen3"}}, "the layer has model_type 'qwen3'"),
        ("eagle3", {"layer": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
        (
            "eagle3",
            {"layer": {"rope_parameters": LINEAR_ROPE}},
            "rope_type is 'linear'",
        ),
        ("dflash", {"mask_token_id": None}, "mask_token_id is missing"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ("dflash", {"projector_type": "domino"}, "projector_type is domino"),
        ("dflash", {"sample_from_anchor": True}, "sample_from_anchor is True"),
        ("dflash", {"draft_vocab_size": 5}, "draft_vocab_size is 5"),
        ("dspark", {"sample_from_anchor": None}, "sample_from_anchor is False"),
        ("dspark", {"markov_rank": None}, "markov_rank is missing"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type is gated"),
    ],
    ids=str,
)
def test_what_our_network_does_not_run_is_refused(tmp_path, name, changes, message):
    save_as_speculators(tmp_path, name)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    changes = dict(changes)
    if "layer" in changes:
        changes["transformer_layer_config"] = layer | changes.pop("layer")
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_draft_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"), [(None, "sliding_window_non_causal is missing"), (True, "sliding_window_non_causal is True")]
)
def test_sliding_layers_are_causal_and_say_so(tmp_path, value, message):
    save_as_speculators(tmp_path, "dflash")
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    layer |= {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 9}
    change_config(tmp_path, transformer_layer_config=layer, sliding_window_non_causal=False)
    assert read_draft_config(tmp_path).get_window(0) == 9
    change_config(tmp_path, sliding_window_non_causal=value)
    with pytest.raises(ValueError, match=message):
        read_draft_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "change_fn", "message"),
    [
        ("eagle3", lambda w: w.pop("fc.weight"), r"missing weights \['fc.weight'\]"),
        ("dflash", lambda w: w.update({"mask_hidden": torch.ones(12)}), r"without a place \['mask_hidden'\]"),
        ("dspark", lambda w: w.update({"norm.weight": torch.ones(5)}), r"norm.weight has shape \(5,\)"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_weights_fail_by_name(tmp_path, name, change_fn, message):
    save_as_speculators(tmp_path, name)
    change_weights(tmp_path, change_fn)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path)
