"""A deepened policy computes what it did, to the bit, in a directory that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.engine_models import TARGET_LAYER_IDS, save_policy, train_policy
from transformers import AutoModelForCausalLM

from recipes.deepen import deepen_policy


def test_same_function_same_taps(tmp_path: Path) -> None:
    policy = train_policy(num_steps=0)
    save_policy(policy, tmp_path / "policy")
    (tmp_path / "policy/tokenizer.json").write_text("{}")
    deepen_policy(tmp_path / "policy", tmp_path / "deep", 7)
    deep = AutoModelForCausalLM.from_pretrained(tmp_path / "deep")
    assert len(deep.model.layers) == 7
    ids = torch.randint(policy.config.vocab_size, (2, 11))
    one, two = (model(ids, output_hidden_states=True) for model in (policy, deep))
    assert torch.equal(one.logits, two.logits)
    for layer in TARGET_LAYER_IDS:
        assert torch.equal(one.hidden_states[layer + 1], two.hidden_states[layer + 1])
    # the new layers are at work, they only write nothing
    assert deep.model.layers[6].self_attn.q_proj.weight.abs().sum() > 0
    assert deep.model.layers[6].mlp.down_proj.weight.abs().sum() == 0
    assert (tmp_path / "deep/tokenizer.json").read_text() == "{}"
    assert len(json.loads((tmp_path / "deep/config.json").read_text())["layer_types"]) == 7


@pytest.mark.parametrize(
    ("num_layers", "target", "message"), [(4, "deep", "more than the 4"), (5, "policy", "is there")]
)
def test_refusals(tmp_path: Path, num_layers: int, target: str, message: str) -> None:
    save_policy(train_policy(num_steps=0), tmp_path / "policy")
    with pytest.raises(ValueError, match=message):
        deepen_policy(tmp_path / "policy", tmp_path / target, num_layers)
