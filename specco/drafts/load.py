"""Read a draft from ``config.json`` and ``model.safetensors``: vLLM's flat layouts, ours and the official ones.

EAGLE-3 of SpecForge and others (``midlayer.`` or ``layers.0.``), DFlash of z-lab, DSpark of DeepSpec, and the three as
speculators writes them (``drafts/speculators.py``).

Nothing is guessed: a key that changes the network and that we do not run, and a weight that is missing, left over or of
another shape, end in an error that names it. Files of pickled tensors are not read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from specco.drafts.base import Draft, DraftConfig
from specco.drafts.block import FULL_ATTENTION, SLIDING_ATTENTION
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.export import CONFIG_NAME, WEIGHTS_NAME
from specco.drafts.registry import build_draft
from specco.drafts.speculators import flatten_speculators_config
from specco.drafts.vocab import check_vocabulary_maps
from specco.losses import LossTerms

# value that each key must have where it is present: what it would change is not in our network
_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "quantization_config": None,
}
_REQUIRED_EAGLE3_VALUES: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": None}
_REQUIRED_BLOCK_VALUES: dict[str, Any] = {
    "is_causal": None,
    "is_neox_style": True,
    "add_swa_attention_sink_bias": False,
    "markov_head_type": "vanilla",
    "dspark_bonus_anchor": False,
}
_REQUIRED_DFLASH_CONFIG_VALUES: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_swa": False,
    "causal": None,
    "attention_value_scale": None,
    "attention_sink_bias": False,
    "sample_from_anchor": False,
}


def read_draft_config(directory: str | Path, **training_choices: Any) -> DraftConfig:
    """Read the shape of a draft of any family.

    Args:
        directory: holds ``config.json``.
        training_choices: fields of the family's config that replace those of the file, such as ``ttt_steps``; None
            keeps the file's. ``loss_terms`` are factors by name; none of them keeps the file's.

    Raises:
        ValueError: another architecture, a missing key, or a key whose value our network does not run, by name.
    """
    path = Path(directory) / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a draft directory holds {CONFIG_NAME} and {WEIGHTS_NAME}")
    keys = flatten_speculators_config(path, json.loads(path.read_text()))
    architectures = [name for name in keys.get("architectures") or () if name in _READERS]
    if not architectures:
        raise ValueError(f"{path}: architectures is {keys.get('architectures')}; allowed are {list(_READERS)}")
    is_eagle3 = _READERS[architectures[0]] is _read_eagle3
    _check_network(path, keys, has_whole_vocabulary=not is_eagle3)
    rope = keys.get("rope_parameters") or {}
    fields = {
        name: _get_key(path, keys, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    }
    fields |= {
        "num_key_value_heads": keys.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_dim": keys.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "rope_theta": rope.get("rope_theta") or _get_key(path, keys, "rope_theta"),
    }
    if "max_position_embeddings" in keys:
        fields["max_position_embeddings"] = keys["max_position_embeddings"]
    choices = {name: value for name, value in training_choices.items() if value is not None}
    loss_terms = choices.pop("loss_terms", None) or keys.get("loss_terms")
    if loss_terms:
        fields["loss_terms"] = _make_loss_terms(loss_terms)
    return _READERS[architectures[0]](path, keys, fields, choices)


def _make_loss_terms(factors: Mapping[str, float]) -> LossTerms:
    names = [f.name for f in dataclasses.fields(LossTerms)]
    unknown = sorted(factors.keys() - set(names))
    if unknown:
        raise ValueError(f"loss_terms has {unknown}; allowed are {names}")
    return LossTerms(**factors)


def _read_eagle3(path: Path, keys: dict[str, Any], fields: dict[str, Any], choices: dict[str, Any]) -> Eagle3Config:
    _check_values(path, keys, _REQUIRED_EAGLE3_VALUES)
    eagle_config = keys.get("eagle_config") or {}
    if not eagle_config.get("use_aux_hidden_state", True):
        raise ValueError(f"{path}: use_aux_hidden_state is False; the draft supports True")
    layer_inputs = keys.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if not layer_inputs:
        raise ValueError(f"{path}: eagle_aux_hidden_state_layer_ids is missing; the tapped layers cannot be guessed")
    if min(layer_inputs) < 1:
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {layer_inputs}; allowed are ids >= 1 "
            "(0 is the embedding, no layer's output)"
        )
    fields |= {
        "target_layer_ids": tuple(layer - 1 for layer in layer_inputs),
        "norm_before_fc": bool(eagle_config.get("norm_before_fc", keys.get("norm_before_fc", False))),
    }
    if keys.get("draft_vocab_size") not in (None, fields["vocab_size"]):
        fields["draft_vocab_size"] = keys["draft_vocab_size"]
    optional = ("norm_before_residual", "fc_norm", "norm_output", "ttt_steps", "loss_decay")
    return Eagle3Config(**(fields | _pick(keys, optional) | choices))


def _read_dflash(path: Path, keys: dict[str, Any], fields: dict[str, Any], choices: dict[str, Any]) -> DFlashConfig:
    dflash_config = keys.get("dflash_config") or {}
    _check_values(path, dflash_config, _REQUIRED_DFLASH_CONFIG_VALUES)
    fields |= _read_block_fields(path, keys, dflash_config)
    return DFlashConfig(**(fields | choices))


def _read_dspark(path: Path, keys: dict[str, Any], fields: dict[str, Any], choices: dict[str, Any]) -> DSparkConfig:
    if not keys.get("sample_from_anchor", True):
        raise ValueError(f"{path}: sample_from_anchor is False; a DSpark draft supports True")
    fields |= _read_block_fields(path, keys, keys) | {"markov_rank": _get_key(path, keys, "markov_rank")}
    fields |= _pick(keys, ("confidence_weight",))
    if not keys.get("enable_confidence_head", False):
        fields["confidence_weight"] = 0.0
    fields["confidence_head_with_markov"] = bool(keys.get("confidence_head_with_markov", False))
    return DSparkConfig(**(fields | choices))


def _read_block_fields(path: Path, keys: dict[str, Any], family_keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``BlockConfig``; ``family_keys`` are where the family keeps its layers and its mask."""
    _check_values(path, keys, _REQUIRED_BLOCK_VALUES)
    layer_ids = tuple(_get_key(path, family_keys, "target_layer_ids"))
    layer_inputs = keys.get("eagle_aux_hidden_state_layer_ids")
    if layer_inputs and tuple(layer_inputs) != tuple(layer + 1 for layer in layer_ids):
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {layer_inputs} (inputs of layers) and target_layer_ids "
            f"{list(layer_ids)} (outputs); the two must name the same taps"
        )
    layer_types = tuple(keys.get("layer_types") or ())
    if set(layer_types) <= {FULL_ATTENTION}:
        layer_types = ()
    window = keys.get("sliding_window") if SLIDING_ATTENTION in layer_types else None
    mask_token_id = family_keys.get("mask_token_id", keys.get("mask_token_id"))
    if mask_token_id is None:
        raise ValueError(f"{path}: mask_token_id is missing")
    mask_embedding = path.parent / "mask_embedding.pt"
    if mask_embedding.exists():
        raise ValueError(f"{mask_embedding} exists; the draft reads the policy's embedding of its mask token")
    return {
        "target_layer_ids": layer_ids,
        "mask_token_id": mask_token_id,
        "num_hidden_layers": _get_key(path, keys, "num_hidden_layers"),
        "block_size": _get_key(path, keys, "block_size"),
        "layer_types": layer_types,
        "sliding_window": window,
    } | _pick(keys, ("num_anchors", "loss_decay_gamma"))


