"""The DSpark network: each query of a block predicts the next token, under a bias from the token before it.

    query          0       1       2       3          block of 4 at anchor p
    reads          x[p]    mask    mask    mask
    position       p       p+1     p+2     p+3
    predicts       x[p+1]  x[p+2]  x[p+3]  x[p+4]
    teacher row    p       p+1     p+2     p+3
    bias from      x[p]    x[p+1]  x[p+2]  x[p+3]     in training the policy's tokens, in serving those just drafted

The Markov head adds ``W2 W1[previous token]`` to the logits. The confidence head reads the hidden row and
``W1[previous token]`` and predicts the probability that the drafted token is accepted.

Names of parameters are those of the checkpoint.

Source: DSpark (arXiv 2607.05147), its plain ("vanilla") Markov head; names as vLLM 0.32 serves them
(``model_executor/models/qwen3_dspark.py``). We differ: W2 starts at zero, so that a fresh draft starts without a bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specco.drafts.base import DraftRows, get_local_tensor
from specco.drafts.block import BlockDraft
from specco.drafts.dspark.config import DSparkConfig
from specco.losses import compute_confidence_loss
from specco.vocab_parallel import VocabShard


class MarkovHead(nn.Module):
    """Low-rank bias of the logits from the token before."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a drafted token is accepted."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)


class DSparkDraft(BlockDraft):
    """DSpark."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence_weight > 0:
            markov_size = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + markov_size)

    @torch.no_grad()
    def init_weights(self) -> None:
        super().init_weights()
        self.markov_head.markov_w2.weight.zero_()
        if self.confidence_head is not None:
            self.confidence_head.proj.bias.zero_()

    def get_head_parameters(self) -> list[nn.Parameter]:
        heads = [self.markov_head] if self.confidence_head is None else [self.markov_head, self.confidence_head]
        return [parameter for head in heads for parameter in head.parameters()]

    def compute_logits(self, rows: DraftRows, policy_head: Tensor, shard: VocabShard | None = None) -> Tensor:
        embedded = self.markov_head.markov_w1(rows.previous_ids)
        bias = F.linear(
            embedded if shard is None else shard.enter(embedded), get_local_tensor(self.markov_head.markov_w2.weight)
        )
        return super().compute_logits(rows, policy_head, shard) + bias

    def compute_confidence_logits(self, rows: DraftRows) -> Tensor:
        """Return ``[r]``: logits of the probability that each row's token is accepted."""
        assert self.confidence_head is not None, "confidence_weight is 0: there is no confidence head"
        inputs = rows.hidden
        if self.config.confidence_head_with_markov:
            inputs = torch.cat([inputs, self.markov_head.markov_w1(rows.previous_ids)], dim=-1)
        return self.confidence_head.proj(inputs).squeeze(-1)

    def compute_loss(
        self, rows: DraftRows, teacher_logits: Tensor, policy_head: Tensor, shard: VocabShard | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_sums, stats = super().compute_loss(rows, teacher_logits, policy_head, shard)
        if self.confidence_head is None:
            return loss_sums, stats
        confidence_sums = compute_confidence_loss(
            self.compute_confidence_logits(rows),
            1 - stats["tv"],
            weights=rows.weights,
            slot_ids=rows.slot_ids,
            num_slots=self.num_slots,
        )
        return loss_sums + self.config.confidence_weight * confidence_sums, stats
