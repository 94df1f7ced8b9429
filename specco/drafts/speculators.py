"""The config of a speculators checkpoint, put into vLLM's flat form.

Such a config nests the decoder layer's keys, leaves out those at transformers' defaults, and numbers tapped layers by
their inputs. The weights have the same names as in the flat form.

What speculators and vLLM take for a key that is missing differs in two places, ``norm_before_residual`` of EAGLE-3 and
``sliding_window_non_causal`` of DFlash: there the key must be written.

Source: speculators (vllm-project/speculators), ``models/{eagle3,dflash,dspark}/config.py``; vLLM 0.32,
``transformers_utils/configs/speculators/algos.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_TYPE_KEY = "speculators_model_type"
"""Key that only such a config has."""


def flatten_speculators_config(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of vLLM's flat form; ``keys`` themselves where they are no speculators config.

    Raises:
        ValueError: another kind of draft, or a missing key, by name.
    """
    if MODEL_TYPE_KEY not in keys:
        return keys
    kind = keys[MODEL_TYPE_KEY]
    if kind not in _FLATTENERS:
        raise ValueError(f"{path}: {MODEL_TYPE_KEY} is {kind!r}; allowed are {list(_FLATTENERS)}")
    flat = _expand_layer_config(path, keys)
    flat |= {name: keys[name] for name in ("draft_vocab_size", "target_hidden_size") if keys.get(name) is not None}
    return flat | _FLATTENERS[kind](path, keys, flat)


def _expand_layer_config(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Return every key of the decoder layer; those that are left out have transformers' defaults."""
    from transformers import AutoConfig

    layer = keys.get("transformer_layer_config")
    if not isinstance(layer, dict) or "model_type" not in layer:
        raise ValueError(f"{path}: transformer_layer_config is missing, or has no model_type")
    return AutoConfig.for_model(**layer).to_dict()


def _get_key(path: Path, keys: dict[str, Any], name: str, reason: str = "") -> Any:
    if keys.get(name) is None:
        raise ValueError(f"{path}: {name} is missing{reason}")
    return keys[name]


def _flatten_eagle3(path: Path, keys: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    if flat["model_type"] != "llama":
        raise ValueError(f"{path}: the layer has model_type {flat['model_type']!r}; an EAGLE-3 draft supports 'llama'")
    reason = "; speculators takes False for it, vLLM True"
    names = ("norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
    return {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "norm_before_residual": _get_key(path, keys, "norm_before_residual", reason),
    } | {name: keys[name] for name in names if name in keys}


def _flatten_block(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    layer_inputs = _get_key(path, keys, "aux_hidden_state_layer_ids")
    return {
        "block_size": _get_key(path, keys, "block_size"),
        "eagle_aux_hidden_state_layer_ids": layer_inputs,
        "target_layer_ids": [layer - 1 for layer in layer_inputs],
        "mask_token_id": _get_key(path, keys, "mask_token_id"),
    }


def _flatten_dflash(path: Path, keys: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    block = _flatten_block(path, keys)
    for name, value in {"projector_type": "dflash", "shift_label": False}.items():
        if keys.get(name, value) != value:
            raise ValueError(f"{path}: {name} is {keys[name]}; the draft supports {value}")
    if "sliding_attention" in (flat.get("layer_types") or ()):
        reason = "; speculators takes False for it, vLLM True"
        if _get_key(path, keys, "sliding_window_non_causal", reason):
            raise ValueError(f"{path}: sliding_window_non_causal is True; the draft supports False")
    dflash_config = {
        "mask_token_id": block.pop("mask_token_id"),
        "target_layer_ids": block.pop("target_layer_ids"),
        "sample_from_anchor": keys.get("sample_from_anchor", False),
    }
    return block | {"architectures": ["DFlashDraftModel"], "dflash_config": dflash_config}


def _flatten_dspark(path: Path, keys: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": keys.get("sample_from_anchor", False),
    } | (_flatten_block(path, keys) | {name: keys[name] for name in names if name in keys})


_FLATTENERS = {"eagle3": _flatten_eagle3, "dflash": _flatten_dflash, "dspark": _flatten_dspark}
