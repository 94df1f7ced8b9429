"""Anchors of block drafts: which rows start a block, what each slot of a block predicts, and which slots count.

A block hangs on an anchor row p. Its prediction j (from 0) is of token x[p+1+j], whose teacher is the policy's
distribution at row p + j. Serving drafts from a token that the policy has just written, so p is one, and so is p + 1:
the last row of a prompt or of a tool's output is no anchor. For a document of 9 tokens with two turns, blocks of 3
predictions:

    row            0   1   2   3   4   5   6   7   8
    loss_mask      .   .   1   1   1   1   .   1   1
    anchor?        .   .   p   p   p   .   .   p   .       p and p + 1 are trained
    valid slots            3   2   1           1           a block ends where its document or its turn does

Anchors are drawn for each document alone, from (seed, step, sample id): any rank, packing or microbatching draws the
same.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from specco.drafts.base import DraftRows
from specco.packing import PackedTokens


def find_candidates(tokens: PackedTokens) -> Tensor:
    """Return bool ``[S]``: True where a row and the next one of its document are both trained tokens."""
    return tokens.loss_mask & tokens.is_target_row


def sample_anchors(tokens: PackedTokens, num_anchors: int) -> Tensor:
    """Draw at most ``num_anchors`` candidates of each document, without replacement.

    Args:
        tokens: the packed microbatch, global; its ``draw_key`` and ``sample_ids`` seed the draw.
        num_anchors: a document with no more candidates than these gives all of them.

    Returns:
        int64 ``[B]``, global rows, ascending, on the device of the tokens.
    """
    candidates = find_candidates(tokens).cpu()
    bounds, sample_ids = tokens.cu_seqlens.tolist(), tokens.sample_ids.tolist()
    picked = []
    for start, end, sample_id in zip(bounds, bounds[1:], sample_ids, strict=False):
        rows = start + candidates[start:end].nonzero().squeeze(1)
        if rows.numel() > num_anchors:
            generator = torch.Generator().manual_seed(_derive_seed(tokens.draw_key, sample_id))
            order = torch.randperm(rows.numel(), generator=generator)[:num_anchors]
            rows = rows[order.sort().values]
        picked.append(rows)
    return torch.cat(picked).to(tokens.input_ids.device)


def _derive_seed(draw_key: tuple[int, int], sample_id: int) -> int:
    digest = hashlib.blake2b(f"anchors/{draw_key[0]}/{draw_key[1]}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def find_valid_slots(tokens: PackedTokens, anchors: Tensor, num_slots: int) -> Tensor:
    """Return bool ``[B, num_slots]``: True up to, not including, the first prediction that is not trained.

    Args:
        tokens: the packed microbatch, global.
        anchors: int64 ``[B]``, global rows.
        num_slots: predictions of a block.
    """
    is_trained = [tokens.shift(tokens.loss_mask, 1 + slot, False)[anchors] for slot in range(num_slots)]
    return torch.stack(is_trained, dim=1).cumprod(dim=1).bool()


def build_block_rows(
    hidden: Tensor, anchors: Tensor, is_valid: Tensor, tokens: PackedTokens, slot_weights: Tensor
) -> DraftRows:
    """Attach labels, teachers and weights to the valid predictions of some blocks.

    Args:
        hidden: ``[R, D]``, normalised output of the valid predictions, block by block.
        anchors: int64 ``[B]``, global rows.
        is_valid: bool ``[B, num_slots]``, of ``find_valid_slots``.
        tokens: the packed microbatch, global.
        slot_weights: float64 ``[num_slots]``, loss weight of each prediction.
    """
    block_ids, slot_ids = is_valid.nonzero(as_tuple=True)
    branch_ids = anchors[block_ids]
    teacher_rows = branch_ids + slot_ids
    weights = slot_weights.to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))
    return DraftRows(
        hidden=hidden,
        teacher_rows=teacher_rows,
        labels=tokens.input_ids[teacher_rows + 1],
        previous_ids=tokens.input_ids[teacher_rows],
        slot_ids=slot_ids,
        branch_ids=branch_ids,
        weights=weights[slot_ids],
    )
