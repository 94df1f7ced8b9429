"""What of the engine needs no vLLM: mends as pure functions, version rules, checks of configs and weights."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from specco.rl.engine import EngineConfig, EngineStats, SamplingConfig, derive_seed
from specco.rl.refit import check_weights, read_weight_shapes
from specco.rl.vllm_mends import (
    MENDS,
    check_experts,
    check_sampled_speculation,
    expand_batch_to_tokens,
    rebind_kernels,
    select_mends,
)


class TestExpandBatchToTokens:
    def test_repeats_by_counts(self):
        out = expand_batch_to_tokens(torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 5, 6], dtype=torch.int32), 6)
        assert out.dtype == torch.float32
        assert out.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 2.0]

    def test_replaces_greedy_temperature(self):
        x = torch.tensor([0.0, 0.7])
        out = expand_batch_to_tokens(x, torch.tensor([1, 3], dtype=torch.int32), 3, replace_from=0, replace_to=1)
        assert out.tolist() == pytest.approx([1.0, 0.7, 0.7])
        assert x[0] == 0.0

    def test_requests_without_drafts(self):
        top_k = torch.tensor([5, 6, 7], dtype=torch.int32)
        out = expand_batch_to_tokens(top_k, torch.tensor([0, 2, 2], dtype=torch.int32), 2)
        assert out.dtype == torch.int32
        assert out.tolist() == [6, 6]


class TestRebindKernels:
    def test_references_inside_vllm_are_replaced(self, monkeypatch):
        def kernel():
            pass

        def replacement():
            pass

        inside, outside = ModuleType("vllm.inside"), ModuleType("vllmish")
        inside.kernel = outside.kernel = kernel
        inside.owner = SimpleNamespace(kernel=kernel, _kernel_arg_names=("a",))
        inside.other = SimpleNamespace(kernel=len, _kernel_arg_names=("b",))
        monkeypatch.setitem(sys.modules, "vllm.inside", inside)
        monkeypatch.setitem(sys.modules, "vllmish", outside)
        rebind_kernels([(kernel, replacement)])
        assert inside.kernel is replacement
        assert vars(inside.owner) == {"kernel": replacement}
        assert vars(inside.other) == {"kernel": len, "_kernel_arg_names": ("b",)}
        assert outside.kernel is kernel


class TestVersions:
    def test_mends_belong_to_checked_versions_on_the_cpu(self):
        assert select_mends("0.32.0", is_cpu=True) == list(MENDS)
        assert select_mends("0.32.0", is_cpu=False) == []
        assert select_mends("0.33.0", is_cpu=True) == []

    def test_sampled_speculation_needs_a_checked_version(self):
        check_sampled_speculation("0.32.0", is_cpu=True)
        check_sampled_speculation("0.33.0", is_cpu=False)
        with pytest.raises(RuntimeError, match=r"0\.33\.0.*uninitialised memory.*0\.32\.0"):
            check_sampled_speculation("0.33.0", is_cpu=True)

    def test_experts_need_a_checked_version(self):
        dense, experts = torch.nn.Linear(2, 2), torch.nn.Module()
        experts.layer = torch.nn.Module()
        experts.layer.w13_weight = torch.nn.Parameter(torch.empty(1, 4, 2))
        check_experts(dense, "0.33.0", is_cpu=True)
        check_experts(experts, "0.33.0", is_cpu=False)
        check_experts(experts, "0.32.0", is_cpu=True)
        with pytest.raises(RuntimeError, match=r"experts is refused on vLLM 0\.33\.0.*a refit writes.*0\.32\.0 only"):
            check_experts(experts, "0.33.0", is_cpu=True)


class TestConfigs:
    @pytest.mark.parametrize("field", ["num_speculative_tokens", "max_model_len", "max_num_seqs", "kv_cache_bytes"])
    def test_sizes_are_positive(self, field, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=field):
            EngineConfig(policy_path=str(tmp_path), **{field: 0})

    def test_only_families_that_are_served_right(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="method is 'medusa'; allowed are"):
            EngineConfig(policy_path=str(tmp_path), method="medusa")

    @pytest.mark.parametrize(("method", "most"), [("dflash", 7), ("dspark", 8)])
    def test_no_more_tokens_than_a_block_has(self, tmp_path, method, most):
        (tmp_path / "config.json").write_text('{"block_size": 8}')
        fields = {"policy_path": str(tmp_path), "draft_path": str(tmp_path), "method": method}
        assert EngineConfig(**fields, num_speculative_tokens=most).headroom == most + 1
        with pytest.raises(ValueError, match=f"num_speculative_tokens is {most + 1}; a {method} draft.*at most {most}"):
            EngineConfig(**fields, num_speculative_tokens=most + 1)

    def test_paths_hold_a_model(self, tmp_path):
        with pytest.raises(ValueError, match="policy_path"):
            EngineConfig(policy_path=str(tmp_path / "missing"))
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="draft_path"):
            EngineConfig(policy_path=str(tmp_path), draft_path=str(tmp_path / "missing"))

    def test_headroom_is_that_of_drafts(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        path = str(tmp_path)
        assert EngineConfig(policy_path=path).headroom == 0
        assert EngineConfig(policy_path=path, draft_path=path, num_speculative_tokens=5).headroom == 6

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 0},
            {"n": 2, "temperature": 0.0},
            {"max_tokens": 0},
            {"temperature": -0.1},
            {"temperature": 0.001},
            {"top_p": 0.0},
        ],
    )
    def test_bad_sampling_is_refused(self, fields):
        with pytest.raises(ValueError, match=next(iter(fields))):
            SamplingConfig(**fields)

    def test_seeds_of_neighbours_share_nothing(self):
        seeds = [derive_seed(s, i) for s in range(8) for i in range(64)]
        assert derive_seed(3, 5) == derive_seed(3, 5)
        # vLLM gives the samples of one prompt the seeds s, s + 1, ...: those must not meet either
        assert len({s + j for s in seeds for j in range(64)}) == len(seeds) * 64
        assert all(0 <= s < 2**48 for s in seeds)


SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


class TestWeights:
    def test_order_and_dtype_are_free(self):
        given = [("b.weight", torch.zeros(4)), ("a.weight", torch.zeros(2, 3, dtype=torch.bfloat16))]
        assert list(check_weights("draft", given, SHAPES)) == ["b.weight", "a.weight"]

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            ([("a.weight", (2, 3))], "b.weight is missing"),
            ([("a.weight", (2, 3)), ("b.weight", (4,)), ("c.weight", (1,))], "c.weight is unknown"),
            ([("a.weight", (3, 2)), ("b.weight", (4,))], r"a.weight has shape \(3, 2\), not \(2, 3\)"),
            ([("a.weight", (2, 3)), ("b.weight", (4,)), ("b.weight", (4,))], "b.weight is given twice"),
        ],
    )
    def test_anything_else_is_refused_by_name(self, pairs, message):
        with pytest.raises(ValueError, match=f"draft weights.*{message}"):
            check_weights("draft", [(name, torch.zeros(shape)) for name, shape in pairs], SHAPES)

    def test_shapes_come_from_all_files_of_a_directory(self, tmp_path):
        save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
        save_file({"b.weight": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
        assert read_weight_shapes(str(tmp_path)) == SHAPES

    def test_directory_without_weights(self, tmp_path):
        with pytest.raises(ValueError, match="safetensors"):
            read_weight_shapes(str(tmp_path))


class TestEngineStats:
    def test_pairs(self):
        stats = EngineStats(
            num_drafts=10, num_draft_tokens=30, num_accepted_tokens=12, num_accepted_tokens_per_pos=[8, 3, 1]
        )
        assert stats.acceptance_length == pytest.approx(2.2)  # the bonus token counts
        assert stats.to_pairs()["acceptance_length"].tolist() == [22.0, 10.0]
        assert stats.to_pairs()["acceptance_rate_1"].tolist() == [3.0, 10.0]

    def test_take_starts_again_in_place(self):
        stats = EngineStats(num_drafts=2, num_accepted_tokens=1, num_accepted_tokens_per_pos=[1, 0])
        taken = stats.take()
        assert (taken.num_drafts, taken.num_accepted_tokens_per_pos) == (2, [1, 0])
        assert stats == EngineStats(num_accepted_tokens_per_pos=[0, 0])
        assert math.isnan(stats.acceptance_length)
        assert list(stats.to_pairs()) == list(taken.to_pairs())
