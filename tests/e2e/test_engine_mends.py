"""The mends of vLLM's CPU build: each fault is still there, and each mend reaches it, in worker processes too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.engine_models import save_policy, train_policy

from specco.rl import vllm_mends
from specco.rl.engine import EngineConfig, RolloutEngine
from specco.testing.tolerances import OP_BFLOAT16, OP_FLOAT32, max_error

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mends of vLLM's CPU build")


class TestFaults:
    """A fault that is gone is a mend to be taken out."""

    def test_expand_kernel_leaves_memory_as_it_was(self):
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler

        current_platform.register_triton_kernel_overrides()  # as each worker does at its start
        temperature, cu_num_tokens = torch.tensor([0.5, 2.0]), torch.tensor([2, 3], dtype=torch.int32)
        memory = torch.full((3,), float("nan"))
        rejection_sampler._expand(memory, temperature, cu_num_tokens, 0, 0)
        assert memory.isnan().all()
        mended = vllm_mends.expand_batch_to_tokens(temperature, cu_num_tokens, 3)
        assert mended.tolist() == [0.5, 0.5, 2.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("is_mended", [True, False])
    def test_linear_kernels_keep_a_copy_of_the_weight(self, dtype, is_mended, monkeypatch):
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils

        vllm_mends.apply_mends()
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)  # where the other packed kernel is
        if not is_mended:
            monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
        layer = torch.nn.Linear(64, 64, bias=False, dtype=dtype).requires_grad_(False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        x = torch.randn(3, 64, dtype=dtype)
        before = layer.cpu_linear(x, layer.weight, None)
        layer.weight.mul_(-2)
        change = float((layer.cpu_linear(x, layer.weight, None) + 2 * before).abs().max())
        assert (change == 0) == is_mended

    def test_linear_weights_are_packed_away(self, tmp_path, monkeypatch):
        from vllm import _custom_ops

        path = save_policy(train_policy(num_steps=0), tmp_path)
        monkeypatch.setattr(_custom_ops, "_supports_onednn", hasattr(torch.ops._C, "create_onednn_mm_handler"))
        monkeypatch.setattr(vllm_mends, "MENDS", ())
        with pytest.raises(RuntimeError, match=r"emptied 16 policy parameters.*live_linear_weights"):
            RolloutEngine(EngineConfig(policy_path=path, max_model_len=64))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_experts_are_packed_under_the_shape_of_their_weights(self, dtype):
        from vllm import _custom_ops

        torch.manual_seed(0)
        x, w13, w2 = (torch.randn(shape, dtype=dtype) for shape in ((7, 64), (4, 2 * 96, 64), (4, 64, 96)))
        w13, w2 = w13 / 8, w2 / 10
        expert_ids = torch.stack([torch.randperm(4)[:2] for _ in range(7)]).int()
        weights = torch.rand(7, 2)
        packed = [_custom_ops.cpu_prepack_moe_weight(weight, "vec") for weight in (w13, w2)]
        assert packed[0].shape == w13.shape and packed[1].shape == w2.shape
        assert not torch.equal(packed[0], w13) and not torch.equal(packed[1], w2)
        outs = [torch.full_like(x, float("nan")) for _ in range(3)]
        routing = (None, None, weights, expert_ids, "silu", "vec")
        _custom_ops.cpu_fused_moe(outs[0], x, *packed, *routing)
        _custom_ops.cpu_fused_moe(outs[1], x, w13, w2, *routing)
        vllm_mends.compute_experts(outs[2], x, w13, w2, *routing)
        assert max_error(outs[2], outs[0]) < (OP_FLOAT32 if dtype is torch.float32 else OP_BFLOAT16)
        assert max_error(outs[1], outs[0]) > 0.1, "the kernel reads weights that are not packed"

    def test_the_search_for_kernels_trips_over_strangers(self, monkeypatch):
        from vllm.triton_utils import dispatcher

        class Stranger:
            __dict__ = property(lambda self: object())  # as llvmlite's function wrappers

        module = ModuleType("strangers")
        module.stranger = Stranger()
        monkeypatch.setitem(sys.modules, "strangers", module)
        spec = importlib.util.spec_from_file_location("unmended_dispatcher", dispatcher.__file__)
        unmended = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(unmended)
        with pytest.raises(AttributeError, match="get"):
            unmended._rebind_kernels([])
        vllm_mends.rebind_kernels([])

    def test_token_ranks_are_compiled(self):
        from vllm.v1.sample.ops.logprobs import batched_count_greater_than

        x = torch.rand(5, 9)
        eager = batched_count_greater_than._torchdynamo_orig_callable  # there is one: it is compiled
        assert torch.equal(vllm_mends.count_not_below(x, x[:, 3:4]), eager(x, x[:, 3:4]))

    def test_context_keys_are_normed_by_the_first_layers_weight(self):
        from vllm import _custom_ops

        keys, weights = torch.randn(3, 5, 2, 32), 1 + torch.rand(3, 32)
        expected = torch.nn.functional.rms_norm(keys, (32,), eps=1e-6) * weights[:, None, None]
        faulty = torch.empty_like(keys)
        _custom_ops.rms_norm(faulty, keys, weights, 1e-6)
        model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
        mended = vllm_mends.normalize_context_keys(model, keys)
        assert float((faulty[0] - expected[0]).abs().max()) < 1e-5
        assert float((faulty[1:] - expected[1:]).abs().max()) > 0.1
        assert float((mended - expected).abs().max()) < 1e-5

    def test_dspark_is_refused_and_its_taps_are_passed_over(self):
        """In a process of its own, which nothing has mended."""
        program = (
            "from types import SimpleNamespace as N\n"
            "from vllm.config import VllmConfig\n"
            "from vllm.v1.worker.gpu_model_runner import GPUModelRunner\n"
            "speculative = N(method='dspark', enable_adaptive_verification=False,"
            " draft_model_config=N(hf_config=N(target_layer_ids=[1, 3])))\n"
            "parallel = N(prefill_context_parallel_size=1, pipeline_parallel_size=1,"
            " enable_batch_sharded_sampling=False)\n"
            "config = N(model_config=None, parallel_config=parallel, scheduler_config=N(async_scheduling=False),"
            " speculative_config=speculative, _dflash_needs_multi_kv_group=lambda: False,"
            " _is_dflash_candidate_draft=lambda: False)\n"
            "runner = N(speculative_config=speculative)\n"
            "def show(): print('found', VllmConfig._get_v1_model_runner_unsupported_features(config),"
            " GPUModelRunner._get_eagle3_aux_layers_from_config(runner))\n"
            "show()\n"
            "from specco.rl import vllm_mends\n"
            "vllm_mends.DSPARK.apply(); vllm_mends.DSPARK.apply()\n"
            "show()\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        )
        found = [line for line in result.stdout.splitlines() if line.startswith("found")]
        assert found == ["found ['dspark speculative decoding'] None", "found [] (2, 4)"]

    def test_unchecked_versions_refuse_block_drafts(self):
        with pytest.raises(RuntimeError, match=r"method 'dflash' is refused on vLLM 0\.31\.9 \(CPU\).*k_norm"):
            vllm_mends.check_method("dflash", "0.31.9", is_cpu=True)
        allowed = (("eagle3", "0.31.9", True), ("dspark", "0.31.9", False), ("dspark", "0.32.0", True))
        for method, version, is_cpu in allowed:
            vllm_mends.check_method(method, version, is_cpu)


class TestReach:
    def test_worker_processes_load_the_mends(self):
        """vLLM calls its plugins in each process that it starts, and swallows their errors."""
        (plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "specco"]
        assert plugin.value == "specco.rl.vllm_plugin:register"
        program = (
            "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
            "from vllm import _custom_ops\n"
            "from vllm.v1.sample import rejection_sampler, sampler\n"
            "print('mended', rejection_sampler.expand_batch_to_tokens.__module__, _custom_ops._supports_onednn,"
            " sampler.batched_count_greater_than.__module__)"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        )
        assert "mended specco.rl.vllm_mends False specco.rl.vllm_mends" in result.stdout

    def test_unchecked_versions_are_left_alone(self, monkeypatch, caplog):
        monkeypatch.setattr(vllm_mends, "get_vllm_version", lambda: "0.31.9")
        with caplog.at_level("WARNING"):
            assert vllm_mends.apply_mends() == []
        for mend in vllm_mends.MENDS:
            assert f"vLLM 0.31.9: {mend.name} is not mended" in caplog.text

    def test_a_mend_of_something_gone_is_an_error(self):
        class Owner:
            pass

        with pytest.raises(RuntimeError, match="out of date"):
            vllm_mends._replace(Owner(), "missing", None)
