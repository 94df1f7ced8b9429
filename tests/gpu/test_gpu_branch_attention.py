"""Branch attention on one CUDA device, and over NCCL on several: the ladder of the CPU tests."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.branch_cases import WORKLOADS, compare, run_op, run_oracle

from specco.ops.branch_attention import Trunk, branch_attention
from specco.ops.exchange import fetch_rows
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.testing.tolerances import OP_FLOAT64

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device (torch.cuda.is_available() is False)"),
]
needs_several = pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs 2 CUDA devices or more, here are {NUM_DEVICES}")
CUDA = torch.device("cuda", 0)

# Relative to the tensor's largest entry. float32: the kernels' exp2 and their order of sums. bfloat16: one rounding is
# 4e-3, and each block's probabilities, outputs and gradients are rounded once.
GPU_FLOAT32 = 5e-5
GPU_BFLOAT16 = 2e-2


def require_backend(name: str, dtype: torch.dtype) -> None:
    try:
        get_backend(name, CUDA, dtype)
    except ValueError as error:
        pytest.skip(str(error))


def check(name: str, backend: str, dtype: torch.dtype, oracle_dtype: torch.dtype, tolerance: float) -> None:
    require_backend(backend, dtype)
    work = WORKLOADS[name]
    inputs = work.draw_inputs(dtype)
    expected = run_oracle(work, inputs, oracle_dtype)
    found = run_op(work, inputs, CUDA, backend)
    errors = compare(found, expected)
    assert max(errors.values()) <= tolerance, errors
    if work.has_sinks:
        scale = expected["dsinks"].abs().max()
        assert ((found["dsinks"].double() - expected["dsinks"].double()).abs().max() / scale) <= tolerance


@pytest.mark.parametrize("name", WORKLOADS)
def test_float64_equals_the_oracle(name):
    check(name, "naive", torch.float64, torch.float64, OP_FLOAT64)


@pytest.mark.parametrize("name", WORKLOADS)
def test_flash_bfloat16_against_float32(name):
    check(name, "flash", torch.bfloat16, torch.float32, GPU_BFLOAT16)


def test_auto_takes_flash():
    require_backend("flash", torch.bfloat16)
    assert get_backend("auto", CUDA, torch.bfloat16) is get_backend("flash", CUDA, torch.bfloat16)


def run_long_passes(num_tokens: int, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """Two passes over one document, gradients at ``rows`` alone; return inputs, results and peak growth in bytes."""
    torch.manual_seed(1)
    heads, kv_heads, head_dim = 4, 1, 64
    layout = PackedLayout.build([0, num_tokens])
    tensors = {
        name: torch.randn(num_tokens, n, head_dim, device=CUDA, dtype=torch.bfloat16)
        for name, n in {"q": heads, "k": kv_heads, "v": kv_heads, "k2": kv_heads, "v2": kv_heads}.items()
    }
    for x in tensors.values():
        x.requires_grad_()
    dout = torch.zeros(num_tokens, heads, head_dim, device=CUDA, dtype=torch.bfloat16)
    dout[rows] = torch.randn(rows.numel(), heads, head_dim, device=CUDA, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trunk = Trunk(tensors["k"], tensors["v"], layout, backend="flash")
    first = trunk.attend(tensors["q"].unsqueeze(1), trunk_inclusive=True).squeeze(1)
    own = [tensors["k2"].unsqueeze(1)], [tensors["v2"].unsqueeze(1)]
    second = trunk.attend(tensors["q"].unsqueeze(1), *own, trunk_inclusive=True).squeeze(1)
    torch.autograd.backward([first, second], [dout, dout])
    growth = torch.cuda.max_memory_allocated() - before
    found = {name: x.detach() for name, x in tensors.items()} | {"dout": dout, "first": first, "second": second}
    return found | {f"d{name}": x.grad for name, x in tensors.items()}, growth


def test_long_sequence():
    """262,144 tokens: 48 rows and every gradient against dense attention of those rows, memory linear in length."""
    require_backend("flash", torch.bfloat16)
    num_tokens = 262_144
    rows = torch.cat([torch.arange(16), torch.randint(num_tokens, (16,)), torch.arange(num_tokens - 16, num_tokens)])
    rows = rows.unique().to(CUDA)
    found, growth = run_long_passes(num_tokens, rows)
    leaves = {name: found[name].float().requires_grad_() for name in ("q", "k", "v", "k2", "v2")}
    scores = torch.einsum("rnh,tkh->nrt", leaves["q"][rows], leaves["k"]) / 8
    scores = scores.masked_fill(torch.arange(num_tokens, device=CUDA) > rows[:, None], float("-inf"))
    own = torch.einsum("rnh,rkh->nr", leaves["q"][rows], leaves["k2"][rows])[..., None] / 8
    first = torch.einsum("nrt,tkh->rnh", scores.softmax(-1), leaves["v"])
    weights = torch.cat([scores, own], -1).softmax(-1)
    second = torch.einsum("nrt,tkh->rnh", weights[..., :-1], leaves["v"])
    second = second + torch.einsum("nr,rkh->rnh", weights[..., -1], leaves["v2"][rows])
    torch.autograd.backward([first, second], [found["dout"][rows].float()] * 2)
    pairs = {"first": (found["first"][rows], first), "second": (found["second"][rows], second)}
    pairs |= {f"d{name}": (found[f"d{name}"], x.grad) for name, x in leaves.items()}
    for name, (mine, expected) in pairs.items():
        error = (mine.float() - expected).abs().max() / expected.abs().max()
        assert error <= GPU_BFLOAT16, f"{name}: {error}"
    _, shorter = run_long_passes(num_tokens // 2, rows[rows < num_tokens // 2])
    assert growth <= 2.1 * shorter


# The tests of flex come last: each new dtype, head count or batch of one compiles for seconds.


@pytest.mark.parametrize("backend", ["flash", "flex"])
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_registered_op_equals_trunk(name, backend):
    """The single call computes its gradients inside a registered op."""
    require_backend(backend, torch.bfloat16)
    work = WORKLOADS[name]
    inputs = work.draw_inputs(torch.bfloat16)
    leaves = {key: x.to(CUDA).requires_grad_() for key, x in inputs.items()}
    anchors = None if work.num_anchors is None else work.draw_anchors().to(CUDA)
    out = branch_attention(
        *(leaves[key] for key in ("q", "k", "v", "k_branch", "v_branch")),
        anchors=anchors,
        layout=PackedLayout.build(work.cu_seqlens),
        backend=backend,
        **work.options,
    )
    out.backward(leaves["dout"].detach())
    expected = run_op(work, inputs, CUDA, backend)
    found = {"out": out.detach()} | {f"d{key}": leaves[key].grad for key in ("q", "k", "v", "k_branch", "v_branch")}
    for key, x in found.items():
        error = (x.cpu().float() - expected[key].float()).abs().max() / expected[key].float().abs().max()
        assert error <= GPU_BFLOAT16, f"{key}: {error}"


@pytest.mark.parametrize("name", ["eagle3", "dflash", "window"])
def test_flex_float32_equals_the_oracle(name):
    check(name, "flex", torch.float32, torch.float64, GPU_FLOAT32)


@pytest.mark.parametrize("name", ["causal layer", "eagle3", "dflash", "window"])
def test_flex_bfloat16_against_float32(name):
    check(name, "flex", torch.bfloat16, torch.float32, GPU_BFLOAT16)


def run_rank(rank: int, world_size: int, port: int, device_type: str, backend: str) -> None:
    """One rank of the group: every workload in both modes against the oracle, and no worse than one rank alone."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=world_size)
    device = torch.device(device_type, rank)
    for name in ("causal layer", "eagle3", "dflash", "window"):
        work = WORKLOADS[name]
        inputs = work.draw_inputs(torch.bfloat16)
        expected = run_oracle(work, inputs, torch.float32)
        alone = compare(run_op(work, inputs, device, backend), expected)
        for mode in ("ring", "gather"):
            errors = compare(run_op(work, inputs, device, backend, mode, dist.group.WORLD), expected)
            for key, error in errors.items():
                # What one rank owns may miss the whole's largest entry, hence the room of one rounding.
                assert error <= alone[key] + 4e-3, (
                    f"{name}, {mode}, {key}: {error} at {world_size} ranks, {alone[key]} at 1"
                )
    check_fetch_rows(rank, world_size, device)
    dist.destroy_process_group()


