"""The policy over two ranks of FSDP2: its weights leave and enter whole, whatever the sharding."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specco.testing.distributed import GlooTestCase
from specco.titan.export import load_policy, named_policy_weights, save_policy
from specco.titan.policy import Policy
from specco.titan.sizes import make_policy_config

SIZES = {"num_layers": 2, "dim": 30, "hidden_dim": 50, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10}
"""Numbers that two ranks cannot halve evenly: three KV heads, a fused projection of 120 rows, an odd vocabulary."""


def build(seed: int, *, is_sharded: bool) -> Policy:
    with torch.device("meta"):
        policy = make_policy_config("qwen3", vocab_size=37, max_seq_len=32, init_std=0.3, **SIZES).build()
    if is_sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in policy.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
    policy.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        policy.init_weights()
    return policy


class TestShardedPolicy(GlooTestCase):
    world_size = 2

    def test_weights_round_trip_through_files_between_shardings(self):
        paths: list[str] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(paths)
        folder = Path(paths[0])
        whole = build(0, is_sharded=False)
        weights = dict(named_policy_weights(whole))
        save_policy(whole, folder / "whole", tokenizer_path=folder, eos_token_id=1)
        sharded = build(1, is_sharded=True)
        load_policy(sharded, folder / "whole")
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, DTensor)
            self.assertTrue(torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name)

        streamed = dict(named_policy_weights(sharded))
        save_policy(sharded, folder / "sharded", tokenizer_path=folder, eos_token_id=1)
        saved = load_file(folder / "sharded" / "model.safetensors")
        self.assertEqual(saved.keys(), weights.keys())
        self.assertEqual(streamed.keys(), weights.keys())
        for name, weight in weights.items():
            self.assertFalse(isinstance(streamed[name], DTensor), name)
            self.assertTrue(torch.equal(streamed[name], weight), name)
            self.assertTrue(torch.equal(saved[name], weight), name)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)