_READERS: dict[str, Callable[[Path, dict[str, Any], dict[str, Any], dict[str, Any]], DraftConfig]] = {
    "LlamaForCausalLMEagle3": _read_eagle3,
    "Eagle3LlamaForCausalLM": _read_eagle3,
    "DFlashDraftModel": _read_dflash,
    "Qwen3DSparkModel": _read_dspark,
}
"""Reader of each architecture: (path, keys, common fields, training choices) -> config."""


def _pick(keys: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: keys[name] for name in names if name in keys}


def _get_key(path: Path, keys: dict[str, Any], name: str) -> Any:
    if keys.get(name) is None:
        raise ValueError(f"{path}: {name} is missing")
    return keys[name]


def _check_values(path: Path, keys: dict[str, Any], required: dict[str, Any]) -> None:
    for name, value in required.items():
        if keys.get(name, value) != value:
            raise ValueError(f"{path}: {name} is {keys[name]}; the draft supports {value}")


def _check_network(path: Path, keys: dict[str, Any], *, has_whole_vocabulary: bool) -> None:
    _check_values(path, keys, _REQUIRED_VALUES)
    same_values = [("target_hidden_size", "hidden_size")]
    same_values += [("draft_vocab_size", "vocab_size")] if has_whole_vocabulary else []
    for name, same in same_values:
        if keys.get(name) not in (None, keys.get(same)):
            raise ValueError(f"{path}: {name} is {keys[name]}; the draft supports {same}={keys.get(same)}")
    rope_type = (keys.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"{path}: rope_type is {rope_type!r}; the draft supports 'default'")


