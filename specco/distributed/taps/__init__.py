"""Taps under pipeline parallelism: what each stage sends to the draft's (TapPlan) and what carries it (TapChannel)."""

from specco.distributed.taps.channel import TapChannel, TapError, Taps
from specco.distributed.taps.plan import STAGE_INPUT, Tap, TapPlan

__all__ = ["STAGE_INPUT", "Tap", "TapChannel", "TapError", "TapPlan", "Taps"]
