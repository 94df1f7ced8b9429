"""Print what a full-size learner needs of one GPU's memory, part by part, with the formula of each.

    PYTHONPATH=. python tools/estimate_memory.py qwen3_8b_eagle3 --tokens 16384 65536 262144

Weights, gradients and optimizer are counted on the meta device, parameter by parameter. Activations, taps and buffers
are formulas: they leave out what the allocator loses, what kernels need for themselves, and the engine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC

from recipes.full_size import CONFIGS
from specco.distributed.draft_plan import COLUMNS, GATHERED_COLUMNS, ROWS, VOCABULARY
from specco.drafts.block import BlockConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.titan.learner import Learner
from specco.titan.policy import Policy
from specco.titan.stages import PipelineShape

GIB = 2**30
ACCUMULATOR_BYTES = 4

FORMULAS = {
    "weights": "master parameters / ranks that share them",
    "gradients": "as weights",
    "optimizer": "AdamW: 2 x weights",
    "gathered": "2 largest layers + embedding + head + draft, in compute dtype, / tp (experts / ep); "
    "pp > 1: the whole stage, and its gradients in reduce dtype",
    "activations": "microbatches in flight x layers x T x D / tp, recomputed: + 2 x what one layer saves",
    "draft": "(passes or layers + 1) x draft rows x what a draft layer saves",
    "head": "chunk rows x V / tp x (compute bytes + 3 x 4)",
    "taps": "T x D x (taps + embeddings); pp > 1: + a slot x T x D / tp for each sent tap and microbatch in flight",
    "pipeline": "pp > 1: microbatches x T x D / tp, each way",
    "ring": "cp > 1: K and V of T rows, / tp: 2 buffers in compute dtype and 2 in float32",
}
"""T: rows of one GPU, tokens / cp. D, V, K, H: width, vocabulary, key heads, head size.

Of a pipeline the figures are those of the rank that needs most, under 1F1B: stage i of n has n - i microbatches in
flight, and two microbatches a stage are assumed.
"""


def estimate(config: Learner.Config, tokens: int, *, document_tokens: int = 4096) -> dict[str, float]:
    """Return bytes of one GPU by part, the parts of ``FORMULAS``.

    Args:
        config: with a model, its draft, all degrees stated, and full activation checkpointing.
        tokens: of one packed microbatch, global.
        document_tokens: length of a document; block drafts draw their anchors per document.

    Raises:
        ValueError: degrees left to the number of ranks, or another kind of activation checkpointing.
    """
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree < 1:
        raise ValueError("parallelism.data_parallel_shard_degree is -1; an estimate needs it stated")
    if not isinstance(config.activation_checkpoint, FullAC.Config):
        raise ValueError("activation_checkpoint is not FullAC.Config; activations are estimated for that alone")
    if parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule != "1F1B":
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule is {parallelism.pipeline_parallel_schedule!r}; an estimate "
            'supports "1F1B"'
        )
    policy = build_on_meta(config)
    if parallelism.pipeline_parallel_degree == 1:
        return _estimate_stage(config, policy, None, tokens, document_tokens)
    ranks = range(parallelism.pipeline_parallel_degree)
    shapes = [PipelineShape.build(policy.config, parallelism, rank) for rank in ranks]
    stages = [_estimate_stage(config, shape.cut(policy)[0], shape, tokens, document_tokens) for shape in shapes]
    return max(stages, key=lambda parts: sum(parts.values()))


def _estimate_stage(
    config: Learner.Config, part: Policy, shape: PipelineShape | None, tokens: int, document_tokens: int
) -> dict[str, float]:
    """Return the bytes of a rank that has ``part``: the whole policy, or one stage of it."""
    parallelism, training = config.parallelism, config.training
    tp, cp, ep = (getattr(parallelism, f"{axis}_parallel_degree") for axis in ("tensor", "context", "expert"))
    fsdp = parallelism.data_parallel_shard_degree * cp
    master = TORCH_DTYPE_MAP[training.dtype].itemsize
    compute = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    # experts have all ranks of "fsdp" and "tp": those of "ep" and those that are left, "efsdp"
    num_ranks = {"": fsdp, "tp": fsdp * tp, "ep": fsdp * tp}
    kept = sum(parameter.numel() / num_ranks[axis] for _, parameter, axis in iterate_cuts(part))
    rows = math.ceil(tokens / cp)
    model, draft = part.config, part.config.draft
    assert draft is not None
    kv_width = max(a.n_kv_heads * a.head_dim for a in (layer.attention for layer in model.layers))
    kv_width = max(kv_width, draft.num_key_value_heads * draft.head_dim) / tp
    saved = max(count_saved(layer, rows, tp, ep) for layer in model.layers)
    boundary = compute * rows * model.dim / (tp if parallelism.enable_sequence_parallel else 1)
    parts = dict.fromkeys(FORMULAS, 0.0) | {
        "weights": master * kept,
        "gradients": master * kept,
        "optimizer": 2 * master * kept,
        "gathered": compute * count_gathered(part, tp, ep),
        "activations": len(part.layers) * boundary + 2 * compute * saved,
        "ring": 2 * rows * kv_width * (2 * compute + 2 * ACCUMULATOR_BYTES) if cp > 1 else 0.0,
    }
    if part.draft is not None:
        draft_rows, num_runs = count_draft_rows(draft, rows, document_tokens)
        parts["draft"] = compute * (num_runs + 1) * draft_rows * count_saved_by_draft(draft, tp)
        parts["head"] = config.chunk_rows * model.vocab_size / tp * (compute + 3 * ACCUMULATOR_BYTES)
        parts["taps"] = compute * rows * model.dim * (len(draft.target_layer_ids) + 1)
    if shape is not None:
        (stage,) = shape.own
        in_flight = shape.num_stages - stage
        degrees = {"": 1, "tp": tp, "ep": ep}
        whole = sum(parameter.numel() / degrees[axis] for _, parameter, axis in iterate_cuts(part))
        parts["gathered"] = whole * (compute + TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize)
        parts["activations"] = in_flight * len(part.layers) * boundary + 2 * compute * saved
        num_ways = (stage > 0) + (stage < shape.num_stages - 1)
        parts["pipeline"] = num_ways * 2 * shape.num_stages * boundary
        if part.draft is not None:
            parts["taps"] += sum(boundary * (shape.num_stages - tap.stage) for tap in shape.list_taps(part))
    return parts


def build_on_meta(config: Learner.Config) -> Policy:
    """Return the policy with its sharding plan written, without memory."""
    assert config.model_spec is not None
    model = cast(Policy.Config, config.model_spec.model)
    model.update_from_config(config=SimpleNamespace(parallelism=config.parallelism))
    with torch.device("meta"):
        return model.build()


def iterate_cuts(policy: Policy) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield (name, parameter, axis that it is cut over besides FSDP's: "tp", "ep" or none), each parameter once."""
    for module_name, module in policy.named_modules():
        name = module_name.rpartition(".")[2]
        for parameter_name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{parameter_name}"
            if module_name.startswith("draft"):
                is_cut = name in (*COLUMNS, *GATHERED_COLUMNS, *ROWS, *VOCABULARY)
                yield full_name, parameter, "tp" if is_cut else ""
                continue
            sharding = cast(Any, module)._sharding_config
            assert sharding is not None, f"{module_name} has no sharding plan"
            kinds = sharding.state_shardings[parameter_name].axis_types
            axes = [axis.value for axis, kind in kinds.items() if str(kind).startswith("S")]
            yield full_name, parameter, axes[0] if axes else ""


