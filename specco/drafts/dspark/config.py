"""Shape and training choices of a DSpark draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from specco.drafts.block import BlockConfig
from specco.losses import LossTerms


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """One DSpark draft: each of a block's queries predicts a token, as many as the engine shall draft.

    Args:
        markov_rank: width of the Markov head.
        confidence_weight: factor of the confidence head's loss; 0: the draft has no such head.
        confidence_head_with_markov: whether the confidence head also reads the Markov embedding.

    Raises:
        ValueError: a value that is out of range or contradicts another, by name.
    """

    method: ClassVar[str] = "dspark"
    first_prediction: ClassVar[int] = 0

    markov_rank: int = 256
    confidence_weight: float = 1.0
    confidence_head_with_markov: bool = True
    loss_terms: LossTerms = field(default_factory=lambda: LossTerms(label_cross_entropy=0.1, l1=0.9))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("markov_rank")
        if self.confidence_weight < 0:
            raise ValueError(f"confidence_weight is {self.confidence_weight}; it must be >= 0")
