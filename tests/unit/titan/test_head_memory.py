"""Measured: whatever the loss, no tensor of the vocabulary's width outlives its chunk of rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.draft_cases import HIDDEN_SIZE, make_config, make_dflash_config, make_draft, make_dspark_config
from torch.profiler import ProfilerActivity, profile

from specco.drafts.base import DraftConfig
from specco.losses import LossTerms
from specco.ops.layout import PackedLayout
from specco.packing import pack_documents
from specco.rl.grpo import GrpoLoss
from specco.titan.head import HeadLinear, HeadPlan, compute_head_loss

VOCAB_SIZE, CHUNK_ROWS = 16384, 16
CHUNK_BYTES = CHUNK_ROWS * VOCAB_SIZE * 4
"""One float32 tensor of a chunk: 1 MiB."""

SHAPE = {"vocab_size": VOCAB_SIZE, "target_layer_ids": (0,)}
CASES: dict[str, DraftConfig] = {
    "eagle3": make_config(**SHAPE),
    "eagle3_reduced": make_config(**SHAPE, draft_vocab_size=VOCAB_SIZE // 2),
    "dflash": make_dflash_config(**SHAPE, num_anchors=1000),
    "dspark": make_dspark_config(**SHAPE, num_anchors=1000),
    **{
        f"eagle3_{name}": make_config(**SHAPE, loss_terms=LossTerms(**{name: 1.0}))
        for name in ("label_cross_entropy", "l1", "log_acceptance", "adaptive_kl_tv")
    },
}


def measure_peak(config: DraftConfig, num_tokens: int) -> int:
    """Return the peak of bytes allocated by the head, its chunks, losses and gradients."""
    draft = make_draft(config, dtype=torch.float32)
    if draft.d2t is not None:
        draft.set_vocabulary(torch.arange(0, VOCAB_SIZE, 2))
    head = HeadLinear.Config(in_features=HIDDEN_SIZE, out_features=VOCAB_SIZE).build()
    torch.nn.init.normal_(head.weight)
    ids, mask = torch.arange(num_tokens) * 2, torch.arange(num_tokens) >= 1
    values = {"inference_logprobs": [torch.zeros(num_tokens)], "advantages": [torch.ones(num_tokens)]}
    (tokens,) = pack_documents([ids], [mask], max_tokens=num_tokens, row_values=values)
    rows = draft(
        torch.randn(num_tokens, HIDDEN_SIZE),
        torch.randn(num_tokens, HIDDEN_SIZE),
        tokens,
        PackedLayout.build(tokens.cu_seqlens),
        None,
        None if draft.mask_token_id is None else torch.randn(HIDDEN_SIZE),
    )
    assert rows.hidden.shape[0] > 2 * num_tokens
    hidden = torch.randn(1, num_tokens, HIDDEN_SIZE, requires_grad=True)
    plan = HeadPlan(tokens, GrpoLoss(), chunk_rows=CHUNK_ROWS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss, _ = compute_head_loss(head, hidden, plan, draft, rows)
        loss.backward()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("name", list(CASES))
def test_peak_does_not_grow_with_the_rows(name):
    """Twice the rows, 5 MiB more if one tensor of all rows stayed: the peak grows by less than half a chunk."""
    small, large = measure_peak(CASES[name], 80), measure_peak(CASES[name], 160)
    print(f"{name}: peak {small / CHUNK_BYTES:.1f} and {large / CHUNK_BYTES:.1f} chunks")
    assert large - small < CHUNK_BYTES / 2
    assert large < 16 * CHUNK_BYTES