def check_fetch_rows(rank: int, world_size: int, device: torch.device) -> None:
    """Each rank takes other rows; the gradient of a row counts how often it was taken by all ranks."""
    work = WORKLOADS["eagle3"]
    layout = PackedLayout.build(work.cu_seqlens, world_size, rank)
    x = torch.randn(layout.num_tokens, 16, generator=torch.Generator().manual_seed(5))
    wanted = [torch.arange(r, layout.num_tokens, 7) for r in range(world_size)]
    local = layout.shard(x).to(device).requires_grad_()
    rows = fetch_rows(local, wanted[rank].to(device), layout, dist.group.WORLD)
    assert torch.equal(rows.detach().cpu(), x[wanted[rank]])
    rows.sum().backward()
    counts = torch.bincount(torch.cat(wanted), minlength=layout.num_tokens).float()
    assert torch.equal(local.grad.cpu(), layout.shard(counts)[:, None].expand(-1, 16))


def find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@needs_several
@pytest.mark.multi_gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nccl_equals_one_rank(world_size):
    if world_size > NUM_DEVICES:
        pytest.skip(f"needs {world_size} CUDA devices, here are {NUM_DEVICES}")
    mp.spawn(run_rank, (world_size, find_free_port(), "cuda", "auto"), world_size)
