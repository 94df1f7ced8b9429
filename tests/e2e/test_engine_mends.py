"""The mends of vLLM's CPU build: each fault is still there, and each mend reaches it, in worker processes too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest
import torch
from helpers.engine_models import save_policy, train_policy

from specco.rl import vllm_mends
from specco.rl.engine import EngineConfig, RolloutEngine

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
