"""The reduced vocabulary of a draft: the tokens that the policy writes most often.

It is chosen once, from the response tokens of rollouts, when a draft starts from nothing; from then on it is part of
the draft, in checkpoints and in exports, and is never chosen again. As an engine keeps it:

    target ids   1  2  5  9        ascending
    d2t          1  1  3  6        offsets: draft id i stands for target id i + d2t[i]
    t2d          . 1 1 . . 1 . . . 1 .

Source: EAGLE-3 (arXiv 2503.01840), its released code; names as vLLM 0.32 reads them. We differ in what is masked: a row
is not trained where the token that the policy wrote is outside, instead of the policy's most probable one, so that the
sum of the rows' weights is known from the tokens alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_target_ids(counts: Tensor, size: int) -> Tensor:
    """Return int64 ``[size]``, ascending: the tokens with the highest counts, the lower id first among equals.

    Args:
        counts: ``[V]``, how often the policy wrote each token.
        size: tokens to choose.

    Raises:
        ValueError: more tokens than there are.
    """
    if not 0 < size <= counts.numel():
        raise ValueError(f"a draft vocabulary of {size} tokens was asked for; allowed are 1 to {counts.numel()}")
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def build_vocabulary_maps(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (d2t int64 ``[V_d]``, t2d bool ``[V]``) of ascending target ids ``[V_d]``."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids.device)
    t2d[target_ids] = True
    return target_ids - torch.arange(target_ids.numel(), device=target_ids.device), t2d


def compute_target_ids(d2t: Tensor) -> Tensor:
    """Return int64 ``[V_d]``: the target id of each draft id."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def check_vocabulary_maps(d2t: Tensor, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Return the target ids of maps read from a file.

    Raises:
        ValueError: maps of another size, target ids that are not ascending or not in the vocabulary, or maps that
            contradict each other.
    """
    if d2t.shape != (draft_vocab_size,):
        raise ValueError(f"d2t has shape {tuple(d2t.shape)}; the draft has draft_vocab_size={draft_vocab_size}")
    target_ids = compute_target_ids(d2t.long())
    if bool((target_ids.diff() <= 0).any()) or int(target_ids[0]) < 0 or int(target_ids[-1]) >= vocab_size:
        raise ValueError(
            f"d2t holds offsets that lead to target ids {int(target_ids.min())} to {int(target_ids.max())}; allowed "
            f"are ascending ids of 0 to {vocab_size - 1}"
        )
    if t2d is not None and not torch.equal(t2d.bool(), build_vocabulary_maps(target_ids, vocab_size)[1]):
        raise ValueError("t2d does not name the tokens that d2t leads to")
    return target_ids
