"""Write a draft as vLLM serves it: ``config.json`` and ``model.safetensors``, or pairs of name and tensor for a refit.

The policy's embedding is not written: vLLM then shares its own. The draft's ``lm_head`` always is. If it equalled the
policy's when an engine starts, vLLM would make one module of the two, and the next refit of the draft would overwrite
the policy's head; a head that starts from random values, as ours do, cannot equal it.

Source: vLLM 0.32, ``model_executor/models/llama_eagle3.py`` (names), ``config/speculative.py`` and the
``eagle3_utils.py`` of both model runners (keys); what a runner would otherwise guess is always written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from specco.drafts.base import Draft
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def iterate_weights(draft: Draft, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, whole detached tensor) of every weight, one at a time.

    Collective over the meshes of sharded parameters: every rank must run through all pairs.

    Args:
        draft: in any layout.
        dtype: of the tensors; None keeps the parameters'.
    """
    for name, parameter in draft.named_parameters():
        weight = parameter.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        yield name, weight if dtype is None else weight.to(dtype)


def build_eagle3_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``config.json`` of an EAGLE-3 draft, every key that vLLM would otherwise guess included.

    The training choices ``ttt_steps`` and ``loss_decay`` are written too; vLLM does not read them.
    """
    # vLLM counts the input of a layer, which is the output of the one before
    layer_inputs = [layer + 1 for layer in config.target_layer_ids]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": layer_inputs,
        "num_aux_hidden_states": len(layer_inputs),
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_inputs,
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "ttt_steps": config.ttt_steps,
        "loss_decay": config.loss_decay,
    }


def save_draft(draft: Draft, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``; the old files stay whole until the new ones are.

    Collective over the meshes of sharded parameters, as ``iterate_weights``; global rank 0 alone writes, and other
    ranks return without waiting for it.

    Args:
        draft: in any layout.
        directory: made where it is missing.
        dtype: of the file; None keeps the parameters'.

    Raises:
        ValueError: a family that has no exported form.
    """
    if not isinstance(draft, Eagle3Draft):
        raise ValueError(f"cannot export a {type(draft).__name__}; allowed are {[Eagle3Draft.__name__]}")
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    weights = {}
    for name, weight in iterate_weights(draft, dtype=dtype):
        if is_writer:
            weights[name] = weight.cpu().contiguous()
    if not is_writer:
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = build_eagle3_config(draft.config, weights["fc.weight"].dtype)
    _replace_file(directory / WEIGHTS_NAME, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    _replace_file(directory / CONFIG_NAME, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def _replace_file(path: Path, write_fn: Callable[[Path], object]) -> None:
    partial = path.with_name(path.name + ".partial")
    write_fn(partial)
    os.replace(partial, path)
