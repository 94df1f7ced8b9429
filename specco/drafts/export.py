"""Write a draft as vLLM serves it: ``config.json`` and ``model.safetensors``, or pairs of name and tensor for a refit.

The policy's embedding is not written, nor its head for a draft that uses it: vLLM then shares its own. A draft's own
``lm_head`` always is. If it equalled the policy's when an engine starts, vLLM would make one module of the two, and the
next refit of the draft would overwrite the policy's head; a head that starts from random values, as ours do, cannot
equal it.

Source: vLLM 0.32, ``model_executor/models/{llama_eagle3,qwen3_dflash,qwen3_dspark}.py`` (names),
``config/speculative.py`` and the ``eagle3_utils.py`` of both model runners (keys); what a runner would otherwise guess
is always written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from specco.drafts.base import Draft, DraftConfig
from specco.drafts.block import FULL_ATTENTION, BlockConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def iterate_weights(draft: Draft, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, whole detached tensor) of every weight, one at a time; a reduced vocabulary's maps last.

    Collective over the meshes of sharded parameters: every rank must run through all pairs.

    Args:
        draft: in any layout.
        dtype: of the weights; None keeps the parameters'.
    """
    for name, parameter in draft.named_parameters():
        weight = parameter.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        yield name, weight if dtype is None else weight.to(dtype)
    yield from draft.named_buffers()


def build_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``config.json`` of a draft, every key that vLLM would otherwise guess included.

    Training choices (``loss_terms`` and the like) are written too; vLLM does not read them.

    Raises:
        ValueError: a family that has no exported form.
    """
    # vLLM counts the input of a layer, which is the output of the one before
    layer_inputs = [layer + 1 for layer in config.target_layer_ids]
    keys = {
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": layer_inputs,
        "target_hidden_size": config.hidden_size,
        "loss_terms": asdict(config.loss_terms),
    }
    if isinstance(config, Eagle3Config):
        return keys | _build_eagle3_keys(config, layer_inputs)
    if isinstance(config, DFlashConfig):
        return keys | _build_block_keys(config) | _build_dflash_keys(config)
    if isinstance(config, DSparkConfig):
        return keys | _build_block_keys(config) | _build_dspark_keys(config)
    raise ValueError(f"cannot export a draft of {type(config).__name__}")


def _build_eagle3_keys(config: Eagle3Config, layer_inputs: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "mlp_bias": False,
        "num_aux_hidden_states": len(layer_inputs),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_inputs,
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "ttt_steps": config.ttt_steps,
        "loss_decay": config.loss_decay,
    }


def _build_block_keys(config: BlockConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "layer_types": list(config.layer_types) or [FULL_ATTENTION] * config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "num_anchors": config.num_anchors,
        "loss_decay_gamma": config.loss_decay_gamma,
    }


def _build_dflash_keys(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
    }


def _build_dspark_keys(config: DSparkConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_weight > 0,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "confidence_weight": config.confidence_weight,
    }


def save_draft(draft: Draft, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a draft in any layout that this rank is part of; see ``save_draft_weights``.

    Args:
        draft: of which ``iterate_weights`` runs through all weights.
        directory: made where it is missing.
        dtype: of the file; None keeps the parameters'.
    """
    save_draft_weights(draft.config, iterate_weights(draft, dtype=dtype), directory)


def save_draft_weights(config: DraftConfig, weights: Iterator[tuple[str, Tensor]], directory: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors``; the old files stay whole until the new ones are.

    Collective where the weights are; global rank 0 alone writes, and other ranks return without waiting for it.

    Args:
        config: of the draft.
        weights: all of ``iterate_weights``, on every rank.
        directory: made where it is missing.

    Raises:
        ValueError: see ``build_config``.
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    held = {}
    for name, weight in weights:
        if is_writer:
            held[name] = weight.cpu().contiguous()
    if not is_writer:
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    content = build_config(config, held["fc.weight"].dtype)
    _replace_file(directory / WEIGHTS_NAME, lambda path: save_file(held, path, metadata={"format": "pt"}))
    _replace_file(directory / CONFIG_NAME, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))


def _replace_file(path: Path, write_fn: Callable[[Path], object]) -> None:
    partial = path.with_name(path.name + ".partial")
    write_fn(partial)
    os.replace(partial, path)
