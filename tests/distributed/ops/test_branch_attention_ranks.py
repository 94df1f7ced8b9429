"""Branch attention under context parallelism against the dense oracle, at 2 and 4 ranks."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.attention_strategies import NUM_EXAMPLES, attention_cases, same_on_every_rank
from hypothesis import given

from specco.ops import passes
from specco.ops.branch_attention import Trunk, branch_attention, ring_attention
from specco.ops.kernels import CpuBackend
from specco.ops.layout import PackedLayout
from specco.ops.ring import RingComm
from specco.testing.attention_cases import AttentionCase, compare_shard, make_inputs, run_op, run_oracle
from specco.testing.distributed import GlooTestCase
from specco.testing.tolerances import OP_FLOAT32, OP_FLOAT64, max_error

pytestmark = pytest.mark.timeout(900)

FAMILIES = {
    "eagle3_pass_1": AttentionCase((), num_kv_heads=2),
    "eagle3_pass_3": AttentionCase((), num_kv_heads=2, num_keys=2, query_offset=(2,)),
    "dflash": AttentionCase((), anchors=(), num_queries=4, num_keys=4, trunk_inclusive=False),
    "dspark": AttentionCase((), anchors=(), num_queries=3, num_keys=3, trunk_inclusive=False),
    "jetspec": AttentionCase((), anchors=(), num_queries=4, num_keys=4, trunk_inclusive=False, branch_mask="causal"),
    "p_eagle": AttentionCase((), num_queries=3, num_keys=3, branch_mask="causal"),
    "p_eagle_sampled": AttentionCase((), anchors=(), num_queries=3, num_keys=3, branch_mask="causal"),
    "sliding_window_with_sinks": AttentionCase((), window=24, has_sinks=True),
}
"""One case of each family, without its documents and anchors."""

MODES = ("once", "ring", "gather")
LENGTHS = (1, 37, 3, 160, 16, 8, 61)


def place(case: AttentionCase, lengths: tuple[int, ...]) -> AttentionCase:
    """Give a family documents, and anchors on edges, in a random order and with repeats."""
    num_rows, rng = sum(lengths), random.Random(len(lengths))
    anchors = case.anchors
    if anchors is not None:
        anchors = (num_rows - 1, 0, *(rng.randrange(num_rows) for _ in range(24)), 0, num_rows // 2)
    return replace(case, lengths=lengths, anchors=anchors)


class BranchAttentionTests:
    """The tests themselves; the classes below set the number of ranks."""

    def _layout(self, case: AttentionCase) -> PackedLayout:
        return PackedLayout.build(case.cu_seqlens, self.world_size, self.rank)

    def _check(self, case: AttentionCase, mode: str, dtype: torch.dtype, tolerance: float) -> None:
        """Compare with the oracle in float64; every rank fails where one does, so that none waits for another."""
        layout = self._layout(case)
        actual = run_op(case, layout, dist.group.WORLD, dtype, mode)
        inputs = make_inputs(case, dtype)
        errors = compare_shard(case, layout, actual, run_oracle(case, torch.float64, inputs), dist.group.WORLD)
        worst = torch.tensor(max(errors.values()))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self.assertLessEqual(float(worst), tolerance, f"{mode} {errors} {case}")

    def test_generated_packings_equal_the_oracle(self):
        modes = random.Random(0)
        ran = []

        @same_on_every_rank
        @given(case=attention_cases())
        def check(case: AttentionCase) -> None:
            ran.append(case)
            self._check(case, modes.choice(MODES), torch.float64, OP_FLOAT64)

        check()
        self.assertGreaterEqual(len(ran), NUM_EXAMPLES)

    def test_families_equal_the_oracle(self):
        for family, mode in itertools.product(FAMILIES, MODES):
            self._check(place(FAMILIES[family], LENGTHS), mode, torch.float64, OP_FLOAT64)
            self._check(place(FAMILIES[family], LENGTHS), mode, torch.float32, OP_FLOAT32)

    def test_families_in_small_pieces_equal_the_oracle(self):
        """A chunk of anchors, and a kernel call, of as little as can be: what long calls are cut to."""
        small = {"cpu": 1}
        with patch.dict(passes._CHUNK_ELEMENTS, small), patch.dict(passes._CALL_ELEMENTS, small):
            for family, mode in itertools.product(FAMILIES, MODES):
                case = replace(place(FAMILIES[family], LENGTHS), num_kv_heads=2)
                self._check(case, mode, torch.float64, OP_FLOAT64)

    def test_odd_packings_equal_the_oracle(self):
        for lengths in ((1,), (2, 1), (257,), (5,) * 40):
            for family, mode in itertools.product(("eagle3_pass_3", "dflash"), ("ring", "gather")):
                self._check(place(FAMILIES[family], lengths), mode, torch.float64, OP_FLOAT64)

    def test_anchors_of_one_rank_alone(self):
        """All branches live on rank 0; every other rank takes part in the ring with none."""
        case = replace(FAMILIES["dflash"], lengths=(64, 16), anchors=(3, 0, 3, 1))
        for mode in MODES:
            self._check(case, mode, torch.float64, OP_FLOAT64)

    def test_policy_attention_equals_the_trunk_alone(self):
        case = place(FAMILIES["eagle3_pass_1"], LENGTHS)
        inputs, layout = make_inputs(case, torch.float64), self._layout(case)
        q, k, v = (layout.shard(x) for x in (inputs.q.squeeze(1), inputs.k, inputs.v))
        out, lse = ring_attention(q, k, v, layout=layout, group=dist.group.WORLD, return_lse=True)
        expected = run_oracle(case, torch.float64, inputs)
        self.assertLessEqual(max_error(layout.unshard(out, dist.group.WORLD), expected["out"].squeeze(1)), OP_FLOAT64)
        self.assertTrue(bool((lse[layout.global_rows < 0] == -torch.inf).all()))

    def _run_passes(
        self, num_passes: int, mode: str, lengths: tuple[int, ...], num_anchors: int | None = None
    ) -> Trunk:
        """Run TTT passes (or block branches at random anchors) forward and backward, and return the trunk."""
        layout = PackedLayout.build(torch.tensor([0, *lengths]).cumsum(0), self.world_size, self.rank)
        k, v = (torch.randn(layout.num_rows, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        trunk = Trunk(k, v, layout, dist.group.WORLD, mode)
        losses, keys, values = [], [], []
        real = (layout.global_rows >= 0).nonzero().view(-1)
        for _ in range(num_passes):
            anchors = None if num_anchors is None else real[torch.randint(len(real), (num_anchors,))]
            num_branches = layout.num_rows if anchors is None else num_anchors
            q = torch.randn(num_branches, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
            out = trunk.attend(q, keys, values, anchors=anchors, trunk_inclusive=True)
            losses.append(out.float().sum())
            if anchors is None:
                keys, values = ([*old, torch.randn(layout.num_rows, 1, 2, 8).bfloat16()] for old in (keys, values))
        torch.stack(losses).sum().backward()
        return trunk

    def test_traffic_equals_the_formula(self):
        for lengths in ((64,), (5, 30, 1)):
            self._check_traffic(lengths)

    def _check_traffic(self, lengths: tuple[int, ...]) -> None:
        size, rank = self.world_size, self.rank
        num_rows = sum(-(-n // (2 * size)) * 2 for n in lengths)
        shard_bytes, accumulated_bytes = num_rows * 2 * 2 * 8 * 2, num_rows * 2 * 2 * 8 * 4
        a_pass = (size - 1) * (shard_bytes + shard_bytes + accumulated_bytes)
        for num_passes in (1, 7):
            trunk = self._run_passes(num_passes, "ring", lengths)
            self.assertEqual(trunk.counters.bytes, num_passes * a_pass)
            self.assertEqual(trunk.counters.messages, num_passes * 3 * (size - 1))
        gathered = (size - 1 + rank) * shard_bytes // 2 + (2 * size - 2 - rank) * accumulated_bytes // 2
        for num_passes in (1, 7):
            self.assertEqual(self._run_passes(num_passes, "gather", lengths).counters.bytes, gathered)
        for num_anchors in (0, 3, 50):
            self.assertEqual(self._run_passes(1, "ring", lengths, num_anchors).counters.bytes, a_pass)
            self.assertEqual(self._run_passes(1, "gather", lengths, num_anchors).counters.bytes, gathered)

    def test_a_window_keeps_far_chunks_at_home(self):
        layout = PackedLayout.build([0, 512], self.world_size, self.rank)
        k, v, q = (torch.randn(layout.num_rows, heads, 8, dtype=torch.float64) for heads in (1, 1, 2))
        whole = Trunk(k, v, layout, dist.group.WORLD, "gather")
        near = Trunk(k, v, layout, dist.group.WORLD, "gather", window=9)
        expected = whole.attend(q.unsqueeze(1), trunk_inclusive=True, window=9)
        actual = near.attend(q.unsqueeze(1), trunk_inclusive=True, window=9)
        self.assertLessEqual(max_error(actual, expected), OP_FLOAT64)
        sent = torch.tensor([whole.counters.bytes, near.counters.bytes])
        dist.all_reduce(sent)
        # Only the chunk before a chunk is within reach: 2 * cp - 2 of them live elsewhere.
        chunk_bytes = layout.num_rows // 2 * 2 * 8 * 8
        self.assertEqual(int(sent[1]), (2 * self.world_size - 2) * chunk_bytes)
        self.assertLess(int(sent[1]), int(sent[0]))
        with self.assertRaisesRegex(ValueError, "window=None"):
            near.attend(q.unsqueeze(1), trunk_inclusive=True)

    def test_exchanges_are_under_way_while_a_step_computes(self):
        """Posted before the step's kernel, waited for after it, in forward, backward and on the last sum's way home."""
        events: list[str] = []

        def note(event: str, method, is_noted=lambda *args: True):
            def noted(*args, **kwargs):
                events.extend([event] if is_noted(*args) else [])
                return method(*args, **kwargs)

            return noted

        num_rows, size = 16, self.world_size
        layout = PackedLayout.build([0, num_rows * size], size, self.rank)
        q, k, v, own = (torch.randn(num_rows, 1, 8).double().requires_grad_() for _ in range(4))
        with ExitStack() as stack:
            for owner, name, event in (
                (CpuBackend, "forward", "compute"),
                (CpuBackend, "backward", "compute"),
                (passes, "finish_backward", "branch"),
                (RingComm, "post", "post"),
            ):
                stack.enter_context(patch.object(owner, name, note(event, getattr(owner, name))))
            waits = note("wait", RingComm.wait, lambda comm: bool(comm._works))
            stack.enter_context(patch.object(RingComm, "wait", waits))
            out = Trunk(k, v, layout, dist.group.WORLD, "ring").attend(
                q.unsqueeze(1), own.unsqueeze(1), own.unsqueeze(1), trunk_inclusive=True
            )
            forward, events[:] = events[:], []
            out.sum().backward()
        posts = [["post"]] * (size - 2) + [[]]  # of keys and values; the last step has none to send on
        rounds = [["wait", *post, "compute"] for post in posts]
        self.assertEqual(forward, ["post", "compute", *itertools.chain(*rounds)])
        arrivals = [[], *[["wait"]] * (size - 2)]  # of the sum of dK and dV, which begins at the first of them
        rounds = [[*step, *arrival, "post"] for step, arrival in zip(rounds, arrivals, strict=True)]
        self.assertEqual(events, ["post", "branch", *itertools.chain(*rounds), "compute", "wait"])

    def test_waiting_is_measured(self):
        trunk = self._run_passes(1, "ring", (64,))
        self.assertGreater(trunk.counters.wait_seconds, 0.0)

    def test_bfloat16_error_stays_with_the_ranks(self):
        """16-bit inputs against a float32 oracle: the error is the kernel's own, whatever the number of ranks."""
        case = AttentionCase((300, 500), num_kv_heads=2, num_groups=2, head_dim=32, num_keys=2, seed=5)
        inputs = make_inputs(case, torch.bfloat16)
        expected = run_oracle(case, torch.float32, inputs)
        layout = self._layout(case)
        actual = run_op(case, layout, dist.group.WORLD, torch.bfloat16, "ring")
        errors = compare_shard(case, layout, actual, expected, dist.group.WORLD)
        alone = PackedLayout.build(case.cu_seqlens)
        baseline = compare_shard(case, alone, run_op(case, alone, None, torch.bfloat16, "ring"), expected, None)
        for name in ("out", "q", "k", "v"):
            worst = torch.tensor(errors[name])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            self.assertLessEqual(float(worst), 1.1 * baseline[name] + 1e-6, name)

    def test_bad_input_of_one_rank_is_raised_by_all(self):
        for mode in MODES:
            self._check_bad_input(mode)

    def _check_bad_input(self, mode: str) -> None:
        layout = PackedLayout.build([0, 21, 40], self.world_size, self.rank)
        num_rows, last = layout.num_rows, self.world_size - 1
        k = torch.randn(num_rows, 2, 8)
        padding = PackedLayout.build([0, 21, 40], self.world_size, 0).padding_rows

        def attend(k=k, q=None, anchors=None, layout=layout):
            q = torch.randn(2, 1, 4, 8) if q is None else q
            anchors = torch.zeros(2, dtype=torch.int64) if anchors is None else anchors
            if mode == "once":
                return branch_attention(
                    q, k, k, anchors=anchors, layout=layout, trunk_inclusive=True, group=dist.group.WORLD
                )
            return Trunk(k, k, layout, dist.group.WORLD, mode).attend(q, anchors=anchors, trunk_inclusive=True)

        is_last = self.rank == last
        with self.assertRaisesRegex(ValueError, f"anchors has row {num_rows}; .* rank {last}"):
            attend(anchors=torch.tensor([0, num_rows if is_last else 1]))
        with self.assertRaisesRegex(ValueError, r"anchors has row \d+, which is padding.* rank 0"):
            attend(anchors=torch.tensor([0, int(padding[0]) if self.rank == 0 else 0]))
        with self.assertRaisesRegex(ValueError, f"q is torch.float64, but k_trunk is torch.float32.* rank {last}"):
            attend(q=torch.randn(2, 1, 4, 8, dtype=torch.float64 if is_last else torch.float32))
        with self.assertRaisesRegex(ValueError, "q has 3 heads, which is no multiple of the 2 key heads"):
            attend(q=torch.randn(2, 1, 3, 8))
        with self.assertRaisesRegex(ValueError, f"k_trunk has {num_rows - 1} rows"):
            attend(k=k[1:] if is_last else k)
        with self.assertRaisesRegex(ValueError, f"group has size {self.world_size} .* cp_size=1"):
            attend(layout=PackedLayout.build([0, 21, 40]))
        self.assertEqual(attend().shape, (2, 1, 4, 8))


class TestBranchAttentionTwoRanks(BranchAttentionTests, GlooTestCase):
    world_size = 2


class TestBranchAttentionFourRanks(BranchAttentionTests, GlooTestCase):
    world_size = 4
