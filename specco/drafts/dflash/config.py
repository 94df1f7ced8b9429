"""Shape and training choices of a DFlash draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specco.drafts.block import BlockConfig


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """One DFlash draft: a block of W queries predicts W - 1 tokens, as many as the engine shall draft.

    The paper trains on the label's cross-entropy; the default here is the cross-entropy under the policy, of which that
    is a noisy sample.
    """

    method: ClassVar[str] = "dflash"
    first_prediction: ClassVar[int] = 1
