"""What co-training costs: one update of policy and draft against one of the policy alone, in turn, on the same batch.

    PYTHONPATH=. torchrun --nproc-per-node 1 tools/bench_cotraining.py --families eagle3 dflash --tokens 4096 8192 16384

Weights are random: the cost does not depend on them. A batch is documents of ``--document`` tokens whose second half is
trained. Times are CPU seconds of the process, which other jobs change less than wall time; memory is the peak growth of
the resident set in one step. Beside the ratios stand those of the multiply-adds, counted for every product of the step
(attention, which hides its products in one op, by formula: pairs of query and key that see each other).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_memory import read_growth, reset_peak
from torch.utils.flop_counter import FlopCounterMode

from specco.titan import cpu_support

cpu_support.apply()

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402

from specco.drafts.anchors import sample_anchors  # noqa: E402
from specco.drafts.block import BlockConfig  # noqa: E402
from specco.drafts.dflash.config import DFlashConfig  # noqa: E402
from specco.drafts.dspark.config import DSparkConfig  # noqa: E402
from specco.drafts.eagle3.config import Eagle3Config  # noqa: E402
from specco.drafts.eagle3.loss import find_anchors  # noqa: E402
from specco.packing import PackedTokens, pack_documents  # noqa: E402
from specco.rl.grpo import GrpoLoss  # noqa: E402
from specco.titan.head import _ChunkLoop  # noqa: E402
from specco.titan.learner import Learner, policy_and_draft_groups  # noqa: E402
from specco.titan.registry import make_model_spec  # noqa: E402
from specco.titan.sizes import make_policy_config  # noqa: E402

NUM_LAYERS, WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 12, 256, 4, 2, 64, 4096
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "target_layer_ids": (1, 5, 9),
}
BLOCKS: dict[str, Any] = {"num_hidden_layers": 2, "block_size": 8, "mask_token_id": 0, "num_anchors": 64}
FAMILIES = {
    "eagle3": Eagle3Config(**SHAPE),
    "dflash": DFlashConfig(**SHAPE, **BLOCKS),
    "dspark": DSparkConfig(**SHAPE, **BLOCKS, markov_rank=64),
}


def build_learner(family: str | None) -> Learner:
    """Build the learner of the policy alone (None) or with a draft."""
    sizes = {"num_layers": NUM_LAYERS, "dim": WIDTH, "hidden_dim": 3 * WIDTH, "vocab_size": VOCAB_SIZE}
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    draft = None if family is None else FAMILIES[family]
    return Learner.Config(
        model_spec=make_model_spec(make_policy_config("qwen3", **sizes, **heads), flavor="bench", draft=draft),
        optimizer=OptimizersContainer.Config(
            param_groups=policy_and_draft_groups(1e-4, None if draft is None else 1e-4)
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    ).build()


def make_tokens(num_tokens: int, document_length: int) -> PackedTokens:
    """Return one microbatch of whole documents."""
    generator = torch.Generator().manual_seed(0)
    count = num_tokens // document_length
    (tokens,) = pack_documents(
        [torch.randint(1, VOCAB_SIZE, (document_length,), generator=generator) for _ in range(count)],
        [torch.arange(document_length) >= document_length // 2] * count,
        max_tokens=num_tokens,
        row_values={
            "inference_logprobs": [-torch.rand(document_length, generator=generator) for _ in range(count)],
            "advantages": [torch.randn((), generator=generator).expand(document_length) for _ in range(count)],
        },
    )
    return tokens


def count_multiply_adds(learner: Learner, tokens: PackedTokens) -> float:
    """Return the multiply-adds of one step; the backward of attention takes 2.5 times its forward."""
    counter = FlopCounterMode(display=False)
    with counter:
        learner.step([tokens], GrpoLoss())
    positions = tokens.position_ids.double()
    pairs = NUM_LAYERS * float((positions + 1).sum())
    config = None if learner.draft is None else learner.draft.config
    if isinstance(config, Eagle3Config):
        is_anchor = find_anchors(tokens, config.ttt_steps)
        pairs += sum(float((positions[is_anchor] + 1 + d).sum()) for d in range(config.ttt_steps))
    elif isinstance(config, BlockConfig):
        anchors = sample_anchors(tokens, config.num_anchors)
        block = config.block_size
        pairs += config.num_hidden_layers * float((positions[anchors] * block + block * block).sum())
    return counter.get_total_flops() / 2 + 3.5 * 2 * pairs * NUM_HEADS * HEAD_DIM


@contextmanager
def time_pieces(learner: Learner, seconds: dict[str, float]) -> Iterator[None]:
    """Add the CPU seconds of the draft's forward and of its part of the head to ``seconds``."""

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
            return result

        return run

    if learner.draft is None:
        yield
        return
    draft, head = learner.draft, _ChunkLoop
    with (
        patch.object(draft, "forward", timed("draft_forward", draft.forward)),
        patch.object(head, "_run_draft", timed("draft_head", head._run_draft)),
    ):
        yield


def measure_step(learner: Learner, tokens: PackedTokens) -> dict[str, float]:
    """Return CPU seconds and peak growth in MiB of one step, and the CPU seconds of its pieces."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    resident = reset_peak()
    pieces: dict[str, float] = {}
    with time_pieces(learner, pieces):
        start = time.process_time()
        learner.step([tokens], GrpoLoss())
        seconds = time.process_time() - start
    return {"seconds": seconds, "peak_mib": read_growth(resident), **pieces}


def compare(family: str, tokens: PackedTokens, repeats: int) -> dict[str, Any]:
    """Return medians of both learners, in turn, and the ratios."""
    learners = {"policy": build_learner(None), "joint": build_learner(family)}
    work = {name: count_multiply_adds(learner, tokens) for name, learner in learners.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in learners}
    for _ in range(repeats):
        for name, learner in learners.items():
            rows[name].append(measure_step(learner, tokens))
    medians = {
        name: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for name, measured in rows.items()
    }
    ratios = [j["seconds"] / p["seconds"] for p, j in zip(rows["policy"], rows["joint"], strict=True)]
    extra, extra_work = statistics.median(ratios) - 1, work["joint"] / work["policy"] - 1
    return {
        "family": family,
        "tokens": tokens.num_tokens,
        **medians,
        "added_time": extra,
        "added_multiply_adds": extra_work,
        "time_per_multiply_add": extra / extra_work,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["eagle3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for family in args.families:
        for num_tokens in args.tokens:
            print(json.dumps(compare(family, make_tokens(num_tokens, args.document), args.repeats)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
