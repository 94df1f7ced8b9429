"""How a policy is cut into stages: every module on one of them, and what the draft is sent from the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.config.configs import ParallelismConfig

from specco.distributed.pipeline_order import SCHEDULES
from specco.drafts.base import DraftConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.titan.parallelize import check_model
from specco.titan.policy import Policy
from specco.titan.sizes import make_policy_config
from specco.titan.stages import PipelineShape

SIZES: dict[str, Any] = {"vocab_size": 11, "num_layers": 7, "dim": 8, "hidden_dim": 8, "num_heads": 2, "head_dim": 4}
DRAFT: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 11,
}
DRAFTS: dict[str, DraftConfig] = {
    "eagle3": Eagle3Config(target_layer_ids=(0, 3, 6), **DRAFT),
    "dflash": DFlashConfig(
        target_layer_ids=(1, 4, 5), num_hidden_layers=1, block_size=2, mask_token_id=10, num_anchors=1, **DRAFT
    ),
}


def make_config(draft: str | None = "eagle3", **changes: Any) -> Policy.Config:
    config = make_policy_config("qwen3", num_kv_heads=2, **(SIZES | changes))
    config.draft = None if draft is None else DRAFTS[draft]
    return config


def build(config: Policy.Config) -> Policy:
    with torch.device("meta"):
        return config.build()


def make_parallelism(schedule: str, degree: int = 2, **changes: Any) -> ParallelismConfig:
    return ParallelismConfig(pipeline_parallel_degree=degree, pipeline_parallel_schedule=schedule, **changes)


WHOLE = ["tok_embeddings", *(f"layers.{i}" for i in range(7)), "norm", "lm_head"]


def name_stages(schedule: str, *stages: list[str]) -> ParallelismConfig:
    return make_parallelism(schedule, module_fqns_per_model_part=list(stages))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degree", [2, 4])
def test_every_parameter_is_on_one_stage(schedule: str, degree: int) -> None:
    config, parallelism = make_config(), make_parallelism(schedule, degree)
    whole = build(config)
    names, stages = [], []
    for rank in range(degree):
        shape = PipelineShape.build(config, parallelism, rank)
        parts = shape.cut(whole)
        stages += shape.own
        assert [shape.ranks[stage] for stage in shape.own] == [rank] * len(shape.own)
        for stage, part in zip(shape.own, parts, strict=True):
            assert (part.draft is not None) == (stage == shape.num_stages - 1)
            names += [name for name, _ in part.named_parameters()]
    assert sorted(stages) == list(range(degree * (1 if schedule in ("GPipe", "1F1B") else 2)))
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        ("GPipe", {1: 1, 5: 5}),
        ("1F1B", {1: 4, 4: 4, 5: 5}),
        ("Interleaved1F1B", {1: 8, 8: 8, 9: 12}),
        ("ZBVZeroBubble", {1: 8, 8: 8, 9: 12}),
    ],
)
def test_schedules_get_the_microbatches_they_can_run(schedule: str, numbers: dict[int, int]) -> None:
    shape = PipelineShape.build(make_config(), make_parallelism(schedule, 4), 0)
    assert {number: shape.round_up(number) for number in numbers} == numbers


def test_a_tapped_layer_right_before_the_draft_is_not_sent() -> None:
    """Layers 0 to 3 are on stage 0 and 4 to 6 on stage 1, whose input is layer 3's output."""
    shape = PipelineShape.build(make_config(), make_parallelism("1F1B"), 0)
    assert shape.find_stage("layers.3") == 0 and shape.find_stage("layers.4") == 1
    taps = [(tap.name, tap.stage, tap.width, tap.num_step_rows) for tap in shape.list_taps(build(make_config()))]
    assert taps == [("tok_embeddings", 0, 8, 0), ("layers.0", 0, 8, 0)]


def test_the_mask_token_is_sent_once_a_step() -> None:
    config = make_config("dflash")
    shape = PipelineShape.build(config, make_parallelism("Interleaved1F1B"), 0)
    taps = [(tap.name, tap.stage, tap.num_step_rows) for tap in shape.list_taps(build(config))]
    assert taps == [("tok_embeddings", 0, 1), ("layers.1", 0, 0), ("layers.4", 2, 0)]


def test_stages_may_be_named() -> None:
    shape = PipelineShape.build(make_config(), name_stages("1F1B", WHOLE[:2], WHOLE[2:]), 1)
    assert shape.find_stage("layers.1") == 1 and shape.find_stage("draft") == 1


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (make_parallelism("1F1B", 16), "stages .16. cannot be greater than effective layers .9."),
        (make_parallelism("Interleaved1F1B", pipeline_parallel_layers_per_stage=4), "must be divisible|at least 2"),
        (name_stages("ZBVZeroBubble", WHOLE[:5], *([n] for n in WHOLE[5:])), "6 stages .*=2; ZBV.* runs 2 a rank"),
        (
            name_stages("1F1B", WHOLE[:3], WHOLE[4:]),
            "module_fqns_per_model_part has .*; its stages must have",
        ),
        (name_stages("1F1B", WHOLE[:3], WHOLE[3:6], WHOLE[6:]), "3 stages .*=2; 1F1B runs 1 a rank"),
        (name_stages("LoopedBFS", WHOLE[:3], WHOLE[3:]), "2 stages .*=2; LoopedBFS runs 2 or more a rank"),
    ],
)
def test_stages_that_the_layers_do_not_fit_are_refused(parallelism: ParallelismConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(make_config(), parallelism)
