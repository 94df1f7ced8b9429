"""What is written is what is read, and what cannot be read is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.draft_cases import (
    VOCAB_SIZE,
    change_config,
    change_weights,
    make_config,
    make_document,
    make_draft,
    make_embedding_table,
    run_draft,
)
from safetensors.torch import load_file

from specco.drafts.export import iterate_weights, save_draft
from specco.drafts.load import load_draft, load_weights, read_draft_config
from specco.losses import LossTerms

WEIGHT_NAMES = {
    "fc.weight",
    "lm_head.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
}


@pytest.fixture
def exported(tmp_path):
    """A draft and the directory it was written to."""
    draft = make_draft(make_config())
    save_draft(draft, tmp_path)
    return draft, tmp_path


class TestRoundTrip:
    @pytest.mark.parametrize("option", ["fc_norm", "norm_before_fc", "norm_output"])
    def test_same_config_and_weights(self, tmp_path, option):
        config = make_config(norm_before_residual=True, max_position_embeddings=4096, ttt_steps=5, **{option: True})
        draft = make_draft(config)
        save_draft(draft, tmp_path)
        loaded = load_draft(tmp_path, dtype=torch.float64)
        assert loaded.config == config
        assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), loaded.parameters(), strict=True))
        assert all(p.requires_grad for p in loaded.parameters())
        document = make_document(9, 2, seed=0)
        assert torch.equal(run_draft(draft, [document]).hidden, run_draft(loaded, [document]).hidden)

    def test_names_and_keys_of_the_engine(self, exported):
        _, directory = exported
        assert set(load_file(directory / "model.safetensors")) == WEIGHT_NAMES
        keys = json.loads((directory / "config.json").read_text())
        assert keys["architectures"] == ["LlamaForCausalLMEagle3"]
        # the engine counts inputs of layers, and one of its runners reads either place
        assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
        assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
        assert keys["norm_before_residual"] is False
        assert keys["draft_vocab_size"] == keys["vocab_size"] == VOCAB_SIZE
        assert keys["max_position_embeddings"] >= 131072
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]

    def test_pairs_for_a_refit_are_whole_and_detached(self, exported):
        draft, _ = exported
        pairs = dict(iterate_weights(draft, dtype=torch.bfloat16))
        assert set(pairs) == WEIGHT_NAMES
        for name, parameter in draft.named_parameters():
            assert torch.equal(pairs[name], parameter.detach().bfloat16())
            assert not pairs[name].requires_grad

    def test_training_choices_replace_those_of_the_file(self, exported):
        _, directory = exported
        config = read_draft_config(directory, ttt_steps=7, loss_decay=None, loss_terms={"log_acceptance": 0.5})
        assert config.ttt_steps == 7
        assert config.loss_decay == 0.5
        assert config.loss_terms == LossTerms(log_acceptance=0.5)
        with pytest.raises(ValueError, match=r"loss_terms has \['log_acceptence'\]"):
            read_draft_config(directory, loss_terms={"log_acceptence": 0.5})


class TestOtherLayouts:
    def test_layers_0(self, exported):
        draft, directory = exported

        def rename(weights):
            for name in [n for n in weights if n.startswith("midlayer.")]:
                weights[name.replace("midlayer.", "layers.0.")] = weights.pop(name)

        change_weights(directory, rename)
        loaded = load_draft(directory, dtype=torch.float64)
        assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), loaded.parameters(), strict=True))

    def test_layer_ids_in_eagle_config_alone(self, exported):
        _, directory = exported
        change_config(directory, eagle_aux_hidden_state_layer_ids=None, architectures=["Eagle3LlamaForCausalLM"])
        assert read_draft_config(directory).target_layer_ids == (1, 3, 6)

    def test_full_vocabulary_maps_and_the_policys_embedding_are_dropped(self, exported):
        draft, directory = exported
        table = make_embedding_table()
        extra = {
            "d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64),
            "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool),
            "embed_tokens.weight": table,
        }
        change_weights(directory, lambda weights: weights.update(extra))
        loaded = load_draft(directory, dtype=torch.float64, policy_embedding=table)
        assert torch.equal(loaded.fc.weight, draft.fc.weight)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {}},
                "layer_ids is missing",
            ),
            ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, r"eagle_aux_hidden_state_layer_ids is \[0, 3\]"),
            ({"eagle_aux_hidden_state_layer_ids": [4, 2, 7]}, r"target_layer_ids is \(3, 1, 6\)"),
            ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "Eagle3Qwen3ForCausalLM"),
            ({"target_hidden_size": 5}, "target_hidden_size is 5"),
            ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"hidden_act": "gelu"}, "hidden_act is gelu"),
            ({"logit_scale": 0.5}, "logit_scale is 0.5"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*yarn"),
            ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3'"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ({"rope_theta": None}, "rope_theta is missing"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ],
        ids=str,
    )
    def test_config(self, exported, changes, message):
        _, directory = exported
        change_config(directory, **changes)
        with pytest.raises(ValueError, match=message):
            read_draft_config(directory)

    @pytest.mark.parametrize(
        ("change_fn", "message"),
        [
            (lambda w: w.pop("lm_head.weight"), r"missing weights \['lm_head.weight'\]"),
            (
                lambda w: w.update({"midlayer.self_attn.q_norm.weight": torch.ones(6)}),
                "midlayer.self_attn.q_norm.weight",
            ),
            (lambda w: w.update({"fc.weight": torch.ones(12, 24)}), r"fc.weight has shape \(12, 24\).*\(12, 36\)"),
            (
                lambda w: w.update({"embed_tokens.weight": make_embedding_table()}),
                "pass policy_embedding",
            ),
            (lambda w: w.update({"d2t": torch.ones(VOCAB_SIZE, dtype=torch.int64)}), "d2t maps"),
            (lambda w: w.update({"d2t": torch.zeros(5, dtype=torch.int64)}), "d2t maps"),
            (lambda w: w.update({"t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}), "t2d leaves"),
        ],
        ids=["missing", "extra", "misshapen", "embedding", "offsets", "short_map", "mask"],
    )
    def test_weights_and_nothing_is_copied(self, exported, change_fn, message):
        draft, directory = exported
        change_weights(directory, change_fn)
        other = make_draft(draft.config, seed=1)
        before = [p.clone() for p in other.parameters()]
        with pytest.raises(ValueError, match=message):
            load_weights(other, directory)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))

    def test_another_embedding(self, exported):
        _, directory = exported
        change_weights(directory, lambda w: w.update({"embed_tokens.weight": make_embedding_table(seed=1)}))
        with pytest.raises(ValueError, match=r"embed_tokens.weight differs"):
            load_draft(directory, policy_embedding=make_embedding_table())

    def test_pickled_weights(self, exported):
        _, directory = exported
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model.bin"):
            load_draft(directory)

    def test_no_directory(self, tmp_path):
        with pytest.raises(ValueError, match=r"config.json does not exist"):
            load_draft(tmp_path / "nothing")
