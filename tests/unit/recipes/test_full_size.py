"""Full-size configs build on the meta device, and have the number of parameters that their sizes say."""

import re

import pytest
import torch
from torchtitan.config.configs import ParallelismConfig

from recipes.full_size import CONFIGS, spread_layers
from specco.titan.policy import Policy
from specco.titan.stages import PipelineShape

VOCAB, HEAD = 151936, 128


def count_decoder(dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp: int) -> int:
    """Embedding, head and final norm; per layer two norms, q/k norms, q, k, v, o, and ``mlp``."""
    attention = 2 * num_heads * HEAD * dim + 2 * num_kv_heads * HEAD * dim + 2 * HEAD
    return 2 * VOCAB * dim + dim + num_layers * (2 * dim + attention + mlp)


POLICIES = {
    "qwen3_8b": (count_decoder(4096, 36, 32, 8, 3 * 4096 * 12288), 8_190_735_360),
    "qwen3_30b_a3b": (count_decoder(2048, 48, 32, 4, 128 * 3 * 2048 * 768 + 128 * 2048), 30_532_122_624),
    "qwen3_235b_a22b": (count_decoder(4096, 94, 64, 4, 128 * 3 * 4096 * 1536 + 128 * 4096), 235_093_634_560),
}
"""By hand, and the number of parameters that Hugging Face shows for the model."""


def count_draft(name: str) -> int:
    dim, num_heads, num_kv_heads, mlp = {
        "qwen3_8b": (4096, 32, 8, 12288),
        "qwen3_30b_a3b": (2048, 32, 4, 6144),
        "qwen3_235b_a22b": (4096, 64, 4, 12288),
    }[name.rpartition("_")[0]]
    own = 2 * num_heads * HEAD * dim + 2 * num_kv_heads * HEAD * dim + 3 * dim * mlp
    if name.endswith("eagle3"):
        # q, k and v read embedding and features side by side; four norms; a head of its own
        wider = (num_heads + 2 * num_kv_heads) * HEAD * dim
        return 3 * dim * dim + own + wider + 4 * dim + VOCAB * dim
    blocks = 5 * dim * dim + 5 * (own + 2 * dim + 2 * HEAD) + 2 * dim
    if name.endswith("dflash"):
        return blocks
    return blocks + 2 * VOCAB * 256 + (dim + 256) + 1  # Markov head of rank 256, confidence head with a bias


@pytest.mark.parametrize("name", CONFIGS)
def test_config_builds_on_meta_with_the_right_size(name: str) -> None:
    spec = CONFIGS[name]().model_spec
    assert spec is not None
    with torch.device("meta"):
        policy = spec.model.build()
    assert isinstance(policy, Policy)
    policy.verify_module_protocol()
    sizes = {True: 0, False: 0}
    for part in cut(policy, CONFIGS[name]().parallelism):
        for parameter_name, parameter in part.named_parameters():
            sizes[parameter_name.startswith("draft.")] += parameter.numel()
    name = re.sub(r"_pp\d$", "", name)
    by_hand, published = POLICIES[name.rpartition("_")[0]]
    assert sizes[False] == by_hand == published
    assert sizes[True] == count_draft(name)


def cut(policy: Policy, parallelism: ParallelismConfig) -> list[Policy]:
    """Return the stages of all ranks of a pipeline, or the policy itself."""
    degree = parallelism.pipeline_parallel_degree
    if degree == 1:
        return [policy]
    shapes = [PipelineShape.build(policy.config, parallelism, rank) for rank in range(degree)]
    return [part for shape in shapes for part in shape.cut(policy)]


def test_layers_are_spread_as_the_published_draft_of_qwen3_8b_has_them() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
