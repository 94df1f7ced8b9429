"""The policy: torchtitan's decoders to the bit, packed, in any dtype; taps survive activation checkpointing."""

from dataclasses import fields, replace

import pytest
import torch
from helpers.gpt_oss import WINDOW, make_gpt_oss_config
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.deepseek_v3 import deepseekv3_configs
from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3 import qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model

from specco.drafts.base import DraftConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.ops.branch_attention import ring_attention
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens, pack_documents
from specco.testing.tolerances import OP_FLOAT32, max_error
from specco.titan.attention import PackedMasks
from specco.titan.layers import SinkAttention
from specco.titan.policy import adapt_config
from specco.titan.registry import model_registry
from specco.titan.sizes import make_policy_config

SIZES = {"num_layers": 4, "dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DRAFT = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=40,
    target_layer_ids=(0, 1, 3),
)
BLOCK_DRAFT = DFlashConfig(
    **{field.name: getattr(DRAFT, field.name) for field in fields(DraftConfig)},
    num_hidden_layers=2,
    block_size=3,
    mask_token_id=5,
)


TARGETS = {
    "qwen3": {"architecture": "qwen3"},
    "qwen3_moe": {"architecture": "qwen3", "num_experts": 4, "top_k": 2},
    "llama3": {"architecture": "llama3", "rope_scaling": {"scaling": "llama"}},
}
every_target = pytest.mark.parametrize("target", TARGETS)


def build(draft=None, *, target="qwen3", is_frozen=False, dtype=torch.float32, seed=0):
    config = make_policy_config(**TARGETS[target], vocab_size=40, max_seq_len=64, init_std=0.3, **SIZES)
    config.draft, config.is_frozen = draft, is_frozen
    with torch.device("meta"):
        policy = config.build()
    policy.verify_module_protocol()
    policy = policy.to(dtype).to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        policy.init_weights()
    return policy


def make_tokens(lengths=(7, 12, 3)) -> PackedTokens:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 40, (n,), generator=generator) for n in lengths]
    masks = [torch.arange(n) >= 2 for n in lengths]
    return pack_documents(documents, masks, max_tokens=64)[0]


def run(policy, tokens):
    return policy(tokens.input_ids[None], tokens.position_ids[None], packed_tokens=tokens)


def policy_gradients(policy):
    return {name: p.grad for name, p in policy.named_parameters() if not name.startswith("draft.")}


@pytest.mark.parametrize(
    ("target", "model"), [("qwen3", Qwen3Model), ("qwen3_moe", Qwen3Model), ("llama3", Llama3Model)]
)
def test_logits_are_torchtitans_to_the_bit(target, model):
    policy = build(target=target)
    reference = model(policy.config)
    reference.load_state_dict(policy.state_dict())
    tokens = make_tokens()
    inputs = (tokens.input_ids[None], tokens.position_ids[None])
    masks = PackedMasks.from_positions(inputs[1])
    assert torch.equal(policy(*inputs), reference(*inputs, masks))


@every_target
def test_packed_documents_equal_documents_alone_in_float64(target):
    policy = build(target=target, dtype=torch.float64)
    tokens = make_tokens()
    packed = policy(tokens.input_ids[None], tokens.position_ids[None])
    assert packed.dtype == torch.float64
    alone = [policy(document[None]) for document in tokens.input_ids.split([7, 12, 3])]
    assert (packed - torch.cat(alone, dim=1)).abs().max() < 1e-12


def test_a_batch_of_rows_equals_rows_alone():
    policy = build(dtype=torch.float64)
    rows = torch.randint(0, 40, (3, 6))
    alone = torch.cat([policy(row[None]) for row in rows])
    assert (policy(rows) - alone).abs().max() < 1e-12


