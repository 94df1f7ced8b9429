"""Whether an engine accepts sampled drafts as often as the training network's distributions say."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from helpers.engine_models import sample_stream, tap_policy
from specco.drafts.base import Draft
from specco.drafts.block import BlockDraft
from specco.ops.layout import PackedLayout
from specco.packing import pack_documents
from specco.rl.engine import RolloutEngine, SamplingConfig

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 64, 16, 24
BOOTSTRAP = 2000


@dataclass(frozen=True)
class Verification:
    """One verification of a request: tokens known before it, the one sampled last included, and drafts accepted."""

    request: Any
    num_tokens: int
    num_accepted: int


@contextmanager
def record_verifications(engine: RolloutEngine) -> Generator[list[Verification]]:
    """Record every verification that the engine's own scheduler counts."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    update, seen = scheduler.update_from_output, []

    def update_recorded(scheduler_output, model_runner_output):
        for request_id in scheduler_output.scheduled_spec_decode_tokens:
            request = scheduler.requests[request_id]
            index = model_runner_output.req_id_to_index[request_id]
            num_accepted = len(model_runner_output.sampled_token_ids[index]) - 1
            seen.append(Verification(request, request.num_tokens, num_accepted))
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_recorded
    try:
        yield seen
    finally:
        scheduler.update_from_output = update


@torch.no_grad()
def compute_stats(draft: Draft, policy: Qwen3ForCausalLM, documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (TV, label acceptance), each ``[document, anchor position, slot]``, NaN where no whole block fits."""
    if isinstance(draft, BlockDraft):
        draft.config = replace(draft.config, num_anchors=10_000)
    length = documents[0].numel()
    masks = [torch.ones(length, dtype=torch.bool) for _ in documents]
    (tokens,) = pack_documents(documents, masks, max_tokens=length * len(documents))
    taps, embeddings, logits = tap_policy(policy, tokens)
    mask_id = draft.mask_token_id
    mask_embedding = None if mask_id is None else policy.get_input_embeddings().weight[mask_id]
    rows = draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens), None, mask_embedding)
    _, stats = draft.compute_loss(rows, logits[rows.teacher_rows], policy.lm_head.weight)
    out = torch.full((2, len(documents), length, draft.num_slots), torch.nan)
    for place, name in zip(out, ("tv", "label_acceptance"), strict=True):
        place.flatten(0, 1)[rows.branch_ids, rows.slot_ids] = stats[name]
    return out[0].double(), out[1].double()


@dataclass
class AcceptanceTest:
    """The engine's rate and the expected one by position, and the standard error of their difference."""

    rates: Tensor
    expected: Tensor
    stderr: Tensor
    num_verifications: int

    @property
    def z(self) -> Tensor:
        return (self.rates - self.expected) / self.stderr


def run_acceptance_test(engine: RolloutEngine, draft: Draft, policy: Qwen3ForCausalLM) -> AcceptanceTest:
    """Sample at temperature 1 and compare, at the engine's own verifications, rates with expectations.

    Position k is accepted with probability ``E[prod_{j<k} min(1, q_j(x_j) / p_j(x_j)) (1 - TV_k)]`` over continuations
    x that the policy samples; what the engine wrote after the verification is such a continuation. Verifications that
    could reach past the end of the response are left out, by their place alone. The standard error is of the
    difference, by a bootstrap over prompts.
    """
    prompts = sample_stream(NUM_PROMPTS, 8, seed=6).tolist()
    engine.stats()
    with record_verifications(engine) as seen:
        engine.generate(prompts, SamplingConfig(n=NUM_SAMPLES, max_tokens=MAX_TOKENS, seed=12))
    stats, num_slots = engine.stats(), draft.num_slots
    # what was recorded is what the engine counts
    assert len(seen) == stats.num_drafts
    for k, accepted in enumerate(stats.num_accepted_tokens_per_pos):
        assert sum(v.num_accepted > k for v in seen) == accepted
    requests = list({id(v.request): v.request for v in seen}.values())
    index = {id(request): i for i, request in enumerate(requests)}
    tv, ratio = compute_stats(draft, policy, [torch.tensor(list(r.all_token_ids)) for r in requests])
    sums = torch.zeros(NUM_PROMPTS, 2, num_slots, dtype=torch.float64)
    counts = torch.zeros(NUM_PROMPTS, dtype=torch.float64)
    for v in seen:
        if v.num_tokens + num_slots + 1 > len(prompts[0]) + MAX_TOKENS:
            continue
        prompt = prompts.index(list(v.request.prompt_token_ids))
        # a block hangs on the token sampled last, an EAGLE-3 branch on the row before it
        anchor = v.num_tokens - (1 if isinstance(draft, BlockDraft) else 2)
        row_tv, row_ratio = tv[index[id(v.request)], anchor], ratio[index[id(v.request)], anchor]
        reached = torch.cat([torch.ones(1, dtype=torch.float64), row_ratio[:-1].cumprod(0)])
        sums[prompt, 0] += torch.arange(num_slots) < v.num_accepted
        sums[prompt, 1] += reached * (1 - row_tv)
        counts[prompt] += 1
    assert not sums.isnan().any()
    picks = torch.randint(NUM_PROMPTS, (BOOTSTRAP, NUM_PROMPTS), generator=torch.Generator().manual_seed(0))
    differences = sums[:, 0] - sums[:, 1]
    stderr = (differences[picks].sum(1) / counts[picks].sum(1, keepdim=True)).std(dim=0)
    rates, expected = sums.sum(0) / counts.sum()
    return AcceptanceTest(rates, expected, stderr, int(counts.sum()))
