"""Mends of vLLM's CPU build, each tied to the versions it was checked on.

Every mend replaces one function or flag of vLLM from outside. They are applied by ``apply_mends`` alone: by the rollout
engine before it builds vLLM, and by the ``vllm.general_plugins`` entry point in vLLM's own worker processes. On other
platforms, and for versions that nobody checked, nothing is touched; ``check_sampled_speculation``, ``check_method`` and
``check_experts`` then refuse the uses that would give wrong samples, drafts or refits without a word.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mend:
    """One repair of vLLM.

    Args:
        name: short name, for logs and errors.
        reason: what goes wrong without it.
        versions: versions of vLLM that it was checked on.
        apply: makes the repair in this process; doing it twice is harmless.
    """

    name: str
    reason: str
    versions: frozenset[str]
    apply: Callable[[], None]


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value once per draft token of that request.

    Args:
        x: ``[batch]``, one value a request (temperature, top-k or top-p).
        cu_num_tokens: ``[batch]``, cumulative number of draft tokens, without the leading zero.
        num_tokens: tokens in all.
        replace_from: value that is replaced; nothing is when it equals ``replace_to``.
        replace_to: the value put there.

    Returns:
        ``[num_tokens]``, dtype of ``x``.
    """
    if replace_from != replace_to:
        x = x.masked_fill(x == replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.repeat_interleave(counts, output_size=num_tokens)


def count_not_below(x: Tensor, values: Tensor) -> Tensor:
    """Return int64 ``[rows]``: entries of each row of ``x`` ``[rows, V]`` that are >= ``values`` ``[rows, 1]``."""
    return (x >= values).sum(-1)


def rebind_kernels(overrides: Sequence[tuple[Any, Any]]) -> None:
    """Point every reference to a Triton kernel inside vLLM at its replacement; no other package holds one.

    Args:
        overrides: (kernel, replacement) pairs. References are attributes of modules, and the attribute ``kernel`` of
            such attributes, whose cached ``_kernel_arg_names`` then goes.
    """
    replacements = {id(kernel): replacement for kernel, replacement in overrides}
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"]
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
                continue
            fields = getattr(value, "__dict__", None)
            if isinstance(fields, Mapping) and id(fields.get("kernel")) in replacements:
                value.kernel = replacements[id(fields["kernel"])]
                if not isinstance(value, type):
                    value.__dict__.pop("_kernel_arg_names", None)


def _never_pack(n: int, k: int, dtype: torch.dtype) -> bool:
    """Say of every linear weight that vLLM's kernel for small packed ones (AMX) does not take it."""
    return False


def compute_experts(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
    isa: str,
    is_weighed: bool = False,
) -> None:
    """Run each expert on its tokens, from weights as they are loaded; a call of vLLM's ``cpu_fused_moe``.

    Args:
        out: ``[T, D]``, written: the weighted sum over a token's experts.
        x: ``[T, D]``, tokens.
        w13: ``[E, 2 * F, D]``, gates above ups.
        w2: ``[E, D, F]``.
        w13_bias: not supported.
        w2_bias: not supported.
        weights: ``[T, K]``, of a token's experts.
        expert_ids: ``[T, K]``.
        activation: "silu" is supported.
        isa: of the packed kernel; not used.
        is_weighed: whether ``x`` holds the weights already.

    Raises:
        ValueError: biases, or another activation.
    """
    if activation != "silu" or w13_bias is not None or w2_bias is not None:
        raise ValueError(f"experts have activation {activation!r} or biases; supported are 'silu' and none")
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in expert_ids.unique().tolist():
        tokens, slots = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ w13[expert].t()).chunk(2, dim=-1)
        rows = ((F.silu(gate) * up) @ w2[expert].t()).float()
        total.index_add_(0, tokens, rows if is_weighed else rows * weights[tokens, slots, None])
    out.copy_(total)


def _keep_expert_weights(experts: Any, layer: Any) -> None:
    """Take a layer's weights as they are: neither padded nor packed."""
    experts._use_zentorch = False


def normalize_context_keys(model: Any, keys: Tensor) -> Tensor:
    """Return a block draft's context keys under the k_norm of each layer.

    Args:
        model: vLLM's ``DFlashQwen3Model``.
        keys: ``[layers, context rows, heads, H]``.
    """
    from vllm import _custom_ops

    out = torch.empty_like(keys)
    for layer_out, layer_keys, weight in zip(out, keys, model._k_norm_weights, strict=True):
        _custom_ops.rms_norm(layer_out, layer_keys.contiguous(), weight, model._rms_norm_eps)
    return out


