"""Shape and training choices of an EAGLE-3 draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specco.drafts.base import DraftConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """One EAGLE-3 draft.

    Args:
        ttt_steps: passes of the training-time test, as many as the engine shall draft tokens.
        loss_decay: weight of pass d is ``loss_decay ** (d - 1)``.
        norm_before_residual: the residual of the attention is ``hidden_norm(h)`` instead of ``h``.
        norm_before_fc: one norm over the concatenated taps.
        fc_norm: one norm a tap; excludes ``norm_before_fc``.
        norm_output: feed the next pass the output after the final norm instead of before it.
        draft_vocab_size: tokens that the draft predicts, see ``drafts/vocab.py``; None: all.

    Raises:
        ValueError: a value that is out of range or contradicts another, by name.
    """

    method: ClassVar[str] = "eagle3"

    ttt_steps: int = 3
    loss_decay: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("ttt_steps")
        if not 0 < self.loss_decay <= 1:
            raise ValueError(f"loss_decay is {self.loss_decay}; allowed are 0 < loss_decay <= 1")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; allowed are None and 1 to {self.vocab_size - 1}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both True; at most one of them may be")
