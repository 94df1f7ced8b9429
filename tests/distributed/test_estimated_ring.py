"""The ring's line of tools/estimate_memory.py against the bytes that a run of branch attention holds."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench_branch_attention import Case, build_variant, run_forward, take_shard
from bench_buffers import HEADS, LiveBytes

from specco.drafts.eagle3.config import Eagle3Config
from specco.testing.distributed import GlooTestCase
from specco.titan.learner import Learner
from specco.titan.registry import make_model_spec
from specco.titan.sizes import make_policy_config
from tools.estimate_memory import estimate

TOKENS = 1024


def estimate_ring() -> float:
    """Return the bytes that the estimate has for two ranks of "cp" in bfloat16."""
    num_heads, num_kv_heads, head_dim = HEADS
    policy = make_policy_config(
        "qwen3",
        num_layers=3,
        dim=32,
        hidden_dim=32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=40,
        max_seq_len=TOKENS,
    )
    draft = Eagle3Config(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=40,
        target_layer_ids=(0, 1, 2),
    )
    degrees = {"data_parallel_shard_degree": 1, "context_parallel_degree": 2}
    config = Learner.Config(
        model_spec=make_model_spec(policy, flavor="test", draft=draft),
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
        activation_checkpoint=FullAC.Config(),
    )
    return estimate(config, TOKENS)["ring"]


class RingBuffersTest(GlooTestCase):
    world_size = 2

    def test_the_estimate_is_what_a_run_holds(self) -> None:
        case = Case("eagle3", 1, TOKENS, "single", self.world_size, HEADS)
        variant = build_variant("ours-ring", case, self.rank, {})
        local = take_shard(case, variant, case.draw_inputs())
        with LiveBytes() as live:
            torch.autograd.backward(run_forward(case, variant, local), local["grad"])
        peak = torch.tensor(live.peak)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.assertEqual(int(peak), estimate_ring())
