"""Branch attention on one rank against the dense oracle, and what the op promises besides its values."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.attention_strategies import attention_cases, same_on_every_rank
from hypothesis import given
from torch.profiler import ProfilerActivity, profile

from specco.ops import passes
from specco.ops.branch_attention import GATHER_BUDGET_BYTES, Trunk, branch_attention, ring_attention
from specco.ops.kernels import get_backend
from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention
from specco.testing.attention_cases import AttentionCase, compare_shard, make_inputs, run_op, run_oracle
from specco.testing.tolerances import OP_FLOAT32, OP_FLOAT64, max_error

MODES = ("once", "ring", "gather")


def check(case: AttentionCase, mode: str, dtype: torch.dtype, tolerance: float, backend: str = "auto") -> None:
    layout = PackedLayout.build(case.cu_seqlens)
    expected = run_oracle(case, torch.float64, make_inputs(case, dtype))
    errors = compare_shard(case, layout, run_op(case, layout, None, dtype, mode, backend), expected, None)
    assert max(errors.values()) <= tolerance, (mode, errors, case)


def test_generated_packings_equal_the_oracle():
    modes = random.Random(1)

    @same_on_every_rank
    @given(case=attention_cases())
    def check_one(case: AttentionCase) -> None:
        check(case, modes.choice(MODES), torch.float64, OP_FLOAT64)

    check_one()


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("mode", MODES)
def test_long_documents_take_every_kind_of_block(mode: str, backend: str):
    """A staircase over three tree levels, a window of several tiles, and a causal block; float32 too."""
    rng = random.Random(3)
    anchors = tuple(rng.randrange(900) for _ in range(40))
    blocks = AttentionCase((700, 200), anchors=anchors, num_queries=4, num_keys=4, trunk_inclusive=False, seed=2)
    for case in (blocks, replace(blocks, window=150), AttentionCase((700, 200), window=150), AttentionCase((600,))):
        check(case, mode, torch.float64, OP_FLOAT64, backend)
        check(case, mode, torch.float32, OP_FLOAT32, backend)


@pytest.mark.parametrize("mode", MODES)
def test_small_pieces_equal_the_oracle(mode: str, monkeypatch):
    """A kernel call a key head, and a chunk an anchor: what long calls are cut to."""
    monkeypatch.setitem(passes._CALL_ELEMENTS, "cpu", 1)
    monkeypatch.setitem(passes._CHUNK_ELEMENTS, "cpu", 1)
    every_row = AttentionCase((60, 9), num_kv_heads=3, num_keys=2, has_sinks=True)
    sampled = replace(every_row, anchors=(5, 61, 0, 5, 59), num_queries=2, trunk_inclusive=False)
    for case in (every_row, replace(every_row, trunk_inclusive=False), replace(every_row, window=20), sampled):
        check(case, mode, torch.float64, OP_FLOAT64)


def test_bfloat16_stays_near_the_float32_oracle():
    """One rounding of the result is 2**-9 of it; values here are below 4."""
    case = AttentionCase((400, 30), num_kv_heads=2, head_dim=32, num_keys=3, query_offset=(3,), seed=1)
    layout, inputs = PackedLayout.build(case.cu_seqlens), make_inputs(case, torch.bfloat16)
    actual, expected = run_op(case, layout, None, torch.bfloat16, "once"), run_oracle(case, torch.float32, inputs)
    assert actual["out"].dtype == torch.bfloat16
    assert actual["lse"].dtype == torch.float32
    errors = compare_shard(case, layout, actual, expected, None)
    assert errors["out"] <= 2**-7
    assert errors["lse"] <= 2**-6
    assert max(errors[name] for name in ("q", "k", "v", "k_branch", "v_branch")) <= 2**-4


def test_rows_without_a_visible_key_are_empty():
    """The first row of a document sees nothing of a strict trunk, nor do its sinks count there."""
    layout = PackedLayout.build([0, 3, 4])
    q, k = torch.randn(4, 1, 2, 8, requires_grad=True), torch.randn(4, 1, 8, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    out, lse = branch_attention(q, k, k, layout=layout, trunk_inclusive=False, sinks=sinks, return_lse=True)
    assert torch.equal(out[[0, 3]], torch.zeros(2, 1, 2, 8))
    assert bool((lse[[0, 3]] == -torch.inf).all())
    dout = torch.ones_like(out).index_fill_(0, torch.tensor([0, 3]), torch.nan)
    grads = torch.autograd.grad(out, [q, k, sinks], dout)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert torch.equal(grads[0][[0, 3]], torch.zeros(2, 1, 2, 8))


def test_a_branch_that_sees_nothing_has_no_gradient():
    """Anchors on first rows, own keys masked away, a gradient of NaN arriving, beside a branch that sees its keys."""
    layout, anchors = PackedLayout.build([0, 3, 6]), torch.tensor([0, 3, 4])
    q, k, own = (torch.randn(n, *s, requires_grad=True) for n, s in ((3, (2, 2, 8)), (6, (1, 8)), (3, (2, 1, 8))))
    mask = torch.tensor([False, False, True])[:, None, None].expand(3, 2, 2)
    out = branch_attention(q, k, k, own, own, anchors=anchors, layout=layout, trunk_inclusive=False, branch_mask=mask)
    dout = torch.ones_like(out).index_fill_(0, torch.tensor([0, 1]), torch.nan)
    grads = torch.autograd.grad(out, [q, k, own], dout)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not grads[0][:2].any()
    assert not grads[2][:2].any()
    assert bool(grads[2][2].any())


@pytest.mark.parametrize("mode", ["ring", "gather"])
def test_any_strides_are_taken(mode: str):
    """Slices of one projection, a transposed head dim, and the expanded gradient of a sum."""
    layout = PackedLayout.build([0, 9, 14])
    packed = torch.randn(14, 3, 2, 8, dtype=torch.float64).transpose(2, 3).contiguous().transpose(2, 3)
    q, k, v = (packed[:, i].requires_grad_() for i in range(3))
    out = Trunk(k, v, layout, None, mode).attend(q.unsqueeze(1), trunk_inclusive=True)
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    dense = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    expected, _ = naive_branch_attention(dense[0].unsqueeze(1), *dense[1:], cu_seqlens=layout.cu_seqlens)
    wanted = torch.autograd.grad(expected.sum(), dense)
    for actual, exact in zip((out, *grads), (expected, *wanted), strict=True):
        assert max_error(actual.detach(), exact.detach()) <= OP_FLOAT64


@pytest.mark.parametrize("lengths", [(), (0,), (0, 3, 0)])
def test_empty_documents_are_allowed(lengths: tuple[int, ...]):
    layout = PackedLayout.build([0, *itertools.accumulate(lengths)])
    q, k = (torch.randn(sum(lengths), 2, 8, requires_grad=True) for _ in range(2))
    ring_attention(q, k, k, layout=layout).sum().backward()
    assert q.grad.shape == q.shape


def test_passes_over_one_trunk_add_up():
    """Several passes over a Trunk give the gradients of as many single calls, in both modes and with split keys."""
    layout, generator = PackedLayout.build([0, 20, 33]), torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    k, v = draw(33, 1, 8), draw(33, 1, 8)
    queries = [draw(33, 1, 2, 8) for _ in range(3)]
    keys, values = [draw(33, 1, 1, 8) for _ in range(2)], [draw(33, 1, 1, 8) for _ in range(2)]
    leaves = [x.requires_grad_() for x in (k, v, *queries, *keys, *values)]

    def run(attend) -> list[torch.Tensor]:
        outs = [attend(q, keys[:d], values[:d]) for d, q in enumerate(queries)]
        return torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)

    def attend_densely(q, own_keys, own_values):
        own = [torch.cat(x, 1) if x else None for x in (own_keys, own_values)]
        return naive_branch_attention(q, k, v, *own, cu_seqlens=layout.cu_seqlens)[0]

    expected = run(attend_densely)
    for mode in ("ring", "gather", "auto"):
        trunk = Trunk(k, v, layout, None, mode)
        actual = run(partial(trunk.attend, trunk_inclusive=True))
        assert max(max_error(a, b) for a, b in zip(actual, expected, strict=True)) <= OP_FLOAT64


def count_saved_bytes(num_passes: int, mode: str) -> int:
    layout, saved = PackedLayout.build([0, 64]), {}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    draw = partial(torch.randn, dtype=torch.bfloat16, requires_grad=True)
    k, v = draw(64, 2, 8), draw(64, 2, 8)
    queries = [draw(64, 1, 8, 8) for _ in range(num_passes)]
    keys, values = ([draw(64, 1, 2, 8) for _ in range(num_passes - 1)] for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        trunk = Trunk(k, v, layout, None, mode)
        outs = [trunk.attend(q, keys[:d], values[:d], trunk_inclusive=True) for d, q in enumerate(queries)]
    assert len(outs) == num_passes
    return sum(saved.values())


def test_saved_for_backward_is_linear_in_passes():
    """A pass saves q and out in the input's dtype, lse, and its own key and value, once: nothing grows with depth."""
    rows, head_dim, item = 64, 8, 2
    a_pass = rows * (2 * 8 * head_dim * item + 8 * 4)
    own_keys = rows * 2 * 2 * head_dim * item
    for num_passes in (1, 3, 7):
        trunk_keys = own_keys
        assert count_saved_bytes(num_passes, "ring") == num_passes * a_pass + (num_passes - 1) * own_keys + trunk_keys