class RecordingDraft(nn.Module):
    """Stands in for a draft and keeps what it is given."""

    def __init__(self, target_layer_ids, mask_token_id=None):
        super().__init__()
        self.target_layer_ids, self.mask_token_id = target_layer_ids, mask_token_id
        self.calls = []

    def forward(self, taps, embeddings, tokens, layout, group, mask_embedding):
        self.calls.append((taps, embeddings, tokens, layout, group, mask_embedding))
        return len(self.calls)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_taps_are_detached_layer_outputs_in_order(is_checkpointed):
    policy = build()
    policy.draft = RecordingDraft((0, 1, 3))
    outputs = {}
    for name, layer in policy.layers.named_children():
        # a hook that returned something would replace the layer's output
        layer.register_forward_hook(lambda module, args, out, name=name: outputs.update({name: out.detach()}))
    embedded = []
    policy.tok_embeddings.register_forward_hook(lambda module, args, out: embedded.append(out.detach()))
    if is_checkpointed:
        FullAC(FullAC.Config()).apply(policy)
    tokens = make_tokens()
    hidden, rows = run(policy, tokens)
    assert rows == 1
    hidden.sum().backward()
    assert len(policy.draft.calls) == 1, "a recompute must not tap again"
    taps, embeddings, given_tokens, layout, group, mask_embedding = policy.draft.calls[0]
    assert torch.equal(taps, torch.cat([outputs[name] for name in "013"], dim=-1)[0])
    assert torch.equal(embeddings, embedded[0][0])
    assert not taps.requires_grad
    assert not embeddings.requires_grad
    assert given_tokens is tokens
    assert torch.equal(layout.cu_seqlens, tokens.cu_seqlens)
    assert group is None
    assert mask_embedding is None


def test_a_draft_with_masks_is_given_their_embedding_detached():
    policy = build()
    policy.draft, policy.mask_token_id = RecordingDraft((1,), mask_token_id=39), 39
    run(policy, make_tokens())
    ((_, embeddings, *_, mask_embedding),) = policy.draft.calls
    assert torch.equal(mask_embedding, policy.tok_embeddings.weight[39])
    assert not mask_embedding.requires_grad
    assert embeddings.shape == (22, 32)


@every_target
def test_activation_checkpointing_changes_no_bit(target):
    plain, checkpointed = build(DRAFT, target=target), build(DRAFT, target=target)
    FullAC(FullAC.Config()).apply(checkpointed)
    tokens = make_tokens()
    for policy in (plain, checkpointed):
        hidden, rows = run(policy, tokens)
        (policy.lm_head(hidden).square().sum() + rows.hidden.square().sum()).backward()
    names = [name.replace("._checkpoint_wrapped_module", "") for name, _ in checkpointed.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        # the draft's own head is applied by the chunked head, not here
        assert (a.grad is None) == (b.grad is None) == (name == "draft.lm_head.weight")
        assert a.grad is None or torch.equal(a.grad, b.grad), name


@every_target
@pytest.mark.parametrize("draft", [DRAFT, BLOCK_DRAFT], ids=["eagle3", "dflash"])
def test_a_draft_changes_no_bit_of_the_policy(draft, target):
    alone, carrying = build(target=target), build(draft, target=target)
    tokens = make_tokens()
    for (name, a), (other, b) in zip(alone.named_parameters(), carrying.named_parameters(), strict=False):
        assert name == other
        assert torch.equal(a, b), name
    hidden_alone, rows = run(alone, tokens)
    assert rows is None
    hidden_carrying, rows = run(carrying, tokens)
    assert torch.equal(hidden_alone, hidden_carrying)
    alone.lm_head(hidden_alone).square().sum().backward()
    (carrying.lm_head(hidden_carrying).square().sum() + rows.hidden.square().sum()).backward()
    expected = policy_gradients(alone)
    for name, grad in policy_gradients(carrying).items():
        assert torch.equal(grad, expected[name]), name
    assert all(p.grad is not None for name, p in carrying.draft.named_parameters() if name != "lm_head.weight")


def test_a_frozen_policy_trains_its_draft_alone():
    policy = build(DRAFT, is_frozen=True)
    hidden, rows = run(policy, make_tokens())
    assert not hidden.requires_grad
    rows.hidden.sum().backward()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("draft.") for name in trained)


@every_target
def test_float64_reaches_the_drafts_rows(target):
    hidden, rows = run(build(DRAFT, target=target, dtype=torch.float64), make_tokens())
    assert hidden.dtype == torch.float64
    assert rows.hidden.dtype == torch.float64


def test_taps_beyond_the_last_layer_are_refused():
    config = make_policy_config("qwen3", vocab_size=40, **SIZES)
    config.draft = replace(DRAFT, target_layer_ids=(1, 4))
    with pytest.raises(ValueError, match=r"target_layer_ids is \(1, 4\); the policy has 4 layers"):
        config.build()


