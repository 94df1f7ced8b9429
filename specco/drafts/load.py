"""Read a draft from ``config.json`` and ``model.safetensors``: ours, SpecForge's or vLLM's flat EAGLE-3 layout.

Nothing is guessed: a key that changes the network and that we do not run, and a weight that is missing, left over or of
another shape, end in an error that names it. Files of pickled tensors are not read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import CONFIG_NAME, WEIGHTS_NAME

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

# value that each key must have where it is present: what it would change is not in our network
_REQUIRED_VALUES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "sliding_window": None,
    "quantization_config": None,
}


def read_eagle3_config(directory: str | Path, **training_choices: Any) -> Eagle3Config:
    """Read the shape of an EAGLE-3 draft.

    Args:
        directory: holds ``config.json``.
        training_choices: fields of ``Eagle3Config`` that replace those of the file, such as ``ttt_steps``.

    Raises:
        ValueError: another architecture, a missing key, or a key whose value our network does not run, by name.
    """
    path = Path(directory) / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a draft directory holds {CONFIG_NAME} and {WEIGHTS_NAME}")
    keys = json.loads(path.read_text())
    if not set(keys.get("architectures") or ()) & set(EAGLE3_ARCHITECTURES):
        raise ValueError(
            f"{path}: architectures is {keys.get('architectures')}; allowed are {list(EAGLE3_ARCHITECTURES)}"
        )
    _check_network(path, keys)
    eagle_config = keys.get("eagle_config") or {}
    layer_inputs = keys.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if not layer_inputs:
        raise ValueError(f"{path}: eagle_aux_hidden_state_layer_ids is missing; the tapped layers cannot be guessed")
    if min(layer_inputs) < 1:
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {layer_inputs}; allowed are ids >= 1 "
            "(0 is the embedding, no layer's output)"
        )
    rope = keys.get("rope_parameters") or {}
    fields = {
        name: _get_key(path, keys, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    }
    fields |= {
        "num_key_value_heads": keys.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_dim": keys.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "target_layer_ids": tuple(layer - 1 for layer in layer_inputs),
        "rope_theta": rope.get("rope_theta") or _get_key(path, keys, "rope_theta"),
        "norm_before_fc": bool(eagle_config.get("norm_before_fc", keys.get("norm_before_fc", False))),
    }
    optional = ("norm_before_residual", "fc_norm", "norm_output", "max_position_embeddings", "ttt_steps", "loss_decay")
    fields |= {name: keys[name] for name in optional if name in keys}
    return Eagle3Config(**(fields | training_choices))


def _get_key(path: Path, keys: dict[str, Any], name: str) -> Any:
    if keys.get(name) is None:
        raise ValueError(f"{path}: {name} is missing")
    return keys[name]


def _check_network(path: Path, keys: dict[str, Any]) -> None:
    for name, value in _REQUIRED_VALUES.items():
        if keys.get(name, value) != value:
            raise ValueError(f"{path}: {name} is {keys[name]}; the draft supports {value}")
    for name, same in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if keys.get(name) not in (None, keys.get(same)):
            raise ValueError(f"{path}: {name} is {keys[name]}; the draft supports {same}={keys.get(same)}")
    rope_type = (keys.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"{path}: rope_type is {rope_type!r}; the draft supports 'default'")
    if not (keys.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ValueError(f"{path}: use_aux_hidden_state is False; the draft supports True")


def load_weights(draft: Eagle3Draft, directory: str | Path, *, policy_embedding: Tensor | None = None) -> None:
    """Copy the weights of ``model.safetensors`` into a draft of the same shape, whatever its layout and dtype.

    Every rank reads the file and keeps its shards; no collective.

    Args:
        draft: materialised (after ``to_empty``).
        directory: holds ``model.safetensors``. Layers may be named ``midlayer.`` or ``layers.0.``.
        policy_embedding: ``[V, D]``, needed where the file has an ``embed_tokens.weight``: a draft always reads the
            policy's embedding, so the two must be equal.

    Raises:
        ValueError: a missing, left over or misshapen weight, or an embedding of its own, by name.
    """
    path = Path(directory) / WEIGHTS_NAME
    if not path.is_file():
        others = sorted(p.name for p in Path(directory).glob("*") if p.suffix in (".bin", ".pt", ".safetensors"))
        raise ValueError(f"{path} does not exist (found {others}); weights are read from this one file")
    weights = {name.replace("layers.0.", "midlayer.", 1): weight for name, weight in load_file(path).items()}
    _drop_embedding(path, weights, policy_embedding)
    _drop_identity_vocabulary(path, weights, draft.config.vocab_size)
    parameters = dict(draft.named_parameters())
    missing, extra = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or extra:
        raise ValueError(f"{path}: missing weights {missing}, weights without a place {extra}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(weights[name].shape)}; the draft has {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = weights[name].to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                weight = distribute_tensor(weight, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(weight)


def _drop_embedding(path: Path, weights: dict[str, Tensor], policy_embedding: Tensor | None) -> None:
    own = weights.pop("embed_tokens.weight", None)
    if own is None:
        return
    if policy_embedding is None:
        raise ValueError(f"{path}: has embed_tokens.weight; pass policy_embedding, which it must equal")
    if own.shape != policy_embedding.shape or not torch.equal(own.to(policy_embedding), policy_embedding):
        raise ValueError(f"{path}: embed_tokens.weight differs from the policy's embedding, which the draft reads")


def _drop_identity_vocabulary(path: Path, weights: dict[str, Tensor], vocab_size: int) -> None:
    offsets, in_draft = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is not None and (offsets.numel() != vocab_size or bool(offsets.any())):
        raise ValueError(f"{path}: d2t maps to a reduced vocabulary; the draft predicts all {vocab_size} tokens")
    if in_draft is not None and (in_draft.numel() != vocab_size or not bool(in_draft.all())):
        raise ValueError(f"{path}: t2d leaves tokens out; the draft predicts all {vocab_size} tokens")


def load_draft(
    directory: str | Path, *, dtype: torch.dtype | None = None, policy_embedding: Tensor | None = None
) -> Eagle3Draft:
    """Build an EAGLE-3 draft on the CPU from a directory.

    Args:
        directory: holds ``config.json`` and ``model.safetensors``.
        dtype: of the parameters; None = torch's default dtype.
        policy_embedding: see ``load_weights``.

    Raises:
        ValueError: see ``read_eagle3_config`` and ``load_weights``.
    """
    with torch.device("meta"):
        draft = Eagle3Draft(read_eagle3_config(directory))
    draft = draft.to(dtype or torch.get_default_dtype()).to_empty(device="cpu")
    load_weights(draft, directory, policy_embedding=policy_embedding)
    return draft
