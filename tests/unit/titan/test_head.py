"""The chunked head against plain autograd on whole logits."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.dspark.model import DSparkDraft
from specco.packing import PackedTokens, pack_documents
from specco.titan.head import HeadLinear, HeadPlan, compute_head_loss

NUM_SLOTS, WIDTH, VOCAB = 3, 16, 11
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": VOCAB,
    "target_layer_ids": (0,),
}


class WeightedLoss:
    """-sum(advantages * logprobs): the simplest loss that reads a row value."""

    row_value_names = ("advantages",)

    def __call__(self, logprobs, values):
        loss = -(values["advantages"] * logprobs).sum()
        return loss, {"logprob": logprobs.detach().sum()}


class FakeDraft(Draft):
    def __init__(self) -> None:
        super().__init__(DraftConfig(**SHAPE), num_slots=NUM_SLOTS)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)


def make_tokens(seed: int) -> PackedTokens:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 9, 4]
    documents = [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    advantages = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    (tokens,) = pack_documents(documents, masks, max_tokens=64, row_values={"advantages": advantages})
    return tokens


def make_rows(tokens: PackedTokens) -> DraftRows:
    """Every target row teaches each slot once, in an order of its own."""
    teacher = tokens.is_target_row.nonzero().squeeze(1).repeat(NUM_SLOTS)
    teacher = teacher[torch.randperm(teacher.numel())]
    num_rows = teacher.numel()
    return DraftRows(
        hidden=torch.randn(num_rows, WIDTH, dtype=torch.float64, requires_grad=True),
        teacher_rows=teacher,
        labels=torch.randint(VOCAB, (num_rows,)),
        previous_ids=torch.randint(VOCAB, (num_rows,)),
        slot_ids=torch.randint(NUM_SLOTS, (num_rows,)),
        branch_ids=teacher,
        weights=torch.rand(num_rows, dtype=torch.float64),
    )


def make_head() -> HeadLinear:
    head = HeadLinear.Config(in_features=WIDTH, out_features=VOCAB, param_init={"weight": nn.init.normal_}).build()
    return head.double()


def compute_dense(head, hidden, plan, draft=None, rows=None):
    """The same loss from whole logits; returns (loss, policy logprobs)."""
    tokens = plan.tokens
    logits = head(hidden[0])
    targets = tokens.is_target_row
    labels = torch.roll(tokens.input_ids, -1)
    logprobs = F.log_softmax(logits / plan.temperature, -1)[torch.arange(len(labels)), labels][targets]
    advantages = torch.roll(tokens.row_values["advantages"], -1)[targets]
    loss = -(advantages * logprobs).sum() * plan.policy_scale
    if rows is not None:
        teacher = F.softmax(logits.detach()[rows.teacher_rows], -1)
        head_weight = draft.lm_head.weight if draft.lm_head is not None else head.weight.detach()
        cross_entropy = -(teacher * F.log_softmax(rows.hidden @ head_weight.t(), -1)).sum(-1)
        loss = loss + plan.draft_scale * (rows.weights * cross_entropy).sum()
    return loss, logprobs


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
@pytest.mark.parametrize("has_own_head", [True, False])
def test_loss_and_gradients_equal_dense(chunk_rows: int, has_own_head: bool) -> None:
    torch.manual_seed(chunk_rows)
    tokens, head, draft = make_tokens(0), make_head(), FakeDraft()
    if not has_own_head:
        draft.lm_head = None
    rows = make_rows(tokens)
    hidden = torch.randn(1, tokens.num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    plan = HeadPlan(tokens, WeightedLoss(), policy_scale=0.3, draft_scale=0.7, temperature=0.8, chunk_rows=chunk_rows)
    inputs = [hidden, head.weight, rows.hidden, *draft.parameters()]

    loss, stats = compute_head_loss(head, hidden, plan, draft, rows)
    grads = torch.autograd.grad(loss, inputs)
    expected, logprobs = compute_dense(head, hidden, plan, draft, rows)
    expected_grads = torch.autograd.grad(expected, inputs)

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.logprobs, logprobs.detach(), rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)
    assert not any(value.isnan().any() for value in stats.draft_rows.values()), "a draft row was left out"


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_further_heads_of_a_draft_get_their_gradients(chunk_rows: int) -> None:
    """DSpark's Markov and confidence heads, against its loss of all rows at once."""
    torch.manual_seed(chunk_rows)
    config = DSparkConfig(
        **SHAPE, num_hidden_layers=1, block_size=NUM_SLOTS, mask_token_id=VOCAB - 1, markov_rank=5, num_anchors=3
    )
    tokens, head, draft = make_tokens(3), make_head().requires_grad_(False), DSparkDraft(config).double()
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    rows = make_rows(tokens)
    hidden = torch.randn(1, tokens.num_tokens, WIDTH, dtype=torch.float64)
    plan = HeadPlan(tokens, None, draft_scale=0.7, chunk_rows=chunk_rows)
    loss, stats = compute_head_loss(head, hidden, plan, draft, rows)
    inputs = [rows.hidden, *draft.get_head_parameters()]
    teacher = head(hidden[0])[rows.teacher_rows]
    expected_sums, expected_rows = draft.compute_loss(rows, teacher, head.weight)
    torch.testing.assert_close(loss, 0.7 * expected_sums.sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.draft_rows["tv"], expected_rows["tv"], rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(0.7 * expected_sums.sum(), inputs)
    assert len(expected) == 5
    for grad, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("draft_scale", [0.0, 0.7])
def test_policy_gradients_do_not_see_the_draft(draft_scale: float) -> None:
    """Contract C1, at the head: bit-equal with a draft, with a draft of weight 0, and with none."""
    torch.manual_seed(1)
    tokens, head, draft = make_tokens(1), make_head(), FakeDraft()
    hidden = torch.randn(1, tokens.num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    plan = HeadPlan(tokens, WeightedLoss(), policy_scale=0.3, draft_scale=draft_scale, chunk_rows=4)
    alone, _ = compute_head_loss(head, hidden, plan)
    joint, _ = compute_head_loss(head, hidden, plan, draft, make_rows(tokens))
    for a, b in zip(
        torch.autograd.grad(alone, [hidden, head.weight]),
        torch.autograd.grad(joint, [hidden, head.weight]),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_frozen_policy_gets_no_gradient() -> None:
    torch.manual_seed(2)
    tokens, head, draft = make_tokens(2), make_head().requires_grad_(False), FakeDraft()
    rows = make_rows(tokens)
    hidden = torch.randn(1, tokens.num_tokens, WIDTH, dtype=torch.float64)
    loss, stats = compute_head_loss(head, hidden, HeadPlan(tokens, None), draft, rows)
    loss.backward()
    assert head.weight.grad is None
    assert rows.hidden.grad.abs().sum() > 0
    assert stats.policy_sums == {}


def test_nothing_to_train_is_zero_with_gradients() -> None:
    """A rank without targets reports the same names and gives zero gradients, not absent ones."""
    (tokens,) = pack_documents(
        [torch.zeros(3, dtype=torch.int64)],
        [torch.zeros(3, dtype=torch.bool)],
        max_tokens=3,
        row_values={"advantages": [torch.zeros(3, dtype=torch.float64)]},
    )
    head, draft = make_head(), FakeDraft()
    rows = make_rows(tokens)
    hidden = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    loss, stats = compute_head_loss(head, hidden, HeadPlan(tokens, WeightedLoss()), draft, rows)
    loss.backward()
    assert loss.item() == 0
    assert set(stats.policy_sums) == {"logprob"}
    for value in (hidden, head.weight, draft.lm_head.weight):
        assert value.grad is not None
        assert value.grad.abs().sum() == 0


@pytest.mark.parametrize(("name", "value"), [("chunk_rows", 0), ("temperature", 0.0)])
def test_bad_plan_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        HeadPlan(make_tokens(0), None, **{name: value})
