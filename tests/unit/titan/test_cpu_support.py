"""CPU support: the patches are needed, are in place after one call, and are left out where an accelerator is."""

import json
import subprocess
import sys

import pytest
import torch

# each case runs in a process of its own: what it looks at is made when torchtitan is imported
BEFORE = """
import json, torch.distributed as dist, torchtitan.tools.utils as utils, torchtitan.distributed.parallel_dims
print(json.dumps({"device_type": utils.device_type, "set_timeout": hasattr(dist, "set_timeout")}))
"""
AFTER = """
import json, sys, datetime, torch, torch.distributed as dist
import torchtitan.distributed.parallel_dims            # imported before the patches
from specco.titan import cpu_support
is_needed = [cpu_support.apply(), cpu_support.apply()]
import torchtitan.components.metrics as metrics, torchtitan.distributed.utils as utils
from torchtitan.tools.utils import get_local_device
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dims = torchtitan.distributed.parallel_dims.ParallelDims(
    dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
dims.build_mesh()
utils.set_pg_timeouts(datetime.timedelta(seconds=5), dims)
modules = [m for name, m in sys.modules.items() if name.startswith("torchtitan.") and "device_type" in vars(m)]
monitor = metrics.build_device_memory_monitor()
print(json.dumps({
    "is_needed": is_needed,
    "device_types": sorted({m.device_type for m in modules}),
    "num_modules": len(modules),
    "capacity_gib": monitor.device_capacity_gib,
    "peak": monitor.get_peak_stats().num_ooms,
    "device": str(get_local_device()),
    "torch_cpu": hasattr(torch.cpu, "memory_stats"),
}))
"""
WITH_ACCELERATOR = """
import json, torch
torch.accelerator.is_available = lambda: True
from specco.titan import cpu_support
is_needed = cpu_support.apply()
import torchtitan.tools.utils as utils
print(json.dumps({"is_needed": is_needed, "device_type": utils.device_type}))
"""


def run(source: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env={"LOCAL_RANK": "0"}
    )
    return json.loads(result.stdout.splitlines()[-1])


pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def test_torchtitan_alone_takes_cuda_and_lacks_set_timeout():
    found = run(BEFORE)
    assert found["device_type"] == "cuda"
    assert found["set_timeout"] == (torch.__version__ >= "2.14")


def test_apply_reaches_every_module_in_any_order_of_imports():
    found = run(AFTER)
    assert found["is_needed"] == [True, True]
    assert found["device_types"] == ["cpu"]
    assert found["num_modules"] >= 4
    assert found["capacity_gib"] > 0.1
    assert found["peak"] == -1
    assert found["device"] == "cpu:0"
    assert not found["torch_cpu"]


def test_nothing_is_done_where_an_accelerator_is():
    assert run(WITH_ACCELERATOR) == {"is_needed": False, "device_type": "cuda"}
