"""What is refused when a config is read, with both sides named, and how a large model is laid out."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import ParallelDims

from recipes.full_size import make_learner_config
from specco.distributed.draft_plan import check_draft_tp
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.testing.distributed import make_fake_group
from specco.titan import cpu_support
from specco.titan.learner import Learner
from specco.titan.parallelize import check_model, check_parallelism, check_trainer_parallelism
from specco.titan.registry import make_model_spec
from specco.titan.sizes import make_policy_config

PIPELINE = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    ("check", "changes", "message"),
    [
        (check_parallelism, PIPELINE | {"pipeline_parallel_schedule": "1f1b"}, "schedule is '1f1b'; allowed are GPipe"),
        (check_parallelism, PIPELINE | {"pipeline_parallel_schedule_csv": "order.csv"}, "schedule_csv is 'order.csv'"),
        (check_parallelism, {"spmd_backend": "full_dtensor"}, "spmd_backend is 'full_dtensor'"),
        (check_trainer_parallelism, {"context_parallel_degree": 4}, "context_parallel_degree is 4; torchtitan's Train"),
        (check_trainer_parallelism, {"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2; torchtitan's Train"),
    ],
)
def test_degrees_are_refused(check, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ParallelismConfig(**({"spmd_backend": "partial_dtensor"} | changes)))


def test_degrees_of_the_learner_are_allowed() -> None:
    degrees = {
        "context_parallel_degree": 4,
        "tensor_parallel_degree": 2,
        "data_parallel_replicate_degree": 2,
    } | PIPELINE
    check_parallelism(ParallelismConfig(spmd_backend="partial_dtensor", **degrees))


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"])
def test_draft_that_cannot_be_cut_is_refused(name: str) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 12, "hidden_size": 20}
    others = {"head_dim": 2, "vocab_size": 11, "target_layer_ids": (0,)}
    check_draft_tp(Eagle3Config(**sizes, **others), 4)
    odd = {"num_attention_heads": 6, "num_key_value_heads": 2} if "heads" in name else {name: sizes[name] + 1}
    with pytest.raises(ValueError, match=f"draft's num_attention_heads is 6|draft's {name} is .*degree=4"):
        check_draft_tp(Eagle3Config(**(sizes | odd), **others), 4)


@pytest.mark.parametrize(
    ("experts", "degrees", "message"),
    [
        ({}, {"expert_parallel_degree": 2}, "expert_parallel_degree is 2, but the policy has no experts"),
        ({"num_experts": 3, "top_k": 1}, {"expert_parallel_degree": 2}, "is 2; it must divide num_experts=3"),
        ({"num_experts": 4, "top_k": 1}, {"tensor_parallel_degree": 2}, "hidden_dim=9; tensor_parallel_degree=2 must"),
        (
            {"num_experts": 4, "top_k": 1},
            {"expert_parallel_degree": 4, "data_parallel_shard_degree": 3, "tensor_parallel_degree": 2},
            "is 4; it must divide the 6 ranks of data_parallel_shard_degree=3 x context_parallel_degree=1 x tensor",
        ),
        (
            {"num_experts": 4, "top_k": 1},
            {"expert_parallel_degree": 4, "data_parallel_replicate_degree": 2, "context_parallel_degree": 2},
            "is 4; it must divide the 6 ranks of data_parallel_shard_degree=3 x context_parallel_degree=2 x tensor",
        ),
    ],
)
def test_policy_that_the_degrees_do_not_fit_is_refused(
    experts: dict, degrees: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    sizes = {"vocab_size": 11, "num_layers": 1, "dim": 8, "hidden_dim": 9}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
    config = make_policy_config("qwen3", **sizes, **heads, **experts)
    check_model(config, ParallelismConfig())
    with pytest.raises(ValueError, match=message):
        check_model(config, ParallelismConfig(**degrees))


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 4, "layer 0 has n_heads=6; tensor_parallel_degree=4 must divide it"),
        ({}, 2, "layer 0 has n_kv_heads=3; tensor_parallel_degree=2 must divide it"),
        ({"enable_weight_tying": True}, 1, "enable_weight_tying is True"),
        ({"draft": 16}, 1, "the draft has hidden_size=16; it must be the policy's, 24"),
        ({"draft": 24}, 3, "the draft's num_attention_heads is 4; tensor_parallel_degree=3 must divide it"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_when_the_config_is_read(changes: dict, tp: int, message: str) -> None:
    sizes = {"vocab_size": 11, "num_layers": 1, "dim": 24, "hidden_dim": 8}
    config = make_policy_config("qwen3", **sizes, num_heads=6, num_kv_heads=3, head_dim=4)
    config.enable_weight_tying = changes.get("enable_weight_tying", False)
    shape = {"intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    draft = None
    if "draft" in changes:
        draft = Eagle3Config(**shape, hidden_size=changes["draft"], vocab_size=11, target_layer_ids=(0,))
    spec = make_model_spec(config, flavor="test", draft=draft)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=tp)
    with pytest.raises(ValueError, match=message):
        Learner.Config(model_spec=spec, parallelism=parallelism)


def test_experts_of_a_large_model_are_laid_out_over_fsdp_cp_and_tp() -> None:
    """Two layers of 235B-A22B on meta: fsdp 2 x cp 2 x tp 4, and its experts over all 16 of these ranks."""
    cpu_support.apply()
    degrees = {"data_parallel_shard": 2, "context_parallel": 2, "tensor_parallel": 4, "expert_parallel": 16}
    config = make_learner_config("235B-A22B", DFlashConfig, intermediate_size=12288, **degrees)
    model = config.model_spec.model
    model.layers = model.layers[:2]
    model.draft = replace(model.draft, target_layer_ids=(0, 1))
    model.update_from_config(config=config)
    with torch.device("meta"):
        policy = model.build()
    with make_fake_group(16):
        dims = ParallelDims.from_config(config.parallelism, 16)
        dims.build_mesh()
        config.model_spec.parallelize_fn(
            policy,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        shapes = {}
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            shapes[name.replace("_checkpoint_wrapped_module.", "")] = tuple(parameter.to_local().shape)
    layer, experts = "layers.1.", "layers.1.moe.routed_experts.inner_experts."
    assert shapes[f"{experts}w1_EFD"] == shapes[f"{experts}w3_EFD"] == (128 // 16, 1536, 4096)
    assert shapes[f"{experts}w2_EDF"] == (128 // 16, 4096, 1536)
    assert shapes[f"{layer}moe.router.gate.weight"] == (128 // 4, 4096)
    assert shapes[f"{layer}attention.wo.weight"] == (4096 // 4, 64 * 128 // 4)