def load_weights(
    draft: Draft,
    directory: str | Path,
    *,
    policy_embedding: Tensor | None = None,
    policy_head: Tensor | None = None,
) -> None:
    """Copy the weights of ``model.safetensors`` into a draft of the same shape, whatever its layout and dtype.

    Every rank reads the file and keeps its shards; no collective.

    Args:
        draft: materialised (after ``to_empty``).
        directory: holds ``model.safetensors``. An EAGLE-3 layer may be named ``midlayer.`` or ``layers.0.``.
        policy_embedding: ``[V, D]``, needed where the file has an ``embed_tokens.weight``: a draft always reads the
            policy's embedding, so the two must be equal.
        policy_head: ``[V, D]``, the same for an ``lm_head.weight`` of a draft that uses the policy's head.

    Raises:
        ValueError: a missing, left over or misshapen weight, or an embedding or head of its own, by name.
    """
    path = Path(directory) / WEIGHTS_NAME
    if not path.is_file():
        others = sorted(p.name for p in Path(directory).glob("*") if p.suffix in (".bin", ".pt", ".safetensors"))
        raise ValueError(f"{path} does not exist (found {others}); weights are read from this one file")
    weights = load_file(path)
    if isinstance(draft.config, Eagle3Config):
        weights = {name.replace("layers.0.", "midlayer.", 1): weight for name, weight in weights.items()}
    _drop_policy_weight(path, weights, "embed_tokens.weight", "policy_embedding", policy_embedding)
    if draft.lm_head is None:
        _drop_policy_weight(path, weights, "lm_head.weight", "policy_head", policy_head)
    target_ids = None
    if draft.d2t is None:
        _drop_identity_vocabulary(path, weights, draft.config.vocab_size)
    else:
        target_ids = _take_vocabulary(path, weights, draft.d2t.numel(), draft.config.vocab_size)
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
    if target_ids is not None:
        draft.set_vocabulary(target_ids)


def _drop_policy_weight(
    path: Path, weights: dict[str, Tensor], name: str, argument: str, policy_weight: Tensor | None
) -> None:
    own = weights.pop(name, None)
    if own is None:
        return
    if policy_weight is None:
        raise ValueError(f"{path}: has {name}; pass {argument}, which it must equal")
    if own.shape != policy_weight.shape or not torch.equal(own.to(policy_weight), policy_weight):
        raise ValueError(f"{path}: {name} differs from the policy's, which the draft uses")


def _drop_identity_vocabulary(path: Path, weights: dict[str, Tensor], vocab_size: int) -> None:
    offsets, in_draft = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is not None and (offsets.numel() != vocab_size or bool(offsets.any())):
        raise ValueError(f"{path}: d2t maps to a reduced vocabulary; the draft predicts all {vocab_size} tokens")
    if in_draft is not None and (in_draft.numel() != vocab_size or not bool(in_draft.all())):
        raise ValueError(f"{path}: t2d leaves tokens out; the draft predicts all {vocab_size} tokens")


def _take_vocabulary(path: Path, weights: dict[str, Tensor], draft_vocab_size: int, vocab_size: int) -> Tensor:
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None:
        raise ValueError(f"{path}: missing weights ['d2t']; draft_vocab_size={draft_vocab_size} needs the map")
    try:
        return check_vocabulary_maps(d2t, t2d, draft_vocab_size, vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_draft(
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    policy_embedding: Tensor | None = None,
    policy_head: Tensor | None = None,
) -> Draft:
    """Build a draft on the CPU from a directory.

    Args:
        directory: holds ``config.json`` and ``model.safetensors``.
        dtype: of the parameters; None = torch's default dtype.
        policy_embedding: see ``load_weights``.
        policy_head: see ``load_weights``.

    Raises:
        ValueError: see ``read_draft_config`` and ``load_weights``.
    """
    with torch.device("meta"):
        draft = build_draft(read_draft_config(directory))
    draft = draft.to(dtype or torch.get_default_dtype()).to_empty(device="cpu")
    load_weights(draft, directory, policy_embedding=policy_embedding, policy_head=policy_head)
    return draft
