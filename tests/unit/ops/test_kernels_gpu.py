"""What the GPU backends do before and after their kernels, on a CPU: arguments, masks, gradients, refusals."""

import dataclasses
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.branch_cases import WORKLOADS, compare, run_op, run_oracle
from torch.nn.attention import flex_attention as flex

from specco.ops import kernels_gpu
from specco.ops.branch_attention import branch_attention
from specco.ops.kernels import BlockMask, NaiveBackend, get_backend
from specco.ops.kernels_gpu import FlashBackend, FlexBackend
from specco.ops.layout import PackedLayout
from specco.testing.tolerances import OP_FLOAT64, max_error

TESTS = Path(__file__).parents[2]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def draw_block(batch: int, num_queries: int, num_keys: int, dtype=torch.float64, heads=(4, 2), head_dim=16):
    shapes = [(batch, num_queries, heads[0], head_dim), *[(batch, num_keys, heads[1], head_dim)] * 2]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def ragged_mask(is_causal: bool, queries: list[int], keys: list[int]) -> BlockMask:
    cu_q, cu_k = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (queries, keys))
    return BlockMask(is_causal, cu_q=cu_q, cu_k=cu_k, max_q=max(queries), max_k=max(keys))


def interval_mask(batch: int, num_queries: int, num_keys: int) -> BlockMask:
    bounds = torch.randint(0, num_keys + 1, (2, batch, num_queries)).sort(0).values
    bounds[:, :, 3] = 0
    return BlockMask(first=bounds[0], last=bounds[1])


MASKS = {
    "whole": (2, 150, 300, lambda: BlockMask()),
    "causal": (2, 200, 200, lambda: BlockMask(is_causal=True)),
    "interval": (2, 140, 300, lambda: interval_mask(2, 140, 300)),
    "ragged": (1, 30, 56, lambda: ragged_mask(False, [10, 0, 20], [50, 5, 1])),
    "ragged causal": (1, 30, 30, lambda: ragged_mask(True, [10, 1, 19], [10, 1, 19])),
    "one tile": (3, 5, 7, lambda: BlockMask()),
}


@pytest.fixture
def eager_flex(monkeypatch):
    """FlexAttention's eager mode, with the gradient that its front end refuses on a CPU."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(kernels_gpu, "_compiled_attention", lambda: flex.flex_attention)


def joint_result(q, k, v, mask: BlockMask):
    """Merge the block with another one over other keys; return the joint out and lse, and the block's mask in full."""
    other = draw_block(q.shape[0], q.shape[1], 9)
    first, last = kernels_gpu.list_intervals(q, k, mask)
    dense = BlockMask(first=first.long(), last=last.long())
    out_a, lse_a = NaiveBackend().forward(q, k, v, dense, 0.25)
    out_b, lse_b = NaiveBackend().forward(q, other[1], other[2], BlockMask(), 0.25)
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a * (lse_a - lse).exp().unsqueeze(-1) + out_b * (lse_b - lse).exp().unsqueeze(-1)
    return out, lse, dense


@pytest.mark.parametrize("name", MASKS)
def test_flex_equals_naive(name, eager_flex):
    batch, num_queries, num_keys, make_mask = MASKS[name]
    mask, (q, k, v) = make_mask(), draw_block(batch, num_queries, num_keys)
    joint_out, joint_lse, dense = joint_result(q, k, v, mask)
    out, lse = FlexBackend().forward(q, k, v, mask, 0.25)
    expected_out, expected_lse = NaiveBackend().forward(q, k, v, dense, 0.25)
    assert max_error(out, expected_out) <= OP_FLOAT64
    assert max_error(lse, expected_lse) <= OP_FLOAT64
    dout = torch.randn_like(q)
    joint_lse[:, 1] = float("inf")
    grads = FlexBackend().backward(dout, q, k, v, joint_out, joint_lse, mask, 0.25)
    wanted = NaiveBackend().backward(dout, q, k, v, joint_out, joint_lse, dense, 0.25)
    for grad, expected in zip(grads, wanted, strict=True):
        assert grad.shape == expected.shape
        assert max_error(grad, expected) <= OP_FLOAT64


