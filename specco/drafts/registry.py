"""The draft families."""

from __future__ import annotations

from specco.drafts.base import Draft, DraftConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dflash.model import DFlashDraft
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.dspark.model import DSparkDraft
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.model import Eagle3Draft

DRAFT_CLASSES: dict[type[DraftConfig], type[Draft]] = {
    Eagle3Config: Eagle3Draft,
    DFlashConfig: DFlashDraft,
    DSparkConfig: DSparkDraft,
}
"""The draft that each config stands for."""


def build_draft(config: DraftConfig) -> Draft:
    """Return the draft of ``config``, its weights not initialised."""
    return DRAFT_CLASSES[type(config)](config)  # pyrefly: ignore[bad-argument-count, missing-argument]
