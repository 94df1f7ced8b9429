"""Packed attention as torchtitan calls it, against dense attention document by document."""

import pytest
import torch
import torch.nn.functional as F

from specco.ops.layout import PackedLayout
from specco.testing.tolerances import OP_FLOAT64, max_error
from specco.titan.attention import PackedAttention, PackedMasks


def make_qkv(num_rows: int, num_heads: int, num_kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(1, num_rows, n, 8, dtype=torch.float64, requires_grad=True) for n in heads]


def attend_densely(q, k, v, lengths, scale=None):
    outs = []
    for parts in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
        q_, k_, v_ = (x.transpose(0, 1) for x in parts)
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)[None]


@pytest.mark.parametrize(("num_kv_heads", "scale"), [(4, None), (2, 0.7), (1, 0.1)])
def test_output_and_gradients_are_those_of_each_document_alone(num_kv_heads, scale):
    lengths = [5, 1, 9]
    q, k, v = make_qkv(15, 4, num_kv_heads)
    masks = PackedMasks(PackedLayout.build([0, 5, 6, 15]))
    out = PackedAttention.Config().build()(q, k, v, attention_masks=masks, scale=scale, enable_gqa=num_kv_heads < 4)
    expected = attend_densely(q, k, v, lengths, scale)
    assert max_error(out, expected) < OP_FLOAT64
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        assert max_error(ours, theirs) < OP_FLOAT64


def attend_with_window_and_sinks(q, k, v, lengths, window, sinks):
    """Dense softmax over the visible keys and one more logit a head, document by document."""
    outs = []
    for q_, k_, v_ in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
        n = q_.shape[0]
        k_, v_ = (x.repeat_interleave(q_.shape[1] // x.shape[1], dim=1) for x in (k_, v_))
        distance = torch.arange(n)[:, None] - torch.arange(n)
        is_visible = (distance >= 0) & (distance < (n if window is None else window))
        scores = torch.einsum("inh,jnh->nij", q_, k_) * q_.shape[-1] ** -0.5
        scores = scores.masked_fill(~is_visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], dim=-1)
        outs.append(torch.einsum("nij,jnh->inh", scores.softmax(-1)[..., :n], v_))
    return torch.cat(outs)[None]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_layers_window_and_sinks_are_those_of_dense_attention(window, has_sinks):
    lengths = [5, 1, 9]
    q, k, v = make_qkv(15, 4, 2)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    masks = PackedMasks(PackedLayout.build([0, 5, 6, 15]))
    attention = PackedAttention.Config(window=window).build()
    out = attention(q, k, v, attention_masks=masks, enable_gqa=True, sinks=sinks)
    expected = attend_with_window_and_sinks(q, k, v, lengths, window, sinks)
    assert max_error(out, expected) < OP_FLOAT64
    grad = torch.randn_like(out)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert max_error(ours, theirs) < OP_FLOAT64


def test_rows_of_a_batch_follow_each_other():
    q, k, v = (x.detach().view(3, 5, -1, 8) for x in make_qkv(15, 4, 4))
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [7, 8, 0, 1, 2]])
    masks = PackedMasks.from_positions(positions)
    assert masks.layout.cu_seqlens.tolist() == [0, 5, 7, 10, 12, 15]
    out = PackedAttention.Config().build()(q, k, v, attention_masks=masks)
    expected = attend_densely(*(x.flatten(0, 1)[None] for x in (q, k, v)), [5, 2, 3, 2, 3])
    assert max_error(out.flatten(0, 1)[None], expected) < OP_FLOAT64


def test_what_it_cannot_honour_is_refused():
    q, k, v = make_qkv(6, 4, 2)
    attention = PackedAttention.Config().build()
    masks = PackedMasks(PackedLayout.build([0, 6]))
    with pytest.raises(ValueError, match="4 query heads on 2 key heads need enable_gqa"):
        attention(q, k, v, attention_masks=masks)
    with pytest.raises(ValueError, match="attention_masks is NoneType; PackedAttention takes PackedMasks"):
        attention(q, k, v, attention_masks=None, enable_gqa=True)
    with pytest.raises(ValueError, match="the batch has 6 rows, but its layout has 7"):
        attention(q, k, v, attention_masks=PackedMasks(PackedLayout.build([0, 7])), enable_gqa=True)
    with pytest.raises(TypeError, match="score_mod"):
        attention(q, k, v, attention_masks=masks, enable_gqa=True, score_mod=lambda *x: x)