@pytest.mark.parametrize("name", MASKS)
def test_tile_mask_covers_exactly_the_visible_keys(name):
    batch, num_queries, num_keys, make_mask = MASKS[name]
    first, last = kernels_gpu.list_intervals(*draw_block(batch, num_queries, num_keys)[:2], make_mask())
    tiles = kernels_gpu.tile_mask(first, last, num_keys)
    expected = flex.create_block_mask(tiles.mask_mod, batch, 1, num_queries, num_keys, device="cpu")
    assert torch.equal(tiles.to_dense(), expected.to_dense())
    assert torch.equal(tiles.kv_num_blocks, expected.kv_num_blocks)
    assert torch.equal(tiles.full_kv_num_blocks, expected.full_kv_num_blocks)
    columns = torch.arange(num_keys)
    dense = (columns >= first[..., None]) & (columns < last[..., None])
    assert torch.equal(flex.create_mask(tiles.mask_mod, batch, 1, num_queries, num_keys, device="cpu")[:, 0], dense)


def run_naive_segments(q, k, v, segments, is_causal, scale):
    """Stand-in for the flash kernels: [L, N, H] in, lse [N, L] with +inf where a segment has no key."""
    cu_q, cu_k, max_q, max_k = segments
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert q.shape[-1] % 8 == 0
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("inf"), dtype=q.dtype)
    for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        if b > a and d > c:
            block = (q[None, a:b], k[None, c:d], v[None, c:d])
            part = NaiveBackend().forward(*block, BlockMask(is_causal), scale)
            out[a:b], lse[a:b] = part[0][0], part[1][0]
    return out, lse.transpose(0, 1)


def run_naive_segments_backward(dout, q, k, v, out, lse, segments, is_causal, scale):
    cu_q, cu_k, _, _ = segments
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        if b == a:
            continue
        block = (dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b])
        own_lse = lse.transpose(0, 1)[None, a:b].to(q.dtype).contiguous()
        parts = NaiveBackend().backward(*block, own_lse, BlockMask(is_causal), scale)
        for grad, part, rows in zip(grads, parts, ((a, b), (c, d), (c, d)), strict=True):
            grad[slice(*rows)] = part[0]
    return grads


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("name", ["whole", "causal", "ragged", "ragged causal"])
def test_flash_equals_naive(name, head_dim, monkeypatch):
    monkeypatch.setattr(kernels_gpu, "find_flash_attn", lambda: None)
    monkeypatch.setattr(kernels_gpu, "_torch_flash_forward", run_naive_segments)
    monkeypatch.setattr(kernels_gpu, "_torch_flash_backward", run_naive_segments_backward)
    batch, num_queries, num_keys, make_mask = MASKS[name]
    mask, (q, k, v) = make_mask(), draw_block(batch, num_queries, num_keys, head_dim=head_dim)
    first, last = kernels_gpu.list_intervals(q, k, mask)
    dense = BlockMask(first=first, last=last)
    out, lse = FlashBackend().forward(q, k, v, mask, 0.25)
    expected_out, expected_lse = NaiveBackend().forward(q, k, v, dense, 0.25)
    assert max_error(out, expected_out) <= OP_FLOAT64
    assert max_error(lse, expected_lse) <= OP_FLOAT64
    dout = torch.randn_like(q)
    joint = expected_lse.float().double()
    grads = FlashBackend().backward(dout, q, k, v, expected_out, joint, mask, 0.25)
    wanted = NaiveBackend().backward(dout, q, k, v, expected_out, joint, dense, 0.25)
    for grad, expected in zip(grads, wanted, strict=True):
        assert max_error(grad, expected) <= OP_FLOAT64


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("backend", [FlashBackend, FlexBackend])
def test_op_with_ragged_calls_equals_the_oracle(name, backend, eager_flex, monkeypatch):
    """The whole op on the plans that only these backends get: segments of all documents in one call."""
    monkeypatch.setattr(backend, "missing", lambda *args: None)
    monkeypatch.setattr(kernels_gpu, "find_flash_attn", lambda: None)
    monkeypatch.setattr(kernels_gpu, "_torch_flash_forward", run_naive_segments)
    monkeypatch.setattr(kernels_gpu, "_torch_flash_backward", run_naive_segments_backward)
    work = dataclasses.replace(WORKLOADS[name], lengths=(1, 70, 140, 9))
    inputs = work.draw_inputs(torch.float64)
    get_backend.cache_clear()
    try:
        found = run_op(work, inputs, CPU, "flash" if backend is FlashBackend else "flex")
    finally:
        get_backend.cache_clear()
    # The stand-in, like the kernels, takes lse in float32.
    tolerance = 1e-6 if backend is FlashBackend else OP_FLOAT64
    assert max(compare(found, run_oracle(work, inputs, torch.float64)).values()) <= tolerance


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_registered_op_with_flex_has_gradients(name, eager_flex, monkeypatch):
    """The single call computes its gradients inside a registered op, where torch records no graph of its own accord."""
    monkeypatch.setattr(FlexBackend, "missing", lambda *args: None)
    work = dataclasses.replace(WORKLOADS[name], lengths=(1, 70, 140, 9))
    inputs = work.draw_inputs(torch.float64)
    leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
    get_backend.cache_clear()
    try:
        out = branch_attention(
            *(leaves[key] for key in ("q", "k", "v", "k_branch", "v_branch")),
            anchors=work.draw_anchors(),
            layout=PackedLayout.build(work.cu_seqlens),
            backend="flex",
            **work.options,
        )
        out.backward(inputs["dout"])
    finally:
        get_backend.cache_clear()
    expected = run_oracle(work, inputs, torch.float64)
    for key in ("q", "k", "v", "k_branch", "v_branch"):
        assert max_error(leaves[key].grad, expected[f"d{key}"]) <= OP_FLOAT64


