"""The policy in and out of Hugging Face format, whatever its layout: a directory that transformers and vLLM load, or a
stream of weights.

Out: one full tensor at a time, so that no rank holds more of the model than its own shards, that tensor and, on the
writer, one file's worth. In: each rank reads the slices of the files that it keeps.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from specco.titan.policy import Policy
from specco.titan.sizes import make_policy_config

DRAFT_PREFIX = "draft."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILE_BYTES = 5 * 10**9
"""A file of weights is closed when it would grow beyond this."""


class _Qwen3Adapter(Qwen3StateDictAdapter):
    """torchtitan's adapter, which fails on experts that are replicated over an axis of their mesh ("dp_replicate")."""

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple, device_mesh: DeviceMesh
    ) -> tuple[int, int]:
        """Return [first, last) of the experts on this rank."""
        placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in dtensor_placements]
        shape, offset = compute_local_shape_and_global_offset((dim_size,), device_mesh, placements)
        return offset[0], offset[0] + shape[0]


def _make_adapter(config: Policy.Config) -> StateDictAdapter:
    adapters: dict[str, Any] = {"qwen3": _Qwen3Adapter, "llama3": Llama3StateDictAdapter}
    if config.architecture not in adapters:
        raise ValueError(
            f"architecture is {config.architecture!r}; Hugging Face weights are read and written of {sorted(adapters)}"
        )
    return adapters[config.architecture](config, None)


