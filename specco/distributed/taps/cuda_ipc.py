"""The transport ``cuda_ipc``: a mailbox in the draft's GPU memory that the source's process writes itself.

Same protocol as ``shm``, with stamps and control words in shared host memory, and payloads in device memory that both
processes have open. The words are written when work is queued, not when it is done; events that both processes share
order the streams: the draft's copy out waits for ``written``, the source's next copy into the slot for ``read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from specco.distributed.taps.message import MessageFormat, Stamp, TapRows, copy_taps
from specco.distributed.taps.transports import PeerWatch, SharedMailbox, ShmReceiver, ShmSender


class DeviceSlots:
    """Payload slots on the draft's GPU and the events that order their use.

    Args:
        payloads: ``[num_slots, elements]``.
        written: one CUDA event a slot, recorded by the source.
        read: one CUDA event a slot, recorded by the draft.
    """

    def __init__(self, payloads: Tensor, written: list[Any], read: list[Any]) -> None:
        self.payloads, self.written, self.read = payloads, written, read

    @classmethod
    def make(cls, message: MessageFormat, num_slots: int, device: torch.device) -> DeviceSlots:
        """Allocate them, in the draft's process."""
        num_elements = message.source.count_elements(message.max_rows, is_first=True)
        payloads = torch.empty(num_slots, num_elements, dtype=message.dtype, device=device)
        written, read = ([torch.cuda.Event(interprocess=True) for _ in range(num_slots)] for _ in range(2))
        return cls(payloads, written, read)

    def get_handle(self) -> tuple[Any, ...]:
        """Return what another process of this host opens them with."""
        events = [[event.ipc_handle() for event in events] for events in (self.written, self.read)]
        return (*reduce_tensor(self.payloads), *events)

    @classmethod
    def open(cls, handle: tuple[Any, ...]) -> DeviceSlots:
        """Open them, in the source's process."""
        rebuild_fn, arguments, written, read = handle
        payloads = rebuild_fn(*arguments)
        events = [[torch.cuda.Event.from_ipc_handle(payloads.device, h) for h in hs] for hs in (written, read)]
        return cls(payloads, *events)


class CudaIpcSender(ShmSender):
    """The source's end: the copy runs on a side stream."""

    def __init__(self, message: MessageFormat, mailbox: SharedMailbox, watch: PeerWatch, slots: DeviceSlots) -> None:
        super().__init__(message, mailbox, watch)
        self.slots, self.stream = slots, torch.cuda.Stream()

    def put(self, stamp: Stamp, taps: Sequence[TapRows]) -> int:
        place = self.num_sent % len(self.slots.payloads)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.num_sent >= len(self.slots.payloads):
                self.stream.wait_event(self.slots.read[place])
            num_bytes = copy_taps(taps, self.message.split_payload(self.slots.payloads[place], stamp))
            self.slots.written[place].record(self.stream)
        for tap in taps:
            for tensor in tap.list_tensors():
                tensor.record_stream(self.stream)
        super().put(stamp, ())
        return num_bytes


class CudaIpcReceiver(ShmReceiver):
    """The draft's end: the copy out runs on the stream that uses the taps."""

    def __init__(self, message: MessageFormat, mailbox: SharedMailbox, watch: PeerWatch, slots: DeviceSlots) -> None:
        super().__init__(message, mailbox, watch)
        self.slots = slots

    def take(self, stamp: Stamp) -> list[TapRows]:
        place, stream = self.num_taken % len(self.slots.payloads), torch.cuda.current_stream()
        stream.wait_event(self.slots.written[place])
        parts = self.message.split_payload(self.slots.payloads[place], stamp)
        taps = [TapRows(rows.clone(), None if extra is None else extra.clone()) for rows, extra in parts]
        self.slots.read[place].record(stream)
        self.free_slot()
        return taps