def test_flash_leaves_interval_masks_to_flex(eager_flex):
    (q, k, v), mask = draw_block(1, 40, 60), interval_mask(1, 40, 60)
    out, lse = FlashBackend().forward(q, k, v, mask, 0.25)
    expected = NaiveBackend().forward(q, k, v, mask, 0.25)
    assert max_error(out, expected[0]) <= OP_FLOAT64
    grads = FlashBackend().backward(torch.ones_like(q), q, k, v, out, lse.nan_to_num(neginf=float("inf")), mask, 0.25)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("backend", [FlashBackend(), FlexBackend()])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
def test_empty_blocks(backend, sizes):
    q, k, v = draw_block(*sizes)
    out, lse = backend.forward(q, k, v, BlockMask(), 0.25)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.isneginf(lse).all()
    grads = backend.backward(q, q, k, v, out, lse, BlockMask(), 0.25)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_torch_kernels_accept_the_arguments():
    """The aten operators' meta kernels check arguments and shapes without a device."""
    q, k, v = (x[0].to("meta") for x in draw_block(1, 30, 30, torch.bfloat16))
    segments = (*(torch.empty(4, dtype=torch.int32, device="meta") for _ in range(2)), 19, 19)
    out, lse = kernels_gpu._torch_flash_forward(q, k, v, segments, True, 0.25)
    assert out.shape == q.shape
    assert lse.shape == (4, 30)
    grads = kernels_gpu._torch_flash_backward(out, q, k, v, out, lse, segments, True, 0.25)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


# The two functions' parameters in flash-attn 2.7 and 2.8.
FORWARD_2_7 = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False"
)
BACKWARD_2_7 = (
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
)


