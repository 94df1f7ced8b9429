"""The policy in and out of Hugging Face format, against transformers' own Qwen3, Qwen3-MoE and Llama."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.carry import EOS_ID, decode, encode, save_tokenizer
from specco.drafts.eagle3.config import Eagle3Config
from specco.testing.tolerances import OP_FLOAT32, max_error
from specco.titan.export import load_policy, named_policy_weights, read_policy_config, save_policy
from specco.titan.sizes import make_policy_config

SIZES = {"num_layers": 2, "dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DRAFT = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    target_layer_ids=(0, 1),
)


TARGETS = {
    "qwen3": {"architecture": "qwen3"},
    "qwen3_moe": {"architecture": "qwen3", "num_experts": 4, "top_k": 2},
    "llama": {
        "architecture": "llama3",
        # lengths at which all three of Llama's bands of frequencies occur
        "rope_scaling": {"scaling": "llama", "scaling_factor": 4.0, "original_max_position_embeddings": 16},
    },
}


def build(seed=0, draft=DRAFT, target="qwen3"):
    config = make_policy_config(
        **TARGETS[target], vocab_size=64, max_seq_len=64, rope_theta=5000.0, init_std=0.3, **SIZES
    )
    config.draft = draft
    policy = config.build()
    torch.manual_seed(seed)
    with torch.no_grad():
        policy.init_weights()
    return policy


@pytest.fixture(scope="module", params=TARGETS)
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    save_tokenizer(folder / "tokenizer")
    policy = build(target=request.param)
    save_policy(policy, folder / "policy", tokenizer_path=folder / "tokenizer", eos_token_id=EOS_ID)
    return policy, folder / "policy"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    save_policy(build(), folder / "policy", tokenizer_path=folder, eos_token_id=EOS_ID)
    return folder / "policy"


def test_transformers_computes_the_same_logits(exported):
    policy, path = exported
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert not theirs.config.tie_word_embeddings
    assert theirs.config.eos_token_id == EOS_ID
    assert theirs.generation_config.eos_token_id == EOS_ID
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert max_error(policy(tokens), theirs(tokens).logits) < OP_FLOAT32


def test_transformers_reads_the_tokenizer(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported[1])
    text = "8+9=17;#4"
    assert tokenizer(text).input_ids == encode(text)
    assert tokenizer.decode(encode(text)) == decode(encode(text)) == text
    assert tokenizer.eos_token_id == EOS_ID


def test_weights_are_streamed_under_their_hugging_face_names(exported):
    policy, path = exported
    streamed = dict(named_policy_weights(policy))
    saved = load_file(path / "model.safetensors")
    assert streamed.keys() == saved.keys()
    assert not any("draft" in name for name in streamed)
    assert saved["model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert saved["model.layers.1.self_attn.k_proj.weight"].shape == (32, 32)
    for name, weight in saved.items():
        assert torch.equal(streamed[name], weight), name
        assert not streamed[name].requires_grad


def test_weights_come_in_files_of_the_stated_size(exported, tmp_path):
    policy, path = exported
    limit = 20_000
    save_policy(policy, tmp_path / "policy", tokenizer_path=path, eos_token_id=EOS_ID, file_bytes=limit)
    files = sorted((tmp_path / "policy").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    parts = [load_file(file) for file in files]
    assert all(sum(w.nbytes for w in part.values()) <= limit for part in parts)
    index = json.loads((tmp_path / "policy/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    whole = load_file(path / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in whole.values())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(read.lm_head.weight, whole["lm_head.weight"])
    other = read_policy_config(tmp_path / "policy").build()
    load_policy(other, tmp_path / "policy")
    assert all(torch.equal(p, policy.get_parameter(name)) for name, p in other.named_parameters())


def test_a_policy_comes_back_bit_for_bit_and_its_draft_stays(exported):
    policy, path = exported
    config = read_policy_config(path)
    assert config.layers[0].attention.rope.theta == 5000.0
    config.draft = DRAFT
    other = config.build()
    torch.manual_seed(1)
    with torch.no_grad():
        other.init_weights()
    draft = {name: p.clone() for name, p in other.draft.named_parameters()}
    load_policy(other, path)
    for name, parameter in other.named_parameters():
        expected = draft[name.removeprefix("draft.")] if name.startswith("draft.") else policy.get_parameter(name)
        assert torch.equal(parameter, expected), name


def test_an_export_replaces_the_one_before(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    for seed in (1, 2):
        save_policy(build(seed), tmp_path / "policy", tokenizer_path=tmp_path / "tokenizer", eos_token_id=EOS_ID)
    assert torch.equal(load_file(tmp_path / "policy/model.safetensors")["lm_head.weight"], build(2).lm_head.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy", "tokenizer"]


def copy_with(path, target, weights=None, config=None):
    shutil.copytree(path, target)
    if weights is not None:
        save_file(weights, target / "model.safetensors")
    if config is not None:
        old = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(old | config))
    return target


def test_weights_that_do_not_fit_are_refused_by_name(dense, tmp_path):
    policy, path = build(), dense
    weights = load_file(path / "model.safetensors")
    before = {name: p.clone() for name, p in policy.named_parameters()}

    def leave_out(name):
        return {n: w for n, w in weights.items() if n != name}

    cases = {
        "missing": (leave_out("model.norm.weight"), r"missing \['model\.norm\.weight'\]"),
        "part": (leave_out("model.layers.0.self_attn.k_proj.weight"), r"missing \['model\.layers\.0\.self_attn\.k_pr"),
        "extra": (weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, r"extra \['model.*q_proj\.bias"),
        "deep": (
            weights | {"model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)},
            r"extra \['model\.layers\.7\.mlp",
        ),
        "shape": (
            weights | {"lm_head.weight": torch.zeros(64, 31)},
            r"lm_head\.weight': '\(64, 31\) in place of \(64, 32",
        ),
    }
    for case, (changed, message) in cases.items():
        with pytest.raises(ValueError, match=message):
            load_policy(policy, copy_with(path, tmp_path / case, weights=changed))
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        load_policy(policy, tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters()), "refused, but partly loaded"


def test_experts_that_do_not_fit_are_refused_by_name(tmp_path):
    policy = build(target="qwen3_moe")
    save_policy(policy, tmp_path / "policy", tokenizer_path=tmp_path, eos_token_id=EOS_ID)
    weights = load_file(tmp_path / "policy/model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert weights[name].shape == (32, 48)
    cases = {
        "missing": ({n: w for n, w in weights.items() if n != name}, f"missing \\['{name}'\\]"),
        "shape": (weights | {name: torch.zeros(48, 32)}, f"'{name}': '\\(48, 32\\) in place of \\(32, 48\\)'"),
        "extra": (weights | {name.replace("3", "4"): torch.zeros(32, 48)}, "extra .*experts.4.down_proj.weight"),
    }
    for case, (changed, message) in cases.items():
        with pytest.raises(ValueError, match=message):
            load_policy(policy, copy_with(tmp_path / "policy", tmp_path / case, weights=changed))


def test_frequencies_that_old_llama_files_hold_are_passed_over(tmp_path):
    policy = build(target="llama")
    save_policy(policy, tmp_path / "policy", tokenizer_path=tmp_path, eos_token_id=EOS_ID)
    weights = load_file(tmp_path / "policy/model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    load_policy(policy, copy_with(tmp_path / "policy", tmp_path / "old", weights=weights))


def test_a_policy_without_a_hugging_face_counterpart_is_refused():
    policy = build()
    policy.config.architecture = "gpt_oss"
    with pytest.raises(ValueError, match=r"architecture is 'gpt_oss'; .* read and written of \['llama3', 'qwen3'\]"):
        next(named_policy_weights(policy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2'; supported are"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its RoPE by 'linear'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales its RoPE"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "scales its RoPE"),
        ({"use_sliding_window": True}, "slides a window"),
    ],
)
def test_models_that_are_not_supported_are_refused_when_the_config_is_read(dense, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_policy_config(copy_with(dense, tmp_path / "policy", config=change))
