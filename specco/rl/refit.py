"""What a refit may write: names and shapes, and which tensors belong to whom."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from specco.rl.vllm_mends import LIVE_LINEAR_WEIGHTS, check_experts, get_vllm_version, is_cpu_build


def read_weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in a directory's safetensors files, from their headers.

    Raises:
        ValueError: a directory without safetensors files.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path!r} has no *.safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            names = list(reader.keys())
            shapes.update({name: tuple(reader.get_slice(name).get_shape()) for name in names})
    return shapes


def check_weights(
    kind: str, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return ``weights`` as a dict; raise ValueError unless names and shapes are exactly those of ``shapes``."""
    given: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, value in weights:
        if name in given:
            problems.append(f"{name} is given twice")
        elif name not in shapes:
            problems.append(f"{name} is unknown")
        elif tuple(value.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(value.shape)}, not {shapes[name]}")
        given[name] = value
    problems += [f"{name} is missing" for name in shapes if name not in given]
    if problems:
        raise ValueError(f"{kind} weights do not fit the engine, nothing was written: " + "; ".join(problems))
    return given


def check_live_weights(kind: str, model: nn.Module) -> None:
    """Raise RuntimeError when a parameter of ``model`` was packed, so that a refit could not reach it."""
    check_experts(model, get_vllm_version(), is_cpu_build())
    names = [name for name, value in model.named_parameters() if value.numel() == 0]
    if names:
        raise RuntimeError(
            f"vLLM emptied {len(names)} {kind} parameters ({names[0]}, ...) for packed kernels; they cannot be "
            f"refitted. Needed on a CPU: the mend {LIVE_LINEAR_WEIGHTS.name}."
        )


def separate_draft(policy: Any, draft: Any, draft_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Undo the sharing of modules that the draft's own checkpoint holds.

    vLLM gives the draft the policy's embedding or lm_head module when the values are equal at start-up; a refit of the
    draft would then overwrite the policy. An lm_head gets a copy of its own. An embedding is refused: what a draft is
    trained on is the policy's embedding as it moves, which it gets when its directory holds none.

    Raises:
        ValueError: the draft's directory holds a copy of the policy's embedding.
    """
    if "embed_tokens.weight" in draft_shapes and draft.model.embed_tokens is policy.model.embed_tokens:
        raise ValueError(
            "the draft's directory holds embed_tokens.weight, equal to the policy's: vLLM shares one module for both, "
            "and refitting the draft would overwrite the policy. Leave it out of the draft's directory."
        )
    if "lm_head.weight" in draft_shapes and draft.lm_head is policy.lm_head:
        shared = policy.lm_head
        own = copy.deepcopy(shared)
        for name, value in shared.named_parameters():  # a copied parameter loses its attributes (weight_loader)
            vars(own.get_parameter(name)).update(vars(value))
        draft.lm_head = own
