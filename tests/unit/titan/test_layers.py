"""torchtitan's layers as the policies need them: the base's bits where it keeps the dtype, else float64 throughout."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from specco.ops.layout import PackedLayout
from specco.testing.tolerances import OP_BFLOAT16, OP_FLOAT64, max_error, relative_error
from specco.titan.attention import PackedMasks
from specco.titan.layers import (
    AnyDtypeComplexRoPE,
    AnyDtypeDispatcher,
    AnyDtypeExperts,
    AnyDtypeGptOssExperts,
    AnyDtypeRoPE,
    PackedMoE,
)
from specco.titan.policy import PackedMoEBlock
from specco.titan.sizes import make_policy_config

DIM, EXPERT_DIM, NUM_EXPERTS, TOP_K = 16, 24, 6, 2
SIZES = {"vocab_size": 40, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def make_moe(dtype=torch.float64) -> PackedMoE:
    config = make_policy_config(
        "qwen3", dim=DIM, hidden_dim=EXPERT_DIM, num_experts=NUM_EXPERTS, top_k=TOP_K, init_std=0.5, **SIZES
    )
    block = config.layers[0]
    assert isinstance(block, PackedMoEBlock.Config)
    moe = block.moe.build()
    torch.manual_seed(0)
    with torch.no_grad():
        moe.init_states()
    return moe.to(dtype)


def make_masks(lengths, *, cp_size=1, cp_rank=0) -> PackedMasks:
    return PackedMasks(PackedLayout.build([0, *torch.tensor(lengths).cumsum(0).tolist()], cp_size, cp_rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ours", "theirs"), [(AnyDtypeRoPE, CosSinRoPE), (AnyDtypeComplexRoPE, ComplexRoPE)])
def test_rope_without_the_cast_is_torchtitans_to_the_bit(ours, theirs, dtype):
    torch.manual_seed(0)
    query, key = torch.randn(2, 9, 4, 16).to(dtype), torch.randn(2, 9, 2, 16).to(dtype)
    positions = torch.randint(0, 50, (2, 9))
    kwargs = {"dim": 16, "max_seq_len": 50, "theta": 10_000.0}
    mended = ours.Config(**kwargs).build()(query, key, positions)
    for a, b in zip(mended, theirs.Config(**kwargs).build()(query, key, positions), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


def test_rope_of_halves_computes_in_float64():
    rope = AnyDtypeRoPE.Config(dim=16, max_seq_len=50).build()
    query, key = torch.randn(2, 1, 9, 4, 16, dtype=torch.float64)
    # the cache holds each angle twice, for the two halves of a head
    cos, _, sin, _ = rope.cache[:9, None].double().chunk(4, dim=-1)
    for rotated, x in zip(rope(query, key, None), (query, key), strict=True):
        first, second = x.chunk(2, dim=-1)
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        assert rotated.dtype == torch.float64
        assert max_error(rotated, expected) < 1e-14


def test_rope_of_pairs_computes_in_float64():
    rope = AnyDtypeComplexRoPE.Config(dim=16, max_seq_len=50).build()
    query, key = torch.randn(2, 1, 9, 4, 16, dtype=torch.float64)
    cos, sin = rope.cache[:9, None].real.double(), rope.cache[:9, None].imag.double()
    for rotated, x in zip(rope(query, key, None), (query, key), strict=True):
        first, second = x[..., ::2], x[..., 1::2]
        expected = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
        assert rotated.dtype == torch.float64
        assert max_error(rotated, expected) < 1e-14


@pytest.mark.parametrize(
    ("ours", "theirs"), [(AnyDtypeExperts, GroupedExperts), (AnyDtypeGptOssExperts, GptOssGroupedExperts)]
)
def test_experts_in_bfloat16_are_torchtitans_to_the_bit(ours, theirs):
    """And in float64, where torchtitan rounds to bfloat16, up to that rounding."""
    torch.manual_seed(0)
    kwargs = {"dim": DIM, "hidden_dim": EXPERT_DIM, "num_experts": NUM_EXPERTS}
    experts, expected = ours.Config(**kwargs).build(), theirs.Config(**kwargs).build()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    expected.load_state_dict(experts.state_dict())
    counts = torch.tensor([3, 0, 5, 1, 4, 2])
    x = torch.randn(15, DIM, dtype=torch.bfloat16)
    rows = experts.double()(x.double(), counts)
    assert rows.dtype == torch.float64
    out = expected.bfloat16()(x, counts)
    assert torch.equal(experts.bfloat16()(x, counts), out)
    assert relative_error(rows, out.double()) < OP_BFLOAT16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_experts_is_torchtitans_to_the_bit(dtype):
    torch.manual_seed(0)
    kwargs = {"num_experts": NUM_EXPERTS, "top_k": TOP_K}
    ours, theirs = AnyDtypeDispatcher.Config(**kwargs).build(), LocalTokenDispatcher.Config(**kwargs).build()
    x, scores = torch.randn(7, DIM).to(dtype), torch.rand(7, TOP_K)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(7)])
    counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS)
    outs = []
    for dispatcher in (ours, theirs):
        rows, _, metadata = dispatcher.dispatch(x, scores, ids, counts)
        outs.append(dispatcher.combine(rows.sin(), metadata, x))
    assert torch.equal(*outs)


def test_experts_in_float64_are_a_weighted_sum_of_each_tokens_own():
    moe = make_moe()
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    out = moe(x, make_masks([4, 5]))
    experts = moe.routed_experts.inner_experts
    probabilities = F.softmax(x[0] @ moe.router.gate.weight.t(), dim=-1)
    expected = torch.zeros_like(x[0])
    for row in range(9):
        weights, ids = probabilities[row].topk(TOP_K)
        for weight, i in zip(weights / weights.sum(), ids.tolist(), strict=True):
            hidden = F.silu(x[0, row] @ experts.w1_EFD[i].t()) * (x[0, row] @ experts.w3_EFD[i].t())
            expected[row] += weight * (hidden @ experts.w2_EDF[i].t())
    assert out.dtype == torch.float64
    assert max_error(out[0], expected) < OP_FLOAT64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_padding_a_moe_is_torchtitans_to_the_bit(dtype):
    moe = make_moe(dtype).train()
    x = torch.randn(2, 5, DIM, dtype=dtype)
    out = moe(x, make_masks([10]))
    counted = moe.tokens_per_expert_E.clone()
    moe.tokens_per_expert_E.zero_()
    assert torch.equal(out, MoE.forward(moe, x))
    assert torch.equal(counted, moe.tokens_per_expert_E)
    moe(x, make_masks([10])._replace(is_counted=False))
    assert torch.equal(counted, moe.tokens_per_expert_E), "made-up rows are counted"
    assert counted.sum() == 10 * TOP_K


def test_padding_rows_reach_neither_the_routers_statistics_nor_any_gradient():
    """Rank 1 of a document of 9 tokens at cp 4 holds chunks 1 and 6 of 8, of two rows each: the second is padding."""
    masks = make_masks([9, 5], cp_size=4, cp_rank=1)
    is_real = masks.layout.global_rows >= 0
    assert 0 < is_real.sum() < is_real.numel()
    torch.manual_seed(1)
    x = torch.randn(1, is_real.numel(), DIM, dtype=torch.float64)
    grad_out = torch.randn_like(x) * is_real[:, None]  # nothing reads a padding row
    results = []
    for padding in (0.0, 100.0, torch.randn(DIM, dtype=torch.float64)):
        moe = make_moe().train()
        rows = torch.where(is_real[:, None], x, padding).requires_grad_()
        out = moe(rows, masks)
        out.backward(grad_out)
        grads = {name: p.grad for name, p in moe.named_parameters()} | {"x": rows.grad}
        results.append((moe.tokens_per_expert_E, out[0, is_real], grads))
    counts, out, grads = results[0]
    assert counts.sum() == is_real.sum() * TOP_K
    for other_counts, other_out, other_grads in results[1:]:
        assert torch.equal(other_counts, counts)
        assert max_error(other_out, out) < OP_FLOAT64
        for name, grad in grads.items():
            assert max_error(other_grads[name], grad) < OP_FLOAT64, name
