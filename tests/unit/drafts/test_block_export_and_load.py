"""Block drafts: what is written is what is read, official layouts load, and the rest is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_cases import (
    VOCAB_SIZE,
    change_config,
    change_weights,
    make_dflash_config,
    make_document,
    make_draft,
    make_dspark_config,
    make_embedding_table,
    make_policy_head,
    run_draft,
)
from safetensors.torch import load_file

from specco.drafts.base import DraftConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.export import build_config, save_draft
from specco.drafts.load import load_draft, load_weights, read_draft_config
from specco.losses import LossTerms

LAYER_NAMES = {
    f"layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    )
}
DFLASH_NAMES = LAYER_NAMES | {"fc.weight", "hidden_norm.weight", "norm.weight"}
DSPARK_NAMES = DFLASH_NAMES | {
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
}
CONFIGS: dict[str, DraftConfig] = {"dflash": make_dflash_config(), "dspark": make_dspark_config()}


def save(directory: Path, name: str) -> Any:
    draft = make_draft(CONFIGS[name])
    save_draft(draft, directory)
    return draft


class TestRoundTrip:
    @pytest.mark.parametrize(
        "config",
        [
            make_dflash_config(num_anchors=7, loss_decay_gamma=3.5, loss_terms=LossTerms(l1=1.0)),
            make_dflash_config(layer_types=("sliding_attention", "full_attention"), sliding_window=9),
            make_dspark_config(confidence_head_with_markov=False, confidence_weight=0.5),
            make_dspark_config(confidence_weight=0.0, max_position_embeddings=99),
        ],
        ids=["dflash", "sliding", "dspark", "no_confidence"],
    )
    def test_same_config_and_weights(self, tmp_path, config):
        draft = make_draft(config)
        save_draft(draft, tmp_path)
        loaded = load_draft(tmp_path, dtype=torch.float64)
        assert loaded.config == config
        assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), loaded.parameters(), strict=True))
        document = make_document(9, 2, seed=0)
        assert torch.equal(run_draft(draft, [document]).hidden, run_draft(loaded, [document]).hidden)

    def test_dflash_names_and_keys_of_the_engine(self, tmp_path):
        save(tmp_path, "dflash")
        assert set(load_file(tmp_path / "model.safetensors")) == DFLASH_NAMES
        keys = json.loads((tmp_path / "config.json").read_text())
        assert keys["architectures"] == ["DFlashDraftModel"]
        assert keys["model_type"] == "qwen3"
        # the engine's two runners look the tapped layers up in either place, one counts inputs, one outputs
        assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
        assert keys["dflash_config"] == {
            "mask_token_id": 10,
            "target_layer_ids": [1, 3, 6],
            "use_aux_hidden_state": True,
        }
        assert keys["layer_types"] == ["full_attention"] * 2
        assert keys["block_size"] == 4
        assert keys["max_position_embeddings"] >= 131072

    def test_dspark_names_and_keys_of_the_engine(self, tmp_path):
        save(tmp_path, "dspark")
        assert set(load_file(tmp_path / "model.safetensors")) == DSPARK_NAMES
        keys = json.loads((tmp_path / "config.json").read_text())
        expected = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
            "target_layer_ids": [1, 3, 6],
            "mask_token_id": 10,
            "block_size": 4,
            "sample_from_anchor": True,
            "markov_rank": 5,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "draft_vocab_size": VOCAB_SIZE,
        }
        assert {name: keys[name] for name in expected} == expected

    def test_a_family_without_a_form(self):
        config = make_dflash_config()
        bare = DraftConfig(**{field.name: getattr(config, field.name) for field in fields(DraftConfig)})
        with pytest.raises(ValueError, match="cannot export a draft of DraftConfig"):
            build_config(bare, torch.float32)


class TestOfficialLayouts:
    """Keys as the official checkpoints have them: none of ours, and what is at its default left out."""

    OURS = ("eagle_aux_hidden_state_layer_ids", "target_hidden_size", "loss_terms", "num_anchors", "loss_decay_gamma")

    def test_z_lab_dflash(self, tmp_path):
        save(tmp_path, "dflash")
        others = {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 6]}, "num_target_layers": 8}
        change_config(tmp_path, **dict.fromkeys((*self.OURS, "draft_vocab_size", "use_sliding_window")), **others)
        assert read_draft_config(tmp_path) == make_dflash_config(
            mask_token_id=9, num_anchors=DFlashConfig.num_anchors, loss_decay_gamma=DFlashConfig.loss_decay_gamma
        )

    def test_deepspec_dspark_with_frozen_copies_of_the_policy(self, tmp_path):
        draft = save(tmp_path, "dspark")
        change_config(tmp_path, **dict.fromkeys((*self.OURS, "sample_from_anchor", "confidence_weight", "layer_types")))
        table, head = make_embedding_table(), make_policy_head()
        change_weights(tmp_path, lambda w: w.update({"embed_tokens.weight": table, "lm_head.weight": head}))
        assert read_draft_config(tmp_path, num_anchors=3) == draft.config
        loaded = load_draft(tmp_path, dtype=torch.float64, policy_embedding=table, policy_head=head)
        assert torch.equal(loaded.fc.weight, draft.fc.weight)
        with pytest.raises(ValueError, match=r"has lm_head.weight; pass policy_head"):
            load_draft(tmp_path, policy_embedding=table)
        with pytest.raises(ValueError, match=r"lm_head.weight differs from the policy's"):
            load_draft(tmp_path, policy_embedding=table, policy_head=table)

    def test_dspark_without_a_confidence_head(self, tmp_path):
        save(tmp_path, "dspark")
        change_config(tmp_path, enable_confidence_head=None)
        config = read_draft_config(tmp_path)
        assert isinstance(config, DSparkConfig)
        assert config.confidence_weight == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("dflash", {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
            ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 6]}}, "mask_token_id is missing"),
            ("dflash", {"block_size": None}, "block_size is missing"),
            ("dflash", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "must name the same taps"),
            ("dflash", {"draft_vocab_size": 5}, "draft_vocab_size is 5"),
            ("dflash", {"is_causal": True}, "is_causal is True"),
            ("dflash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
            ("dspark", {"markov_head_type": "gated"}, "markov_head_type is gated"),
            ("dspark", {"sample_from_anchor": False}, "sample_from_anchor is False"),
            ("dspark", {"markov_rank": None}, "markov_rank is missing"),
            ("dspark", {"target_layer_ids": None}, "target_layer_ids is missing"),
            ("dspark", {"mask_token_id": None}, "mask_token_id is missing"),
            ("dspark", {"attention_bias": True}, "attention_bias is True"),
        ],
        ids=str,
    )
    def test_config(self, tmp_path, name, changes, message):
        save(tmp_path, name)
        change_config(tmp_path, **changes)
        with pytest.raises(ValueError, match=message):
            read_draft_config(tmp_path)

    @pytest.mark.parametrize("key", ["use_swa", "causal", "attention_value_scale", "sample_from_anchor"])
    def test_dflash_config(self, tmp_path, key):
        save(tmp_path, "dflash")
        change_config(
            tmp_path,
            dflash_config={"mask_token_id": 10, "target_layer_ids": [1, 3, 6], key: 0.5 if "scale" in key else True},
        )
        with pytest.raises(ValueError, match=key):
            read_draft_config(tmp_path)

    def test_a_mask_embedding_of_its_own(self, tmp_path):
        save(tmp_path, "dflash")
        (tmp_path / "mask_embedding.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=r"mask_embedding.pt exists"):
            read_draft_config(tmp_path)

    @pytest.mark.parametrize(
        ("change_fn", "message"),
        [
            (lambda w: w.pop("confidence_head.proj.bias"), r"missing weights \['confidence_head.proj.bias'\]"),
            (lambda w: w.pop("markov_head.markov_w1.weight"), "markov_head.markov_w1.weight"),
            (lambda w: w.update(mask_hidden=torch.ones(12)), r"without a place \['mask_hidden'\]"),
            (
                lambda w: w.update({"markov_head.markov_w2.weight": torch.ones(5, 5)}),
                r"markov_w2.weight has shape \(5, 5\)",
            ),
            (lambda w: w.update(d2t=torch.ones(VOCAB_SIZE, dtype=torch.int64)), "d2t maps"),
        ],
        ids=["confidence", "markov", "extra", "misshapen", "offsets"],
    )
    def test_weights_and_nothing_is_copied(self, tmp_path, change_fn, message):
        save(tmp_path, "dspark")
        change_weights(tmp_path, change_fn)
        other = make_draft(CONFIGS["dspark"], seed=1)
        before = [p.clone() for p in other.parameters()]
        with pytest.raises(ValueError, match=message):
            load_weights(other, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
