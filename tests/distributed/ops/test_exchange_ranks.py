"""Fetching rows from other ranks, and the DTensor edge of the ops."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from specco.distributed.context_parallel import attend_dtensors, build_layout, shard_rows, unshard_rows
from specco.ops.branch_attention import branch_attention, ring_attention
from specco.ops.exchange import fetch_rows
from specco.ops.layout import PackedLayout
from specco.ops.naive import naive_branch_attention
from specco.testing.distributed import GlooTestCase
from specco.testing.tolerances import OP_FLOAT64, max_error

CU_SEQLENS = [0, 5, 17, 18, 60]


class FetchRowsTests:
    """The tests themselves; the classes below set the number of ranks."""

    def _fetch(self, dtype: torch.dtype) -> None:
        layout = PackedLayout.build(CU_SEQLENS, self.world_size, self.rank)
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        shard = layout.shard(x).requires_grad_()
        own = torch.Generator().manual_seed(self.rank)
        rows = torch.randint(0, 60, (0 if self.rank == 1 else 40,), generator=own)
        out = fetch_rows(shard, rows, layout, dist.group.WORLD)
        self.assertTrue(torch.equal(out, x[rows]))
        weights = torch.randn(out.shape, generator=own, dtype=torch.float64).to(dtype)
        (grad,) = torch.autograd.grad(out, shard, weights)
        expected = torch.zeros(60, 3, dtype=torch.float64).index_add_(0, rows, weights.double())
        dist.all_reduce(expected)
        tolerance = OP_FLOAT64 if dtype == torch.float64 else 2**-8 * float(expected.abs().max())
        self.assertLessEqual(max_error(grad, layout.shard(expected)), tolerance)

    def test_rows_and_gradients_arrive(self):
        for dtype in (torch.float64, torch.bfloat16):
            self._fetch(dtype)

    def test_no_rank_wants_a_row(self):
        layout = PackedLayout.build(CU_SEQLENS, self.world_size, self.rank)
        shard = torch.randn(layout.num_rows, 2, requires_grad=True)
        fetch_rows(shard, torch.empty(0, dtype=torch.int64), layout, dist.group.WORLD).sum().backward()
        self.assertTrue(torch.equal(shard.grad, torch.zeros_like(shard)))

    def test_volume_is_that_of_the_rows(self):
        """Counted where rows leave: each wanted row once, its 8-byte request, and the gradients on the way back."""
        layout = PackedLayout.build(CU_SEQLENS, self.world_size, self.rank)
        sent = []
        original = dist.all_to_all_single

        def count(out, given, *args, **kwargs):
            sent.append(given.numel() * given.element_size())
            return original(out, given, *args, **kwargs)

        shard = torch.randn(layout.num_rows, 4, requires_grad=True)
        elsewhere = PackedLayout.build(CU_SEQLENS, self.world_size, (self.rank + 1) % self.world_size).global_rows
        rows = elsewhere[elsewhere >= 0][:3]
        dist.all_to_all_single = count
        try:
            out = fetch_rows(shard, torch.cat([rows, rows]), layout, dist.group.WORLD)
            out.sum().backward()
        finally:
            dist.all_to_all_single = original
        counts, requests, forward, backward = sent
        self.assertEqual((counts, requests), (8 * self.world_size, 3 * 8))
        self.assertEqual((forward, backward), (3 * 4 * 4, 3 * 4 * 4))

    def test_a_bad_row_of_one_rank_is_raised_by_all(self):
        layout = PackedLayout.build(CU_SEQLENS, self.world_size, self.rank)
        rows = torch.tensor([60 if self.rank == 1 else 1])
        with self.assertRaisesRegex(ValueError, "rows spans 60 to 60; .* rank 1"):
            fetch_rows(torch.zeros(layout.num_rows), rows, layout, dist.group.WORLD)


class TestFetchRowsTwoRanks(FetchRowsTests, GlooTestCase):
    world_size = 2

    def test_one_dimensional_mesh(self):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        layout = build_layout(CU_SEQLENS, mesh)
        x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        sharded = shard_rows(x, layout, mesh)
        self.assertEqual(sharded.shape, (2 * layout.num_rows, 2))
        self.assertTrue(torch.equal(unshard_rows(sharded, layout), x))


class TestFetchRowsFourRanks(FetchRowsTests, GlooTestCase):
    world_size = 4

    def _shard(self, x: torch.Tensor, head_dim: int) -> DTensor:
        """Shard rows over "cp" and heads over "tp" (2 x 2 ranks)."""
        tp_rank = self.mesh.get_local_rank("tp")
        local = self.layout.shard(x).tensor_split(2, head_dim)[tp_rank].contiguous()
        return DTensor.from_local(local, self.mesh, [Shard(0), Shard(head_dim)], run_check=False).requires_grad_()

    def test_ops_on_rows_over_cp_and_heads_over_tp(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        self.layout = build_layout(CU_SEQLENS, self.mesh)
        generator = torch.Generator().manual_seed(0)
        q, k, v, k_own, v_own, dout = (
            torch.randn(60, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((2, 4, 8), (2, 8), (2, 8), (1, 2, 8), (1, 2, 8), (2, 4, 8))
        )
        expected, _ = naive_branch_attention(q, k, v, k_own, v_own, cu_seqlens=self.layout.cu_seqlens)
        grads = torch.autograd.grad(expected, [q, k, v, k_own, v_own], dout.detach())
        sharded = [self._shard(x.detach(), x.dim() - 2) for x in (q, k, v, k_own, v_own)]
        attend = partial(branch_attention, trunk_inclusive=True)
        out = attend_dtensors(attend, *sharded, layout=self.layout)
        self.assertEqual(out.placements, (Shard(0), Shard(2)))
        out.backward(self._shard(dout.detach(), 2).detach())
        results = [out.detach(), *(x.grad for x in sharded)]
        for actual, wanted in zip(results, (expected.detach(), *grads), strict=True):
            whole = actual.redistribute(placements=[Shard(0), Replicate()])
            self.assertLessEqual(max_error(unshard_rows(whole, self.layout), wanted), OP_FLOAT64)

    def test_wrong_placements_are_refused(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        self.layout = build_layout(CU_SEQLENS, self.mesh)
        q, k = (self._shard(torch.randn(60, heads, 8), 1) for heads in (4, 2))
        whole = k.redistribute(placements=[Shard(0), Replicate()])
        with self.assertRaisesRegex(ValueError, r"tensor 1 has placement .*R.* over the axis 'tp'"):
            attend_dtensors(ring_attention, q, whole, k, layout=self.layout)
        with self.assertRaisesRegex(ValueError, "tensor 2 is no DTensor of the mesh of q"):
            attend_dtensors(ring_attention, q, k, k.to_local(), layout=self.layout)
        with self.assertRaisesRegex(ValueError, "q is a plain tensor among DTensors"):
            attend_dtensors(ring_attention, q.to_local(), k, k, layout=self.layout)

    def test_plain_tensors_pass_through(self):
        q, k = torch.randn(60, 4, 8), torch.randn(60, 2, 8)
        layout = build_layout(CU_SEQLENS, None)
        expected = ring_attention(q, k, k, layout=layout)
        self.assertTrue(torch.equal(attend_dtensors(ring_attention, q, k, k, layout=layout), expected))
