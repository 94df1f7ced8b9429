"""Ways of a message from a source's rank to the draft's on one host: by reference, and ``shm``.

``shm`` is a mailbox that both processes map. Its memory has no name (memfd), so the system frees it with the last of
the two processes, however they end:

    | taken, source failed, draft failed (a cache line each) | slot 0 | slot 1 | ...

The source writes slot n % k when n - taken < k; the slot's sequence number, n + 1, is written last. The draft copies
the slot out when it reads that number and then writes ``taken`` = n + 1. Each word has one writer; x86-64 makes stores
visible in the order in which they are made, which is what this rests on.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import select
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from specco.distributed.taps.message import (
    SEQUENCE_WORD,
    STAMP_BYTES,
    MessageFormat,
    Stamp,
    TapRows,
    poll,
    read_stamp,
)

logger = logging.getLogger(__name__)

_CONTROL_BYTES = 256
_TAKEN, _SOURCE_FAILED, _DRAFT_FAILED = 0, 8, 16  # words, each at the start of a cache line of its own


class LocalQueue:
    """Both ends of a source on the draft's own rank: tensors are handed over by reference."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.queue: deque[tuple[Stamp, list[TapRows]]] = deque()

    def wait_slot(self, timeout_s: float) -> None:
        if len(self.queue) >= self.num_slots:
            raise TimeoutError(f"all {self.num_slots} slots are full, and the rank that would empty them is this one")

    def put(self, stamp: Stamp, taps: Sequence[TapRows]) -> int:
        self.queue.append((stamp, list(taps)))
        return 0

    def wait_message(self, timeout_s: float) -> Stamp:
        if not self.queue:
            raise TimeoutError("there is no message, and the rank that would send it is this one")
        return self.queue[0][0]

    def take(self, stamp: Stamp) -> list[TapRows]:
        return self.queue.popleft()[1]

    def fail(self) -> None:
        self.queue.clear()

    def close(self, timeout_s: float) -> None:
        self.queue.clear()


class PeerWatch:
    """Knows whether a process of this host has ended, whatever happens to its process id afterwards."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self.poller = select.poll()
        self.poller.register(self.fd, select.POLLIN)

    def has_ended(self) -> bool:
        return bool(self.poller.poll(0))

    def check(self) -> None:
        """Raise ``ConnectionError`` if it has."""
        if self.has_ended():
            raise ConnectionError(f"process {self.pid} at the other end has ended")

    def close(self) -> None:
        os.close(self.fd)


class SharedMailbox:
    """Memory that the draft's process makes and the source's process maps.

    Args:
        num_slots: of the mailbox.
        slot_bytes: of a slot; 0 for control words and stamps alone.
        handle: (process id, file descriptor there) of the maker; None: make it.

    Attributes:
        words: int64, the control words.
        slots: uint8 ``[num_slots, slot_bytes]``.
    """

    def __init__(self, num_slots: int, slot_bytes: int, handle: tuple[int, int] | None = None) -> None:
        size = _CONTROL_BYTES + num_slots * slot_bytes
        if handle is None:
            self.fd = os.memfd_create("specco-taps")
            os.ftruncate(self.fd, size)
        else:
            pid, fd = handle
            self.fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self.map = mmap.mmap(self.fd, size)
        whole = torch.frombuffer(self.map, dtype=torch.uint8)
        self.words = whole[:_CONTROL_BYTES].view(torch.int64)
        self.slots = whole[_CONTROL_BYTES:].view(num_slots, slot_bytes)

    @property
    def handle(self) -> tuple[int, int]:
        return os.getpid(), self.fd

    def close_file(self) -> None:
        """Close the file once both sides have mapped it; the mapping stays."""
        os.close(self.fd)

    @staticmethod
    def find_obstacle() -> str | None:
        """Return why this machine cannot have one; None: it can."""
        if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
            return f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
        return None


class ShmSender:
    """The source's end of a mailbox in shared memory."""

    def __init__(self, message: MessageFormat, mailbox: SharedMailbox, watch: PeerWatch) -> None:
        self.message, self.mailbox, self.watch = message, mailbox, watch
        self.num_sent = 0

    def _check(self) -> None:
        if self.mailbox.words[_DRAFT_FAILED]:
            raise ConnectionError("the draft's rank has failed")
        self.watch.check()

    def wait_slot(self, timeout_s: float) -> None:
        self._check()
        words, num_slots = self.mailbox.words, len(self.mailbox.slots)
        poll(lambda: self.num_sent - int(words[_TAKEN]) < num_slots, timeout_s, self._check, "a free slot")

    def put(self, stamp: Stamp, taps: Sequence[TapRows]) -> int:
        slot = self.mailbox.slots[self.num_sent % len(self.mailbox.slots)]
        self.num_sent += 1
        return self.message.write(slot, stamp, taps, self.num_sent)

    def fail(self) -> None:
        self.mailbox.words[_SOURCE_FAILED] = 1

    def close(self, timeout_s: float) -> None:
        poll(lambda: int(self.mailbox.words[_TAKEN]) == self.num_sent, timeout_s, self._check, "the last message's end")


class ShmReceiver:
    """The draft's end of a mailbox in shared memory."""

    def __init__(self, message: MessageFormat, mailbox: SharedMailbox, watch: PeerWatch) -> None:
        self.message, self.mailbox, self.watch = message, mailbox, watch
        self.num_taken = 0

    def _slot(self) -> Tensor:
        return self.mailbox.slots[self.num_taken % len(self.mailbox.slots)]

    def _check(self) -> None:
        if self.mailbox.words[_SOURCE_FAILED]:
            raise ConnectionError("the source's rank has failed")
        self.watch.check()

    def wait_message(self, timeout_s: float) -> Stamp:
        words = self._slot()[:STAMP_BYTES].view(torch.int64)
        poll(lambda: int(words[SEQUENCE_WORD]) == self.num_taken + 1, timeout_s, self._check, "its taps")
        return read_stamp(self._slot())

    def take(self, stamp: Stamp) -> list[TapRows]:
        taps = self.message.read(self._slot(), stamp)
        self.free_slot()
        return taps

    def free_slot(self) -> None:
        """Give the slot of the message that was waited for back to the source."""
        self.num_taken += 1
        self.mailbox.words[_TAKEN] = self.num_taken

    def fail(self) -> None:
        self.mailbox.words[_DRAFT_FAILED] = 1

    def close(self, timeout_s: float) -> None:
        """Nothing to wait for: the source waits until the last message is taken."""
