"""Tiny models for engine tests: a Qwen3 policy that learnt a Markov stream, an EAGLE-3 draft that half follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from specco.drafts.base import Draft
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens, pack_documents

VOCAB_SIZE = 64
HIDDEN_SIZE = 64
NUM_LAYERS = 4
TARGET_LAYER_IDS = (0, 1, 2)
TTT_STEPS = 3


def sample_stream(num_rows: int, length: int, seed: int) -> Tensor:
    """Return int64 ``[num_rows, length]`` of one fixed Markov chain, about 2.3 nats a token."""
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).mul(2.5).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB_SIZE, (num_rows,), generator=generator)]
    for _ in range(length - 1):
        tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(tokens, 1)


def train_policy(num_steps: int) -> Qwen3ForCausalLM:
    """Return a small Qwen3 trained on the stream; the same at every call."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3)
    for step in range(num_steps):
        tokens = sample_stream(32, 33, seed=100 + step)
        F.cross_entropy(policy(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy.eval()


@torch.no_grad()
def tap_policy(policy: Qwen3ForCausalLM, tokens: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return taps ``[S, m * D]``, embeddings ``[S, D]`` and logits ``[S, V]`` of packed documents."""
    lengths = torch.diff(tokens.cu_seqlens).tolist()
    width = max(lengths)
    rows = torch.zeros(len(lengths), width, dtype=torch.int64)
    is_real = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    rows[is_real] = tokens.input_ids  # padding comes last, where a causal model does not see it
    out = policy(rows, output_hidden_states=True)
    taps = torch.cat([out.hidden_states[layer + 1] for layer in TARGET_LAYER_IDS], dim=-1)
    return taps[is_real], out.hidden_states[0][is_real], out.logits[is_real]


SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "target_layer_ids": TARGET_LAYER_IDS,
    "max_position_embeddings": 512,
}
"""Fields of drafts that fit ``train_policy``'s model."""


def make_draft(seed: int) -> Eagle3Draft:
    """Return an EAGLE-3 draft with random weights."""
    draft = Eagle3Draft(Eagle3Config(**SHAPE, ttt_steps=TTT_STEPS))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft.init_weights()
    return draft


def train_draft(draft: Draft, policy: Qwen3ForCausalLM, num_steps: int) -> None:
    """Train ``draft`` in place on the stream, by its own passes and loss."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(num_steps):
        documents = list(sample_stream(16, 25, seed=10_000 + step))
        masks = [torch.ones_like(document, dtype=torch.bool) for document in documents]
        (tokens,) = pack_documents(documents, masks, max_tokens=16 * 25)
        taps, embeddings, logits = tap_policy(policy, tokens)
        table = policy.get_input_embeddings().weight.detach()
        mask_embedding = None if draft.mask_token_id is None else table[draft.mask_token_id]
        rows = draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens), None, mask_embedding)
        loss_sums, _ = draft.compute_loss(rows, logits[rows.teacher_rows], policy.lm_head.weight.detach())
        (loss_sums.sum() / rows.weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def predict_with_draft(
    draft: Eagle3Draft, policy: Qwen3ForCausalLM, prefixes: list[list[int]], proposals: list[list[int]]
) -> Tensor:
    """Return int64 ``[n, ttt_steps]``: the training network's most probable tokens after each prefix.

    Pass d + 1 reads token d of the proposal, exactly as a serving engine feeds a draft its own tokens: the proposal is
    greedy if and only if the result equals it.
    """
    documents = [torch.tensor(prefix + proposal) for prefix, proposal in zip(prefixes, proposals, strict=True)]
    masks = [torch.ones_like(document, dtype=torch.bool) for document in documents]
    (tokens,) = pack_documents(documents, masks, max_tokens=sum(map(len, documents)))
    taps, embeddings, _ = tap_policy(policy, tokens)
    rows = draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens))
    best = draft.lm_head(rows.hidden).argmax(-1)
    # the last row whose features the engine has is the one before the token that the policy sampled last
    anchors = tokens.cu_seqlens[:-1].long() + torch.tensor([len(prefix) - 2 for prefix in prefixes])
    predicted = torch.full((len(prefixes), draft.num_slots), -1)
    for slot in range(draft.num_slots):
        rows_of_slot = (rows.slot_ids == slot).nonzero().squeeze(1)
        order = torch.searchsorted(rows.branch_ids[rows_of_slot], anchors)
        assert torch.equal(rows.branch_ids[rows_of_slot][order], anchors)
        predicted[:, slot] = best[rows_of_slot][order]
    return predicted


@torch.no_grad()
def compute_logprobs(policy: Qwen3ForCausalLM, prompts: Tensor, responses: Tensor, temperature: float) -> Tensor:
    """Return float64 ``[N, length, V]``: the exact distributions of the response tokens at ``temperature``.

    Args:
        policy: the model.
        prompts: int64 ``[N, prompt length]``.
        responses: int64 ``[N, length]``.
        temperature: > 0.
    """
    logits = policy(torch.cat([prompts, responses], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def save_policy(policy: Qwen3ForCausalLM, path: Path) -> str:
    policy.save_pretrained(path)
    return str(path)
