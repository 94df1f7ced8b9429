"""Losses of logits whose vocabulary is spread over ranks: the values and gradients of one rank with all columns."""

from __future__ import annotations

import torch
import torch.distributed as dist

from specco.losses import LossTerms, compute_draft_loss
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize
from specco.testing.tolerances import STEP_FLOAT64, relative_error
from specco.vocab_parallel import VocabShard, compute_logprobs

NUM_ROWS, VOCAB_SIZE = 9, 11
TARGET_IDS = torch.tensor([0, 2, 3, 5, 9])

TERMS = {
    "soft": LossTerms(soft_cross_entropy=1.0),
    "label_l1": LossTerms(label_cross_entropy=0.1, l1=0.9),
    "log_acceptance": LossTerms(log_acceptance=1.0),
    "adaptive_kl_tv": LossTerms(adaptive_kl_tv=1.0),
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def take(x: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    return x[:, shard.start : shard.start + shard.size]


def run_loss(terms: LossTerms, target_ids: torch.Tensor | None, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the loss sums, the figures of the rows, and the gradient of this rank's columns."""
    shard = VocabShard.build(VOCAB_SIZE, group)
    draft_size = VOCAB_SIZE if target_ids is None else target_ids.numel()
    draft_logits = take(3 * draw(0, NUM_ROWS, draft_size), VocabShard.build(draft_size, group)).requires_grad_()
    labels = torch.arange(NUM_ROWS) % VOCAB_SIZE if target_ids is None else target_ids.repeat(2)[:NUM_ROWS]
    sums, stats = compute_draft_loss(
        draft_logits,
        take(3 * draw(1, NUM_ROWS, VOCAB_SIZE), shard),
        labels=labels,
        weights=draw(2, NUM_ROWS).abs(),
        slot_ids=torch.arange(NUM_ROWS) % 2,
        num_slots=2,
        terms=terms,
        target_ids=target_ids,
        shard=shard,
    )
    (gradient,) = torch.autograd.grad(sums @ draw(3, 2), draft_logits)
    return [sums.detach(), stats["tv"], stats["top1"], stats["label_acceptance"], gradient]


@instantiate_parametrized_tests
class TestVocabParallel(GlooTestCase):
    world_size = 2

    @parametrize("name", list(TERMS))
    @parametrize("is_reduced", [False, True])
    def test_draft_loss_equals_one_rank(self, name: str, is_reduced: bool):
        target_ids = TARGET_IDS if is_reduced else None
        *expected, expected_gradient = run_loss(TERMS[name], target_ids, None)
        *actual, gradient = run_loss(TERMS[name], target_ids, dist.group.WORLD)
        for value, wanted in zip(actual, expected, strict=True):
            self.assertLess(relative_error(value, wanted), STEP_FLOAT64)
        shard = VocabShard.build(expected_gradient.shape[1], dist.group.WORLD)
        self.assertLess(relative_error(gradient, take(expected_gradient, shard)), STEP_FLOAT64)

    def test_logprobs_equal_one_rank(self):
        """Logits far apart, which a sum without the maximum would lose."""
        logits, ids = 300 * draw(0, NUM_ROWS, VOCAB_SIZE), torch.arange(NUM_ROWS)
        shard = VocabShard.build(VOCAB_SIZE, dist.group.WORLD)
        whole, mine = logits.clone().requires_grad_(), take(logits, shard).clone().requires_grad_()
        expected = torch.log_softmax(whole, dim=1)[ids, ids]
        actual = compute_logprobs(mine, ids, shard)
        self.assertLess(relative_error(actual, expected.detach()), STEP_FLOAT64)
        (expected_gradient,) = torch.autograd.grad(expected @ draw(1, NUM_ROWS), whole)
        (gradient,) = torch.autograd.grad(actual @ draw(1, NUM_ROWS), mine)
        self.assertLess(relative_error(gradient, take(expected_gradient, shard)), STEP_FLOAT64)

    def test_argmax_is_the_first_token_of_the_largest_logit(self):
        logits = torch.zeros(4, VOCAB_SIZE)
        logits[1, 7] = logits[2, 2] = logits[2, 8] = logits[3, 10] = 1.0
        shard = VocabShard.build(VOCAB_SIZE, dist.group.WORLD)
        self.assertEqual(shard.argmax(take(logits, shard)).tolist(), [0, 7, 2, 10])

    def test_enter_sums_the_gradients_of_the_shards(self):
        x = torch.ones(3, requires_grad=True)
        (VocabShard.build(VOCAB_SIZE, dist.group.WORLD).enter(x) * (self.rank + 1)).sum().backward()
        self.assertEqual(x.grad.tolist(), [3.0, 3.0, 3.0])
