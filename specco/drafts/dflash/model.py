"""The DFlash network: each mask of a block predicts the token at its own place.

    query          0       1       2       3          block of 4 at anchor p
    reads          x[p]    mask    mask    mask
    position       p       p+1     p+2     p+3
    predicts       -       x[p+1]  x[p+2]  x[p+3]
    teacher row    -       p       p+1     p+2

Source: DFlash (arXiv 2602.06036), whose network is ``BlockDraft`` as it stands; its loss is that of ``Draft``.
"""

from __future__ import annotations

from specco.drafts.block import BlockDraft
from specco.drafts.dflash.config import DFlashConfig


class DFlashDraft(BlockDraft):
    """DFlash."""

    config: DFlashConfig