def test_package_kernels_get_their_arguments_by_position(monkeypatch):
    calls = {}
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    for name, parameters in (("forward", FORWARD_2_7), ("backward", BACKWARD_2_7)):
        signature = inspect.signature(eval(f"lambda {parameters}: None"))

        def record(*args, _name=name, _signature=signature):
            calls[_name] = _signature.bind(*args).arguments
            return "out", "lse", None, None

        setattr(interface, f"_flash_attn_varlen_{name}", record)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    q, k, v = (x[0] for x in draw_block(1, 30, 30))
    segments = ("cu_q", "cu_k", 19, 20)
    assert kernels_gpu._package_flash_forward(q, k, v, segments, True, 0.25) == ("out", "lse")
    grads = kernels_gpu._package_flash_backward("dout", q, k, v, "out", "lse", segments, True, 0.25)
    shared = {"q": q, "cu_seqlens_k": "cu_k", "max_seqlen_q": 19, "max_seqlen_k": 20, "softmax_scale": 0.25}
    for call in calls.values():
        assert {key: call[key] for key in shared} == shared
        assert call["causal"] is True
        assert call["dropout_p"] == 0.0
    backward = calls["backward"]
    assert [backward["dq"], backward["dk"], backward["dv"]] == list(grads)
    assert (backward["out"], backward["softmax_lse"], backward["dout"]) == ("out", "lse", "dout")
    assert (backward["window_size_left"], backward["window_size_right"], backward["softcap"]) == (-1, -1, 0.0)
    assert backward["deterministic"] is False


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "reason"),
    [
        (FlashBackend(), torch.bfloat16, (8, 0), None),
        (FlashBackend(), torch.float32, (9, 0), "float16 and bfloat16"),
        (FlashBackend(), torch.bfloat16, (7, 5), "compute capability 8.0 or above, cuda:0 has 7.5"),
        (FlexBackend(), torch.float64, (9, 0), "these tensors are torch.float64"),
    ],
)
def test_missing_names_the_reason(backend, dtype, capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = backend.missing(CUDA, dtype)
    assert found is None if reason is None else reason in found


def test_flex_needs_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_gpu.importlib.util, "find_spec", lambda name: None)
    assert "triton" in FlexBackend().missing(CUDA, torch.bfloat16)


@pytest.mark.parametrize("name", ["flash", "flex"])
def test_refused_on_a_cpu(name):
    with pytest.raises(ValueError, match=f"backend='{name}' cannot run: it runs on CUDA tensors"):
        get_backend(name, CPU, torch.bfloat16)


def test_auto_prefers_flash_then_flex_then_naive(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_gpu.importlib.util, "find_spec", lambda name: None if name == "flash_attn" else True)
    get_backend.cache_clear()
    try:
        assert isinstance(get_backend("auto", CUDA, torch.bfloat16), FlashBackend)
        assert isinstance(get_backend("auto", CUDA, torch.float32), FlexBackend)
        assert isinstance(get_backend("auto", CUDA, torch.float64), NaiveBackend)
    finally:
        get_backend.cache_clear()


BLOCKER = '''
import importlib.metadata, importlib.util, re, sys

needed, queue = set(), ["torch", "triton", "specco", "pytest"]
while queue:
    name = re.match(r"[\\w.-]+", queue.pop())[0].lower().replace("_", "-")
    if name in needed:
        continue
    needed.add(name)
    try:
        queue += [line for line in importlib.metadata.requires(name) or [] if "extra ==" not in line]
    except importlib.metadata.PackageNotFoundError:
        continue

owners = {top: {name.lower().replace("_", "-") for name in names}
          for top, names in importlib.metadata.packages_distributions().items()}

class Blocker:
    """A finder that does not find what some other package owns."""
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_blocked = not owners.get(name.split(".")[0], needed) & needed
        return None if is_blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Blocker, sys.meta_path)
sys.path[:0] = sys.argv[1:]
assert importlib.util.find_spec("expecttest") is None
import importlib, pkgutil, torch, specco.ops
import test_gpu_branch_attention
for module in pkgutil.iter_modules(specco.ops.__path__):
    importlib.import_module("specco.ops." + module.name)
from specco.ops import branch_attention, kernels_gpu, layout
packed = layout.PackedLayout.build([0, 5, 9])
q, k = torch.randn(9, 1, 4, 8, requires_grad=True), torch.randn(9, 2, 8)
out = branch_attention.branch_attention(q, k, k, None, None, anchors=None, layout=packed, trunk_inclusive=True)
out.sum().backward()
print(q.grad.shape, kernels_gpu.__name__)
'''


def test_ops_import_and_run_with_torch_alone():
    """The ops and tests/gpu on a machine with torch, triton, pytest and what those need; all else is blocked."""
    command = [sys.executable, "-c", BLOCKER, str(TESTS), str(TESTS / "gpu")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([9, 1, 4, 8])" in result.stdout
