"""Policies laid out over several ranks: their weights leave and enter whole, whatever the layout."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from specco.titan import cpu_support

cpu_support.apply()

from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize  # noqa: E402
from specco.titan.export import load_policy, named_policy_weights, save_policy  # noqa: E402
from specco.titan.parallelize import parallelize_policy  # noqa: E402
from specco.titan.policy import Policy  # noqa: E402
from specco.titan.sizes import make_policy_config  # noqa: E402

ODD = {"num_layers": 2, "dim": 30, "hidden_dim": 50, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10}
"""Numbers that two ranks cannot halve evenly: three KV heads, a fused projection of 120 rows, an odd vocabulary."""
EVEN = ODD | {"num_heads": 4, "num_kv_heads": 2}
EXPERTS = {"architecture": "qwen3", "num_experts": 4, "top_k": 2}
TP2, EP2 = {"tensor_parallel_degree": 2}, {"expert_parallel_degree": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qwen3_fsdp2": ({"architecture": "qwen3"} | ODD, {}),
    "llama3_fsdp2": ({"architecture": "llama3"} | ODD, {}),
    "llama3_tp2": ({"architecture": "llama3"} | EVEN, TP2),
    "qwen3_tp2": ({"architecture": "qwen3"} | EVEN, TP2),
    "experts_fsdp2": (EXPERTS | ODD, {}),
    "experts_in_two": (EXPERTS | {"num_experts": 1, "top_k": 1} | ODD, {}),
    "experts_ep2": (EXPERTS | ODD, EP2),
    "experts_tp2": (EXPERTS | EVEN, TP2),
    "experts_tp2_ep2": (EXPERTS | EVEN, TP2 | EP2),
}
FOUR_RANK_CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "replicated": (EXPERTS | ODD, EP2 | {"data_parallel_replicate_degree": 2}),
    "over_both_of_their_axes": (EXPERTS | ODD, EP2),
    "fsdp2_tp2": (EXPERTS | EVEN, TP2),
    "fsdp2_tp2_in_four": (EXPERTS | {"num_experts": 1, "top_k": 1} | EVEN | {"hidden_dim": 52}, TP2),
    "fsdp2_tp2_ep4": (EXPERTS | EVEN, TP2 | {"expert_parallel_degree": 4}),
}
"""Sizes and degrees by name; ranks that are left are FSDP's. One expert is cut in its width."""


def build(sizes: dict[str, Any], seed: int, degrees: dict[str, int] | None = None) -> Policy:
    """Build a policy, whole on every rank where no degrees are given."""
    config = make_policy_config(vocab_size=37, max_seq_len=32, init_std=0.3, **sizes)
    names: dict[str, Any] = degrees or {}
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **names)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        policy = config.build()
    if degrees is not None:
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
        policy = parallelize_policy(
            policy,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
    policy.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        policy.init_weights()
    return policy


class RoundTripCase(GlooTestCase):
    def check_round_trip(self, sizes: dict[str, Any], degrees: dict[str, int]) -> None:
        """Save a whole policy, load it into a layout, stream and save it from there."""
        paths: list[str] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(paths)
        folder = Path(paths[0])
        whole = build(sizes, 0)
        weights = dict(named_policy_weights(whole))
        save_policy(whole, folder / "whole", tokenizer_path=folder, eos_token_id=1)
        sharded = build(sizes, 1, degrees)
        load_policy(sharded, folder / "whole")
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, DTensor)
            self.assertTrue(torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name)

        streamed = dict(named_policy_weights(sharded))
        save_policy(sharded, folder / "sharded", tokenizer_path=folder, eos_token_id=1)
        saved = load_file(folder / "sharded" / "model.safetensors")
        self.assertEqual(saved.keys(), weights.keys())
        self.assertEqual(list(streamed), list(weights), "every rank streams every weight in the same order")
        for name, weight in weights.items():
            self.assertFalse(isinstance(streamed[name], DTensor), name)
            self.assertTrue(torch.equal(streamed[name], weight), name)
            self.assertTrue(torch.equal(saved[name], weight), name)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)


class TestTwoRanks(RoundTripCase):
    world_size = 2

    @parametrize("case", list(CASES))
    def test_weights_round_trip_through_files_between_layouts(self, case: str):
        self.check_round_trip(*CASES[case])


class TestFourRanks(RoundTripCase):
    world_size = 4

    @parametrize("case", list(FOUR_RANK_CASES))
    def test_experts_round_trip(self, case: str):
        self.check_round_trip(*FOUR_RANK_CASES[case])


instantiate_parametrized_tests(TestTwoRanks)
instantiate_parametrized_tests(TestFourRanks)