def count_gathered(policy: Policy, tp: int, ep: int) -> float:
    """Return the parameters that are whole at once: two layers, embedding, final norm, head, and the draft."""
    degrees = {"": 1, "tp": tp, "ep": ep}
    by_unit: dict[str, float] = {}
    for name, parameter, axis in iterate_cuts(policy):
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "others"
        by_unit[unit] = by_unit.get(unit, 0.0) + parameter.numel() / degrees[axis]
    return by_unit.pop("others", 0.0) + sum(sorted(by_unit.values())[-2:])


def count_saved(layer: Any, rows: int, tp: int, ep: int) -> float:
    """Return the values that one layer keeps for its backward: inputs of norms and products, heads before and after."""
    attention, dim = layer.attention, layer.attention.dim
    heads = (attention.n_heads + 2 * attention.n_kv_heads) * attention.head_dim
    per_row = 4 * dim + (2 * heads + attention.n_heads * attention.head_dim) / tp
    if layer.moe is None:
        return rows * (per_row + 3 * layer.feed_forward.w1.out_features / tp)
    # each row goes to top_k experts; evenly spread over "ep", whose ranks of "tp" send a part each, a rank gets as many
    # rows as it sends; without "ep" each rank of "tp" runs all rows through its part of every expert
    hidden_dim = layer.moe.routed_experts.inner_experts.hidden_dim
    per_expert = (2 * dim + 3 * hidden_dim) / tp if ep > 1 else 2 * dim + 3 * hidden_dim / tp
    return rows * (per_row + layer.moe.router.top_k * per_expert)


def count_saved_by_draft(draft: Any, tp: int) -> float:
    """Return the values per row that one layer of a draft keeps for its backward."""
    heads = (draft.num_attention_heads + 2 * draft.num_key_value_heads) * draft.head_dim
    own = 2 * heads + draft.num_attention_heads * draft.head_dim + 3 * draft.intermediate_size
    return 4 * draft.hidden_size + own / tp


def count_draft_rows(draft: Any, rows: int, document_tokens: int) -> tuple[int, int]:
    """Return (rows of one GPU that a layer of a draft computes, runs of such a layer).

    EAGLE-3 runs its one layer over all rows, pass by pass; a block draft runs its layers over the slots of its blocks.
    """
    if isinstance(draft, Eagle3Config):
        return rows, draft.ttt_steps
    assert isinstance(draft, BlockConfig)
    return math.ceil(rows / document_tokens * draft.num_anchors) * draft.block_size, draft.num_hidden_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", choices=sorted(CONFIGS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--document-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    columns = []
    for tokens in arguments.tokens:
        config = CONFIGS[arguments.config]()
        columns.append(estimate(config, tokens, document_tokens=arguments.document_tokens))
    print(f"{arguments.config}: GiB of one GPU, by tokens of a microbatch")
    print(f"{'':12}" + "".join(f"{tokens:>10}" for tokens in arguments.tokens))
    for part, formula in FORMULAS.items():
        print(f"{part:12}" + "".join(f"{column[part] / GIB:10.2f}" for column in columns) + f"   {formula}")
    print(f"{'sum':12}" + "".join(f"{sum(column.values()) / GIB:10.2f}" for column in columns))


if __name__ == "__main__":
    main()