def _replace(owner: object, name: str, value: object) -> None:
    """Set an attribute that must exist: a mend of something that is gone would mend nothing."""
    if not hasattr(owner, name):
        raise RuntimeError(f"vLLM {get_vllm_version()} has no {owner}.{name}; the mend that replaces it is out of date")
    setattr(owner, name, value)


def _mend_expand_batch_to_tokens() -> None:
    from vllm.v1.sample import rejection_sampler

    _replace(rejection_sampler, "expand_batch_to_tokens", expand_batch_to_tokens)


def _mend_live_linear_weights() -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _replace(_custom_ops, "_supports_onednn", False)
    _replace(utils, "check_cpu_sgl_kernel", _never_pack)


def _mend_live_expert_weights() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    _replace(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", _keep_expert_weights)
    _replace(cpu_moe, "cpu_fused_moe", compute_experts)


def _mend_rebind_kernels() -> None:
    from vllm.triton_utils import dispatcher

    _replace(dispatcher, "_rebind_kernels", rebind_kernels)


def _mend_token_ranks() -> None:
    from vllm.v1.sample import sampler

    _replace(sampler, "batched_count_greater_than", count_not_below)


def _mend_context_keys() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    _replace(DFlashQwen3Model, "_normalize_context_k", normalize_context_keys)


def _mend_dspark() -> None:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    from specco.rl.vllm_dspark import BlockProposer

    if gpu_model_runner.DFlashProposer is BlockProposer:
        return  # done before
    list_unsupported = VllmConfig._get_v1_model_runner_unsupported_features
    _replace(
        VllmConfig,
        "_get_v1_model_runner_unsupported_features",
        lambda config: [name for name in list_unsupported(config) if name != "dspark speculative decoding"],
    )
    _replace(SpeculativeConfig, "use_dflash", lambda config: config.method in ("dflash", "dspark"))
    _replace(gpu_model_runner, "DFlashProposer", BlockProposer)
    # the runner's own look-up passes over the key of DSpark and falls back to default layers
    _replace(
        gpu_model_runner.GPUModelRunner,
        "_get_eagle3_aux_layers_from_config",
        lambda runner: get_eagle3_aux_layers_from_config(runner.speculative_config),
    )


EXPAND_BATCH_TO_TOKENS = Mend(
    name="expand_batch_to_tokens",
    reason="the CPU stand-in writes into a copy, so that temperature, top-k and top-p of verified tokens are "
    "uninitialised memory and sampled speculation follows a wrong distribution",
    versions=frozenset({"0.32.0"}),
    apply=_mend_expand_batch_to_tokens,
)
LIVE_LINEAR_WEIGHTS = Mend(
    name="live_linear_weights",
    reason="linear weights are packed for oneDNN or AMX and the parameter is emptied, so that no refit can reach them",
    versions=frozenset({"0.32.0"}),
    apply=_mend_live_linear_weights,
)
LIVE_EXPERT_WEIGHTS = Mend(
    name="live_expert_weights",
    reason="experts are packed for one kernel, under the names and shapes of the weights, so that a refit writes what "
    "that kernel reads wrongly",
    versions=frozenset({"0.32.0"}),
    apply=_mend_live_expert_weights,
)
REBIND_KERNELS = Mend(
    name="rebind_kernels",
    reason="every object of every imported module is searched for Triton kernels, and one of another package whose "
    "__dict__ is no dict (llvmlite has such) ends the start of the engine with an AttributeError",
    versions=frozenset({"0.32.0"}),
    apply=_mend_rebind_kernels,
)
TOKEN_RANKS = Mend(
    name="token_ranks",
    reason="one comparison is compiled with a C++ compiler at the first request that wants logprobs, which takes up to "
    "50 s and needs that compiler",
    versions=frozenset({"0.32.0"}),
    apply=_mend_token_ranks,
)
CONTEXT_KEYS = Mend(
    name="context_keys",
    reason="the CPU's rms_norm takes the k_norm weight of the first layer for every layer of a DFlash or DSpark draft, "
    "whose drafts are then wrong",
    versions=frozenset({"0.32.0"}),
    apply=_mend_context_keys,
)
DSPARK = Mend(
    name="dspark",
    reason="the one model runner of the CPU build refuses DSpark and would tap default layers",
    versions=frozenset({"0.32.0"}),
    apply=_mend_dspark,
)
MENDS = (
    EXPAND_BATCH_TO_TOKENS,
    LIVE_LINEAR_WEIGHTS,
    LIVE_EXPERT_WEIGHTS,
    REBIND_KERNELS,
    TOKEN_RANKS,
    CONTEXT_KEYS,
    DSPARK,
)
METHOD_MENDS = {"eagle3": (), "dflash": (CONTEXT_KEYS,), "dspark": (CONTEXT_KEYS, DSPARK)}
"""Mends without which a CPU build does not serve a draft family as it is trained, by vLLM's name of the family."""


def get_vllm_version() -> str:
    """Return vLLM's release without build suffixes: ``0.32.0`` for ``0.32.0+cpu``."""
    import vllm

    return vllm.__version__.split("+")[0]


def is_cpu_build() -> bool:
    """Tell whether vLLM runs on its CPU platform in this process."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def select_mends(version: str, is_cpu: bool) -> list[Mend]:
    """Return the mends that were checked on ``version`` and belong to this platform."""
    return [mend for mend in MENDS if is_cpu and version in mend.versions]


def apply_mends() -> list[str]:
    """Repair vLLM in this process and return the names of the mends made; say which were left out and why."""
    version, is_cpu = get_vllm_version(), is_cpu_build()
    selected = select_mends(version, is_cpu)
    for mend in selected:
        mend.apply()
    if is_cpu and len(selected) < len(MENDS):
        for mend in MENDS:
            if mend not in selected:
                logger.warning(
                    "vLLM %s: %s is not mended (checked on %s): %s",
                    version,
                    mend.name,
                    ", ".join(sorted(mend.versions)),
                    mend.reason,
                )
    return [mend.name for mend in selected]


def check_sampled_speculation(version: str, is_cpu: bool) -> None:
    """Refuse speculative sampling at temperature > 0 on a CPU build that was not checked.

    Raises:
        RuntimeError: ``version`` is not among those that the mend of the rejection sampler was checked on.
    """
    mend = EXPAND_BATCH_TO_TOKENS
    if is_cpu and version not in mend.versions:
        raise RuntimeError(
            f"speculative decoding at temperature > 0 is refused on vLLM {version} (CPU): {mend.reason}; the mend was "
            f"checked on {', '.join(sorted(mend.versions))} only. Use temperature 0, no draft, or a checked version."
        )


def check_method(method: str, version: str, is_cpu: bool) -> None:
    """Refuse a draft family on a CPU build that was not checked for it.

    Raises:
        RuntimeError: ``version`` is not among those that a mend of ``METHOD_MENDS`` was checked on.
    """
    for mend in METHOD_MENDS[method]:
        if is_cpu and version not in mend.versions:
            raise RuntimeError(
                f"method {method!r} is refused on vLLM {version} (CPU): {mend.reason}; the mend was checked on "
                f"{', '.join(sorted(mend.versions))} only"
            )


def check_experts(model: nn.Module, version: str, is_cpu: bool) -> None:
    """Refuse a model with experts on a CPU build that was not checked: its refits would be wrong.

    Raises:
        RuntimeError: ``version`` is not among those that the mend of the experts was checked on.
    """
    mend = LIVE_EXPERT_WEIGHTS
    has_experts = any(name.endswith(".w13_weight") for name, _ in model.named_parameters())
    if has_experts and is_cpu and version not in mend.versions:
        raise RuntimeError(
            f"a model with experts is refused on vLLM {version} (CPU): {mend.reason}; the mend was checked on "
            f"{', '.join(sorted(mend.versions))} only"
        )


def keep_process_groups() -> None:
    """Make the shutdown of an in-process engine leave torch.distributed alone.

    vLLM ends an engine by destroying its subgroups *and the default process group*, which in this process is the
    learner's; the same code runs when a forgotten engine is garbage-collected. vLLM's groups are subgroups of the
    default one and share its life: they end with ``torch.distributed.destroy_process_group()``, and the next engine of
    the process uses them again (``destroy_process_groups`` is for groups that no learner made). Needed on every
    platform and only for in-process engines.
    """
    from vllm.v1.engine import core

    _replace(core, "cleanup_dist_env_and_memory", _collect_garbage)


def destroy_process_groups() -> None:
    """Destroy the default process group and vLLM's own groups in it: for a process where vLLM made them all."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def _collect_garbage(shutdown_ray: bool = False) -> None:
    assert not shutdown_ray, "an in-process engine has no Ray cluster to shut down"
    gc.unfreeze()
    gc.collect()
