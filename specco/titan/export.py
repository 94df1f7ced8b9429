"""The policy in and out of Hugging Face format: a directory that transformers and vLLM load, or a stream of weights.

Weights are gathered module by module, so that no rank ever holds more than one full layer besides its own shards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from specco.titan.policy import Policy
from specco.titan.sizes import make_policy_config

DRAFT_PREFIX = "draft."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def named_policy_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the policy's weights by their Hugging Face names, full and detached, the draft's left out.

    Collective over the policy's meshes: every rank must run the iterator to its end.

    Args:
        policy: in any sharding.

    Yields:
        (name, tensor of the parameter's dtype, on its device); fused projections come split.
    """
    adapter = Qwen3StateDictAdapter(cast(Any, policy.config), None)
    for prefix, module in _gather_units(policy):
        for name, tensor in adapter.to_hf(module.state_dict(prefix=prefix)).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather_units(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of the names, module): each layer, and each other child. The adapter drops the draft's names."""
    for name, child in policy.named_children():
        if name == "layers":
            yield from ((f"layers.{layer_id}.", layer) for layer_id, layer in child.named_children())
        else:
            yield f"{name}.", child


def save_policy(policy: Policy, path: str | Path, *, tokenizer_path: str | Path, eos_token_id: int) -> None:
    """Write the policy as a Hugging Face directory; the whole directory appears at once or not at all.

    Collective: every rank must call. Rank 0 writes.

    Args:
        policy: in any sharding.
        path: of the directory; one that is there is replaced.
        tokenizer_path: directory whose tokenizer files are copied.
        eos_token_id: token that ends a response.
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    weights = {}
    for name, tensor in named_policy_weights(policy):
        if is_writer:
            weights[name] = tensor.detach().cpu().clone()
    if is_writer:
        path = Path(path)
        part = path.with_name(f"{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_torch_state_dict(weights, part)
        _write_json(part / "config.json", make_hf_config(policy, eos_token_id=eos_token_id))
        _write_json(part / "generation_config.json", {"do_sample": True, "eos_token_id": eos_token_id})
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_path) / name).exists():
                shutil.copy(Path(tokenizer_path) / name, part / name)
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    if dist.is_initialized():
        dist.barrier()


def make_hf_config(policy: Policy, *, eos_token_id: int) -> dict[str, Any]:
    """Return the contents of ``config.json`` for a dense Qwen3 policy."""
    config = policy.config
    layer = config.layers[0]
    attention = layer.attention
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": attention.rope.max_seq_len,
        "rope_theta": attention.rope.theta,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.enable_weight_tying,
        "eos_token_id": eos_token_id,
        "dtype": str(policy.norm.weight.dtype).removeprefix("torch."),
    }


def read_policy_config(path: str | Path) -> Policy.Config:
    """Build the policy's config from the ``config.json`` of a Hugging Face directory.

    Raises:
        ValueError: a model that is no dense, untied Qwen3 with plain RoPE, naming the key.
    """
    hf = json.loads((Path(path) / "config.json").read_text())
    rope = hf.get("rope_parameters") or {"rope_type": "default", "rope_theta": hf.get("rope_theta")}
    supported = {"model_type": "qwen3", "attention_bias": False, "tie_word_embeddings": False}
    for key, value in supported.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{path}/config.json has {key}={hf[key]!r}; supported is {value!r}")
    if hf.get("rope_scaling") or rope.get("rope_type", "default") != "default" or hf.get("use_sliding_window"):
        raise ValueError(f"{path}/config.json scales its RoPE or slides a window; supported are plain RoPE and none")
    return make_policy_config(
        "qwen3",
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        rope_theta=rope["rope_theta"],
        max_seq_len=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
    )


def load_policy(policy: Policy, path: str | Path) -> None:
    """Load the weights of a Hugging Face directory into a policy, in any sharding, in place.

    Every rank reads the files for itself; nothing is communicated. The draft is left as it is.

    Raises:
        ValueError: no weights there, or names or shapes that are not the policy's.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors file")
    adapter = Qwen3StateDictAdapter(cast(Any, policy.config), None)
    weights: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            weights.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    unknown = sorted(name for name in weights if not _is_known(adapter, name))
    if unknown:
        raise ValueError(f"{path} has weights that are no Qwen3 policy's: {unknown}")
    with torch.no_grad():
        titan_weights = adapter.from_hf(weights)
        mesh = policy.norm.weight.device_mesh if isinstance(policy.norm.weight, DTensor) else None
        if mesh is not None:
            replicated = [Replicate()] * mesh.ndim
            titan_weights = {
                name: DTensor.from_local(tensor.to(mesh.device_type), mesh, replicated, run_check=False)
                for name, tensor in titan_weights.items()
            }
        try:
            missing, unexpected = policy.load_state_dict(titan_weights, strict=False)
        except RuntimeError as error:
            raise ValueError(f"{path} does not fit the policy: {error}") from error
    missing = [name for name in missing if not name.startswith(DRAFT_PREFIX)]
    if missing or unexpected:
        raise ValueError(f"{path} does not fit the policy: missing {missing}, unexpected {unexpected}")


def _is_known(adapter: Qwen3StateDictAdapter, name: str) -> bool:
    abstract = ".".join("{}" if part.isdecimal() else part for part in name.split("."))
    return abstract in adapter.from_hf_map


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
