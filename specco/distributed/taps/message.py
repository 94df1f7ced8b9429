"""The message that carries one source's taps of one microbatch: a stamp, then each tap as one dense block.

| stamp: 8 int64 words | rows of tap 0 | its rows of the step | rows of tap 1 | ...
  step, microbatch, stage, rows, time, status, 0, sequence number
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specco.distributed.taps.plan import TapSource

STAMP_BYTES = 64
SEQUENCE_WORD = 7
"""Written last: the message is whole once its sequence number stands there."""

TAPS, FAILURE, END = 0, 1, 2
"""Status of a message: carries taps; the source has failed; the channel is closed."""


class Stamp(NamedTuple):
    """What a message says of itself.

    Args:
        step: counted from 0 by the channel, one for each ``step()`` of the schedule.
        microbatch: of the step.
        stage: the source.
        num_rows: token rows of the microbatch.
        sent_ns: wall-clock time at which the source wrote it, in nanoseconds.
        status: ``TAPS``, ``FAILURE`` or ``END``.
    """

    step: int
    microbatch: int
    stage: int
    num_rows: int
    sent_ns: int
    status: int = TAPS


class TapRows(NamedTuple):
    """One tap of one microbatch.

    Args:
        rows: ``[rows, width]``.
        step_rows: ``[num_step_rows, width]`` with the step's first microbatch, else None.
    """

    rows: Tensor
    step_rows: Tensor | None

    def list_tensors(self) -> list[Tensor]:
        """Return both, or the one there is."""
        return [self.rows] if self.step_rows is None else [self.rows, self.step_rows]


@dataclass(frozen=True)
class MessageFormat:
    """How messages of one source lie in a slot.

    Args:
        source: whose taps they carry.
        dtype: of all taps.
        max_rows: most token rows of a microbatch.
        first_microbatch: the one that carries the rows of the step.
    """

    source: TapSource
    dtype: torch.dtype
    max_rows: int
    first_microbatch: int

    @property
    def slot_bytes(self) -> int:
        """Return the size of a slot, a multiple of the stamp's."""
        payload = self.source.count_elements(self.max_rows, is_first=True) * self.dtype.itemsize
        return STAMP_BYTES * (1 + math.ceil(payload / STAMP_BYTES))

    def count_payload_bytes(self, stamp: Stamp) -> int:
        """Return the bytes of the taps."""
        is_first = stamp.microbatch == self.first_microbatch
        return self.source.count_elements(stamp.num_rows, is_first) * self.dtype.itemsize

    def split_payload(self, payload: Tensor, stamp: Stamp) -> list[TapRows]:
        """Return views of the taps in a payload (any memory, ``[elements]`` or more, of ``dtype``)."""
        is_first, offset, parts = stamp.microbatch == self.first_microbatch, 0, []

        def cut(num_rows: int, width: int) -> Tensor:
            nonlocal offset
            offset += num_rows * width
            return payload[offset - num_rows * width : offset].view(num_rows, width)

        for tap in self.source.taps:
            rows = cut(stamp.num_rows, tap.width)
            has_step_rows = is_first and tap.num_step_rows
            parts.append(TapRows(rows, cut(tap.num_step_rows, tap.width) if has_step_rows else None))
        return parts

    def view_payload(self, slot: Tensor) -> Tensor:
        """Return the payload of a slot as ``dtype``."""
        return slot[STAMP_BYTES:].view(self.dtype)

    def write(self, slot: Tensor, stamp: Stamp, taps: Sequence[TapRows], sequence: int) -> int:
        """Write a message, its sequence number last; return the bytes of its payload.

        Args:
            slot: uint8 of host memory, ``[slot_bytes]``; ``[STAMP_BYTES]`` is enough without taps.
            stamp: of the message.
            taps: one for each tap of the source; empty: the stamp alone.
            sequence: of the message, from 1.
        """
        num_bytes = copy_taps(taps, self.split_payload(self.view_payload(slot), stamp)) if taps else 0
        words = slot[:STAMP_BYTES].view(torch.int64)
        words[:SEQUENCE_WORD] = torch.tensor([*stamp, 0])
        words[SEQUENCE_WORD] = sequence
        return num_bytes

    def read(self, slot: Tensor, stamp: Stamp) -> list[TapRows]:
        """Return copies of the taps in a slot."""
        parts = self.split_payload(self.view_payload(slot), stamp)
        return [TapRows(rows.clone(), None if extra is None else extra.clone()) for rows, extra in parts]


@dataclass(frozen=True)
class TapLink:
    """The way of one source's messages to the draft.

    Args:
        message: format of a message.
        num_slots: messages that may be under way before a forward of the source waits.
        transport: "local", "shm", "cuda_ipc" or "p2p".
    """

    message: MessageFormat
    num_slots: int
    transport: str

    @property
    def source(self) -> TapSource:
        return self.message.source


def read_stamp(slot: Tensor) -> Stamp:
    """Return the stamp of a slot of host memory."""
    return Stamp(*slot[:STAMP_BYTES].view(torch.int64)[: len(Stamp._fields)].tolist())


def copy_taps(taps: Sequence[TapRows], into: Sequence[TapRows]) -> int:
    """Copy taps into views of the same shapes; return the bytes copied."""
    num_bytes = 0
    for tap, view in zip(taps, into, strict=True):
        for tensor, place in zip(tap.list_tensors(), view.list_tensors(), strict=True):
            place.copy_(tensor)
            num_bytes += tensor.nbytes
    return num_bytes


class TapSender(Protocol):
    """The source's end of a transport. Errors: ``TimeoutError``, ``ConnectionError``."""

    def wait_slot(self, timeout_s: float) -> None:
        """Return when a slot is free."""

    def put(self, stamp: Stamp, taps: Sequence[TapRows]) -> int:
        """Start the transfer of a message through the free slot; return the bytes of payload that travel."""

    def fail(self) -> None:
        """Tell the other end, without waiting, that nothing will follow."""

    def close(self, timeout_s: float) -> None:
        """End after the last message; the other end closes as well."""


class TapReceiver(Protocol):
    """The draft's end of a transport. Errors: ``TimeoutError``, ``ConnectionError``."""

    def wait_message(self, timeout_s: float) -> Stamp:
        """Return the stamp of the next message when it is whole."""

    def take(self, stamp: Stamp) -> list[TapRows]:
        """Return the taps of that message, in memory of their own, and free its slot."""

    def fail(self) -> None:
        """Tell the other end, without waiting, that nothing will be taken any more."""

    def close(self, timeout_s: float) -> None:
        """End after the last message; the other end closes as well."""


def poll(is_ready_fn: Callable[[], bool], timeout_s: float, check_fn: Callable[[], None], what: str) -> None:
    """Wait until ``is_ready_fn`` holds, in naps of 0.05 to 1 ms.

    Args:
        is_ready_fn: asked again and again.
        timeout_s: seconds until ``TimeoutError``.
        check_fn: raises when waiting has become pointless.
        what: is waited for, for the error.
    """
    if is_ready_fn():
        return
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(min(1e-3, max(5e-5, waited / 20)))
        if is_ready_fn():
            return
        check_fn()