def record_peak(attend: Callable[[], torch.Tensor]) -> int:
    """Return the peak of bytes allocated by torch during forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        attend().sum().backward()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measure_peak(num_tokens: int, case: str) -> int:
    layout = PackedLayout.build([0, num_tokens])
    k = torch.randn(num_tokens, 1, 8, requires_grad=True)
    anchors = None if case == "every_row" else torch.arange(0, num_tokens, num_tokens // 16)
    window = 64 if case == "window" else None
    q = torch.randn(num_tokens if anchors is None else len(anchors), 1 if anchors is None else 4, 1, 8)
    q.requires_grad_()
    options = {"anchors": anchors, "layout": layout, "trunk_inclusive": False, "window": window}
    return record_peak(partial(branch_attention, q, k, k, **options))


@pytest.mark.parametrize("case", ["every_row", "anchors", "window"])
def test_peak_memory_is_linear_in_length(case: str):
    """No [queries x trunk] tensor: twice the tokens take at most twice the memory (a quarter more for allocation)."""
    small, large = measure_peak(2048, case), measure_peak(4096, case)
    assert large <= 2.25 * small
    # Such a tensor of the long run alone, even of bools, would be 16 MiB (every row) or 256 KiB (16 anchors of 4).
    assert large < (4096 * 4096 if case == "every_row" else 4096 * 16 * 4 * 64)


def test_peak_memory_of_anchors_grows_by_their_results_alone(monkeypatch):
    """Copies in kernel order and what backward works with exist for one chunk of anchors, however many there are."""
    monkeypatch.setitem(passes._CHUNK_ELEMENTS, "cpu", 8 * 4 * 4 * 16)
    layout, peaks = PackedLayout.build([0, 128]), []
    k = torch.randn(128, 2, 16, requires_grad=True)
    for num_anchors in (64, 128):
        q = torch.randn(num_anchors, 4, 4, 16, requires_grad=True)
        k_branch = torch.randn(num_anchors, 4, 2, 16, requires_grad=True)
        options = {"anchors": torch.randperm(128)[:num_anchors], "layout": layout, "trunk_inclusive": False}
        peaks.append(record_peak(partial(branch_attention, q, k, k, k_branch, k_branch, **options)))
    # out, lse, dq, and dk and dv of the branch with their sum; a tenth more for what PyTorch itself makes.
    results = 64 * 4 * (2 * 4 * 4 * 16 + 4 * 4 + 3 * 4 * 2 * 16)
    assert peaks[1] - peaks[0] <= 1.1 * results


def test_many_short_documents_cost_no_call_each():
    """512 documents of 128 tokens take no more than twice the time of one batched kernel call."""
    num_documents, length = 512, 128
    layout = PackedLayout.build(torch.arange(num_documents + 1) * length)
    q = torch.randn(num_documents * length, 2, 32, requires_grad=True)
    k, v = (torch.randn(num_documents * length, 1, 32, requires_grad=True) for _ in range(2))
    dout = torch.randn_like(q)
    batched = [x.detach().view(num_documents, length, -1, 32).transpose(1, 2) for x in (q, k, v, dout)]

    def run_op_once() -> None:
        torch.autograd.grad(ring_attention(q, k, v, layout=layout), [q, k, v], dout)

    def run_batched() -> None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batched[:3], 0.0, True)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            batched[3], *batched[:3], out, lse, 0.0, True
        )

    def measure(run) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    run_op_once()
    ratios = [measure(run_op_once) / measure(run_batched) for _ in range(5)]
    assert sorted(ratios)[2] <= 2.0, ratios


def op_arguments(device: str = "cpu") -> tuple:
    layout = PackedLayout.build([0, 5, 12])
    draw = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    anchors, offsets = torch.tensor([3, 0, 11]), torch.tensor([0, 1])
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    tensors = (draw(3, 2, 4, 8), draw(12, 2, 8), draw(12, 2, 8), draw(3, 2, 2, 8), draw(3, 2, 2, 8), draw(4))
    return (*tensors, anchors, mask, offsets, layout.cu_seqlens, 1, 0, False, 6, None, 0.3, "auto")


def test_registered_op_passes_opcheck():
    """Schema, fake and autograd registrations agree; also without branches, sinks and anchors."""
    arguments = op_arguments()
    torch.library.opcheck(torch.ops.specco.attend.default, arguments)
    plain = (torch.randn(12, 1, 4, 8, dtype=torch.float64, requires_grad=True), *arguments[1:3], *[None] * 6)
    torch.library.opcheck(torch.ops.specco.attend.default, (*plain, *arguments[9:12], True, None, None, 0.3, "auto"))


def test_registered_op_passes_opcheck_with_any_strides():
    q = torch.randn(12, 2, 4, 6, dtype=torch.float64).transpose(1, 2)[..., :4].requires_grad_()
    k, v = (torch.randn(12, 4, 2, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(2))
    own = torch.randn(12, 1, 4, 2, dtype=torch.float64).transpose(2, 3).requires_grad_()
    absent = [None] * 4
    options = (torch.tensor([0, 5, 12], dtype=torch.int32), 1, 0, True, None, None, 0.3, "auto")
    torch.library.opcheck(torch.ops.specco.attend.default, (q, k, v, own, own.detach(), *absent, *options))


class TwoCalls(torch.nn.Module):
    def __init__(self, layout: PackedLayout) -> None:
        super().__init__()
        self.layout, self.project = layout, torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, k_branch: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        rows = self.project(x).view(-1, 2, 8)
        trunk = ring_attention(rows, rows, rows, layout=self.layout)
        blocks = branch_attention(
            k_branch, trunk, trunk, k_branch, k_branch,
            anchors=anchors, layout=self.layout, trunk_inclusive=False, branch_mask="causal",
        )  # fmt: skip
        return blocks.sum() + trunk.sum()


def test_compiled_module_equals_the_eager_one():
    module = TwoCalls(PackedLayout.build([0, 5, 12]))
    inputs = (torch.randn(12, 16), torch.randn(3, 4, 2, 8), torch.tensor([2, 0, 9]))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        module.zero_grad()
        run(*inputs).backward()
        results.append((run(*inputs), module.project.weight.grad.clone()))
    for actual, expected in zip(*results, strict=True):
        assert max_error(actual.detach(), expected.detach()) <= OP_FLOAT32 * 12 * 16


BAD_CALLS = {
    "lengths": ({"k": torch.randn(9, 2, 8)}, "k_trunk has 9 rows, but the layout has num_rows=12"),
    "rows": ({"q": torch.randn(11, 1, 4, 8)}, "q has 11 rows and anchors is None, but the layout has num_rows=12"),
    "heads": ({"q": torch.randn(12, 1, 3, 8)}, "q has 3 heads, which is no multiple of the 2 key heads"),
    "head size": ({"q": torch.randn(12, 1, 4, 4)}, "q has head size 4, but k_trunk has 8"),
    "dtype": ({"q": torch.randn(12, 1, 4, 8).bfloat16()}, "q is torch.bfloat16, but k_trunk is torch.float32"),
    "integers": ({"k": torch.ones(12, 2, 8, dtype=torch.int64)}, "both must be of one float dtype"),
    "anchor": ({"anchors": torch.arange(12) + 1}, "anchors has row 12; allowed are local rows 0 to 11"),
    "negative anchor": ({"anchors": torch.arange(12) - 1}, "anchors has row -1"),
    "anchor count": ({"anchors": torch.arange(3)}, r"anchors has shape \(3,\) and dtype torch.int64; .*\[12\]"),
    "branch": ({"k_branch": torch.randn(3, 1, 2, 8)}, "branches and head size must be equal"),
    "mask name": ({"branch_mask": "bidirectional"}, "branch_mask='bidirectional'; allowed are None, 'causal'"),
    "mask shape": ({"branch_mask": torch.ones(2, 1, dtype=torch.bool)}, r"must be bool of shape \(1, 1\)"),
    "window": ({"window": 0}, "window=0; it must be at least 1 token"),
    "offsets": ({"query_offset": torch.tensor([0, 1])}, r"query_offset has shape \(2,\)"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\)"),
    "layout": ({"layout": PackedLayout.build([0, 12], 2, 0)}, "group has size 1 .* cp_size=2"),
    "backend": ({"backend": "triton"}, "backend='triton' is unknown; allowed are .*'naive'"),
    "backend here": ({"backend": "flash"}, "backend='flash' cannot run: it runs on CUDA tensors"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(BAD_CALLS))
def test_bad_input_names_value_and_rule(name: str, mode: str):
    changes, message = BAD_CALLS[name]
    given_arguments = {
        "q": torch.randn(12, 1, 4, 8),
        "k": torch.randn(12, 2, 8),
        "k_branch": torch.randn(12, 1, 2, 8),
        "layout": PackedLayout.build([0, 5, 12]),
        "backend": "auto",
        **changes,
    }
    q, k, own, layout, backend = (given_arguments.pop(key) for key in ("q", "k", "k_branch", "layout", "backend"))

    def attend() -> None:
        if mode == "once":
            branch_attention(q, k, k, own, own, layout=layout, trunk_inclusive=True, backend=backend, **given_arguments)
        else:
            trunk = Trunk(k, k, layout, None, mode, backend=backend)
            trunk.attend(q, own, own, trunk_inclusive=True, **given_arguments)

    with pytest.raises(ValueError, match=message):
        attend()


def test_auto_gathers_within_its_budget():
    """The budget counts K, V and their float32 gradients of the whole trunk; meta tensors stand for the long one."""
    layout = PackedLayout.build([0, 1024])
    for num_kv_heads, mode in ((8, "gather"), (GATHER_BUDGET_BYTES // (1024 * 64 * 2 * 6) + 1, "ring")):
        k = torch.empty(1024, num_kv_heads, 64, dtype=torch.bfloat16, device="meta")
        assert Trunk(k, k, layout).mode == mode


def test_unknown_mode_is_refused():
    k = torch.randn(12, 2, 8)
    with pytest.raises(ValueError, match="mode='allgather'; allowed are 'ring', 'gather' and 'auto'"):
        Trunk(k, k, PackedLayout.build([0, 12]), None, "allgather")


def test_auto_logs_its_choice_once(caplog):
    get_backend.cache_clear()
    with caplog.at_level("INFO", logger="specco.ops.kernels"):
        for _ in range(3):
            get_backend("auto", torch.device("cpu"), torch.float64)
    assert [record.getMessage() for record in caplog.records] == [
        "branch attention on cpu in torch.float64 uses the backend 'cpu'"
    ]