def test_what_a_policy_cannot_be_made_from_is_refused_by_name():
    sizes = {"vocab_size": 40} | SIZES
    with pytest.raises(ValueError, match="num_experts is 4 and architecture 'llama3'; only \"qwen3\" has experts"):
        make_policy_config("llama3", num_experts=4, top_k=2, **sizes)
    with pytest.raises(ValueError, match="top_k is 5; allowed are 1 to num_experts=4"):
        make_policy_config("qwen3", num_experts=4, top_k=5, **sizes)
    config = qwen3_configs["debugmodel"](attn_backend="flex")
    config.layers[3] = replace(config.layers[3], attention=replace(config.layers[3].attention, rope=None))
    with pytest.raises(ValueError, match=r"layer 3: its RoPE is NoneType; supported are \['CosSinRoPE', 'Complex"):
        adapt_config(config)
    config.layers[2] = replace(config.layers[2], attention=None)
    with pytest.raises(ValueError, match=r"layer 2: its attention is NoneType; supported are \['GQAttention', 'Att"):
        adapt_config(config)
    experts = make_gpt_oss_config(max_seq_len=64, num_experts=8, top_k=4, **sizes)
    moe, dense = experts.layers[1].moe, config.layers[0].feed_forward
    assert dense is not None
    experts.layers[1].moe = replace(moe, shared_experts=dense)
    with pytest.raises(ValueError, match="layer 1: its MoE has a shared expert"):
        adapt_config(experts)
    experts.layers[1].moe = replace(moe, routed_experts=replace(moe.routed_experts, inner_experts=dense))
    with pytest.raises(ValueError, match=r"layer 1: its experts are FeedForward; supported are \['GroupedExper"):
        adapt_config(experts)
    with pytest.raises(ValueError, match="config is of DeepSeekV3Model; a policy can be made from"):
        adapt_config(deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard"))


def test_a_submodule_outside_the_protocol_is_still_refused():
    policy = build(DRAFT)
    policy.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="extra"):
        policy.verify_module_protocol()
    assert policy.draft is not None


@pytest.mark.parametrize(
    ("flavor", "size"), [("tiny", 1_329_792), ("smoke", 156_480), ("smoke_moe", 453_440), ("smoke_llama3", 156_224)]
)
def test_flavours_have_the_stated_size(flavor, size):
    with torch.device("meta"):
        policy = model_registry(flavor).model.build()
    assert sum(p.numel() for p in policy.parameters()) == size


def test_gpt_oss_attends_layer_by_layer_as_its_own_config_says():
    """torchtitan's rule for sinks, out * sigmoid(lse - sink), on rows of each layer; then a draft on the whole."""
    config = adapt_config(make_gpt_oss_config(vocab_size=40, max_seq_len=64, num_experts=8, top_k=4, **SIZES))
    draft = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config.draft = Eagle3Config(**draft, head_dim=16, vocab_size=40, target_layer_ids=(0, 1, 3))
    policy = config.build()
    policy.verify_module_protocol()
    torch.manual_seed(0)
    with torch.no_grad():
        policy.init_weights()
    tokens = make_tokens()
    masks = PackedMasks(PackedLayout.build(tokens.cu_seqlens))
    windows = []
    for layer in policy.layers.values():
        attention = layer.attention
        assert isinstance(attention, SinkAttention)
        windows.append(attention.inner_attention.window)
        torch.nn.init.normal_(attention.sinks)
        x = torch.randn(1, tokens.num_tokens, 32)
        q, k, v = attention.qkv_linear(x)
        q, k = attention.rope(q, k, tokens.position_ids[None])
        out, lse = ring_attention(
            q[0], k[0], v[0], layout=masks.layout, window=windows[-1], scale=attention.softmax_scale, return_lse=True
        )
        expected = attention.wo(apply_attention_sink_rescale(out, lse, attention.sinks).flatten(1)[None])
        assert max_error(attention(x, masks, tokens.position_ids[None]), expected) < OP_FLOAT32
    assert windows == [WINDOW, None, WINDOW, None]
    hidden, rows = run(policy, tokens)
    (policy.lm_head(hidden).square().mean() + rows.hidden.square().mean()).backward()
    for layer in policy.layers.values():
        assert layer.attention.sinks.grad.abs().min() > 0


def test_an_unknown_flavour_is_refused():
    with pytest.raises(ValueError, match=r"flavor is 'huge'; allowed are \['smoke', 'smoke_llama3', 'smoke_moe', 'tin"):
        model_registry("huge")