def named_policy_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the policy's weights by their Hugging Face names, full and detached, the draft's left out.

    Collective over the policy's meshes: every rank must run the iterator to its end.

    Args:
        policy: in any layout.

    Yields:
        (name, tensor of the parameter's dtype, on its device); fused projections and experts come split.

    Raises:
        ValueError: a policy that has no Hugging Face counterpart here.
    """
    adapter = _make_adapter(policy.config)
    for prefix, module in _gather_units(policy):
        for name, tensor in module.state_dict(prefix=prefix).items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield from adapter.to_hf({name: full}).items()


def _gather_units(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of the names, module): each layer, and each other child but the draft."""
    for name, child in policy.named_children():
        if name == "layers":
            yield from ((f"layers.{layer_id}.", layer) for layer_id, layer in child.named_children())
        elif name != "draft":
            yield f"{name}.", child


def save_policy(
    policy: Policy,
    path: str | Path,
    *,
    tokenizer_path: str | Path,
    eos_token_id: int,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a policy that is no stage of a pipeline; see ``save_policy_weights``."""
    save_policy_weights(
        policy.config,
        named_policy_weights(policy),
        path,
        tokenizer_path=tokenizer_path,
        eos_token_id=eos_token_id,
        file_bytes=file_bytes,
    )


def save_policy_weights(
    config: Policy.Config,
    weights: Iterator[tuple[str, Tensor]],
    path: str | Path,
    *,
    tokenizer_path: str | Path,
    eos_token_id: int,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a policy as a Hugging Face directory; the whole directory appears at once or not at all.

    Collective: every rank must call. Rank 0 writes.

    Args:
        config: of the policy.
        weights: (Hugging Face name, full tensor) of the whole policy, on every rank.
        path: of the directory; one that is there is replaced.
        tokenizer_path: directory whose tokenizer files are copied.
        eos_token_id: token that ends a response.
        file_bytes: size at which a file of weights is closed and the next one begun.
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    if is_writer:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dtype = _write_weights(weights, part if is_writer else None, file_bytes)
    if is_writer:
        _write_json(part / "config.json", make_hf_config(config, dtype=dtype, eos_token_id=eos_token_id))
        _write_json(part / "generation_config.json", {"do_sample": True, "eos_token_id": eos_token_id})
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_path) / name).exists():
                shutil.copy(Path(tokenizer_path) / name, part / name)
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    if dist.is_initialized():
        dist.barrier()


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path | None, file_bytes: int) -> torch.dtype:
    """Drain the iterator; where there is a folder, write it as one file or as numbered ones with an index.

    Returns:
        The dtype of the last weight.
    """
    dtype = torch.float32
    files: list[dict[str, int]] = []
    room = 0
    held: dict[str, Tensor] = {}

    def close_file() -> None:
        if folder is not None and held:
            save_file(held, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
            files.append({name: tensor.nbytes for name, tensor in held.items()})
            held.clear()

    for name, tensor in weights:
        dtype = tensor.dtype
        if folder is None:
            continue
        if tensor.nbytes > room:
            close_file()
            room = file_bytes
        room -= tensor.nbytes
        held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    close_file()
    if folder is None:
        return dtype
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        os.replace(folder / f"{number}.safetensors", folder / name)
    if len(files) > 1:
        weight_map = {weight: name for name, sizes in zip(names, files, strict=True) for weight in sizes}
        total = sum(sum(sizes.values()) for sizes in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return dtype


def make_hf_config(config: Policy.Config, *, dtype: torch.dtype, eos_token_id: int) -> dict[str, Any]:
    """Return the contents of ``config.json`` for a Qwen3, Qwen3-MoE or Llama 3 policy with weights of ``dtype``."""
    layer = config.layers[0]
    attention = layer.attention
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or config.dim // attention.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": attention.rope.max_seq_len,
        "rope_theta": attention.rope.theta,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.enable_weight_tying,
        "eos_token_id": eos_token_id,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if config.architecture == "llama3":
        own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
        own |= {"rope_scaling": _make_rope_scaling(attention.rope)}
    else:
        own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if layer.moe is None:
        return own | {"intermediate_size": layer.feed_forward.w1.out_features} | common
    experts = layer.moe.routed_experts.inner_experts
    own = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": experts.hidden_dim,  # of dense layers: there are none
        "moe_intermediate_size": experts.hidden_dim,
        "num_experts": layer.moe.num_experts,
        "num_experts_per_tok": layer.moe.router.top_k,
        "norm_topk_prob": layer.moe.router.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return own | common


def _make_rope_scaling(rope: Any) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


SUPPORTED: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False, "tie_word_embeddings": False},
    "qwen3_moe": {
        "attention_bias": False,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "llama": {"attention_bias": False, "tie_word_embeddings": False, "mlp_bias": False},
}
"""Models that are read, by their ``model_type``, and the values that a key may have where it is given."""


def read_policy_config(path: str | Path) -> Policy.Config:
    """Build the policy's config from the ``config.json`` of a Hugging Face directory.

    Raises:
        ValueError: a model that is no untied Qwen3, Qwen3-MoE or Llama with experts in every layer or in none, no
            sliding window, and plain RoPE or Llama 3's, naming the key.
    """
    hf = json.loads((Path(path) / "config.json").read_text())
    kind = hf.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(f"{path}/config.json has model_type={kind!r}; supported are {sorted(SUPPORTED)}")
    for key, value in SUPPORTED[kind].items():
        if hf.get(key, value) != value:
            raise ValueError(f"{path}/config.json has {key}={hf[key]!r}; supported is {value!r}")
    # newer files hold base and scaling in one dictionary
    rope = {"rope_theta": hf.get("rope_theta")} | (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    allowed = ("default", "llama3") if kind == "llama" else ("default",)
    if rope_type not in allowed or hf.get("use_sliding_window"):
        raise ValueError(
            f"{path}/config.json scales its RoPE by {rope_type!r} or slides a window; supported are {allowed} and none"
        )
    scaling = None
    if rope_type == "llama3":
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {"scaling": "llama", "scaling_factor": rope["factor"]} | {key: rope[key] for key in keys}
    is_moe = kind == "qwen3_moe"
    return make_policy_config(
        "llama3" if kind == "llama" else "qwen3",
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        dim=hf["hidden_size"],
        hidden_dim=hf["moe_intermediate_size" if is_moe else "intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        num_experts=hf["num_experts"] if is_moe else 0,
        top_k=hf["num_experts_per_tok"] if is_moe else 0,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        max_seq_len=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
    )


def load_policy(policy: Policy, path: str | Path) -> None:
    """Load the weights of a Hugging Face directory into a policy or a stage of one, in any layout, in place.

    Collective over the policy's meshes: every rank must call, and reads the slices that it keeps, of fused projections
    the whole. The draft is left as it is.

    Raises:
        ValueError: no weights there, or names or shapes that are not the policy's, before anything is loaded.
    """
    if not list(Path(path).glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors file")
    reader = HuggingFaceStorageReader(str(path))
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith(DRAFT_PREFIX)}
    _check_stored(policy.config, state, reader, path)
    adapter = _make_adapter(policy.config)
    with torch.no_grad():
        weights = adapter.to_hf(state)
        dcp.load(weights, storage_reader=reader, no_dist=True)
        missing, unexpected = policy.load_state_dict(adapter.from_hf(weights), strict=False)
    missing = [name for name in missing if not name.startswith(DRAFT_PREFIX)]
    assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"


def _check_stored(
    config: Policy.Config, state: dict[str, Tensor], reader: HuggingFaceStorageReader, path: str | Path
) -> None:
    """Compare names and shapes in the files with the whole policy's; every rank finds the same."""
    adapter: Any = _make_adapter(config)
    with torch.device("meta"):
        whole = replace(config, draft=None).build().state_dict()
    assert state.keys() <= whole.keys()
    expected = {name: tuple(tensor.shape) for name, tensor in adapter.to_hf(whole).items()}
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    ignored = [name for name, own in adapter.from_hf_map.items() if own is None]
    missing = sorted(expected.keys() - stored.keys())
    extra = sorted(n for n in stored.keys() - expected.keys() if re.sub(r"\d+", "{}", n) not in ignored)
    misshapen = {
        name: f"{tuple(stored[name].size)} in place of {shape}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].size) != shape
    }
    if missing or extra or misshapen:
        raise ValueError(f"{path} does not fit the policy: missing {missing}, extra {extra}, misshapen {misshapen}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
