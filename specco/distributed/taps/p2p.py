"""The transport ``p2p``: messages over a process group of their own, gloo between hosts' memories, NCCL between GPUs.

    source      put:   copy into a slot; isend the stamp (host memory, gloo); isend the payload, of exactly its bytes
    draft       inbox: a thread for each source rank: receive a stamp, post the receive of its payload, queue both

The inbox posts receives ahead of the draft, one slot each, and hands their memory over, so nothing is copied twice. On
a GPU the payload moves on side streams of both ends, and the stamps still through host memory: the group's backend is
"cpu:gloo,cuda:nccl". Stamps and payloads of one source rank travel in the order of its forwards, whatever the stage.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specco.distributed.taps.message import (
    END,
    FAILURE,
    STAMP_BYTES,
    TAPS,
    MessageFormat,
    Stamp,
    TapLink,
    TapRows,
    copy_taps,
    read_stamp,
)

logger = logging.getLogger(__name__)

STAMP_TAG, PAYLOAD_TAG = 1, 2
FOREVER_S = 365 * 24 * 3600.0


def wait_work(work: dist.Work | None, timeout_s: float) -> None:
    """Wait for an exchange of host memory (gloo); of GPU memory let the current stream wait (NCCL).

    Raises:
        TimeoutError: nothing came.
        ConnectionError: the other end is gone.
    """
    assert work is not None
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        reason = str(error)
        raise (TimeoutError if "Timed out" in reason else ConnectionError)(reason) from error


def enter_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which work goes to a side stream; None: nothing changes (host memory)."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class P2PSender:
    """The source's end of messages over a process group.

    Args:
        link: of the source.
        group: of the channel.
        draft_rank: where they go.
        device: of the taps.
    """

    def __init__(self, link: TapLink, group: dist.ProcessGroup, draft_rank: int, device: torch.device) -> None:
        message, num_slots = link.message, link.num_slots
        self.message, self.group, self.draft_rank = message, group, draft_rank
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        num_elements = message.source.count_elements(message.max_rows, is_first=True)
        self.stamps = torch.zeros(num_slots, STAMP_BYTES, dtype=torch.uint8)
        self.payloads = torch.empty(num_slots, num_elements, dtype=message.dtype, device=device)
        self.works: list[list[dist.Work]] = [[] for _ in range(num_slots)]
        self.num_sent = 0

    def wait_slot(self, timeout_s: float) -> None:
        works = self.works[self.num_sent % len(self.works)]
        while works:
            wait_work(works[0], timeout_s)
            works.pop(0)

    def put(self, stamp: Stamp, taps: Sequence[TapRows]) -> int:
        place = self.num_sent % len(self.works)
        self.num_sent += 1
        num_elements = self.message.count_payload_bytes(stamp) // self.message.dtype.itemsize
        payload = self.payloads[place, :num_elements]
        self.message.write(self.stamps[place], stamp, (), self.num_sent)
        self.works[place].append(self._send(self.stamps[place], STAMP_TAG))
        if self.stream is None:
            copy_taps(taps, self.message.split_payload(payload, stamp))
            self.works[place].append(self._send(payload, PAYLOAD_TAG))
            return payload.nbytes
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            copy_taps(taps, self.message.split_payload(payload, stamp))
            # the next copy into this slot comes later on this stream, and the stream waits for the send
            wait_work(self._send(payload, PAYLOAD_TAG), FOREVER_S)
        for tap in taps:
            for tensor in tap.list_tensors():
                tensor.record_stream(self.stream)
        return payload.nbytes

    def _send(self, content: Tensor, tag: int) -> dist.Work:
        work = dist.isend(content, group=self.group, group_dst=self.draft_rank, tag=tag)
        assert work is not None
        return work

    def _send_status(self, status: int) -> dist.Work:
        content = torch.zeros(STAMP_BYTES, dtype=torch.uint8)
        self.message.write(content, Stamp(0, 0, self.message.source.stage, 0, 0, status), (), 0)
        return self._send(content, STAMP_TAG)

    def fail(self) -> None:
        try:
            # kept, since dropping it would drop the message
            self.failure = self._send_status(FAILURE)
        except RuntimeError as error:
            logger.debug("The draft's rank does not hear of the failure: %s", error)

    def close(self, timeout_s: float) -> None:
        for _ in self.works:
            self.wait_slot(timeout_s)
            self.num_sent += 1
        wait_work(self._send_status(END), timeout_s)


class Arrival(NamedTuple):
    """A message whose payload is on its way into memory of its own.

    Args:
        stamp: of the message.
        payload: ``[elements]``.
        work: of the payload's receive, for host memory.
        event: after the payload's receive, on a GPU.
    """

    stamp: Stamp
    payload: Tensor
    work: dist.Work | None
    event: torch.cuda.Event | None


class P2PInbox:
    """Receives the messages of all sources of one rank, on a thread of its own.

    Args:
        links: of the rank's sources; as many messages as a link has slots are received ahead of the draft.
        group: of the channel.
        source_rank: where they come from.
        device: of the taps.
    """

    def __init__(
        self, links: Sequence[TapLink], group: dist.ProcessGroup, source_rank: int, device: torch.device
    ) -> None:
        self.group, self.source_rank, self.device = group, source_rank, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.formats = {link.source.stage: link.message for link in links}
        self.free = {link.source.stage: threading.Semaphore(link.num_slots) for link in links}
        self.arrivals: dict[int, queue.SimpleQueue[Arrival | Exception]]
        self.arrivals = {stage: queue.SimpleQueue() for stage in self.formats}
        self.num_open = len(links)
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"taps of rank {source_rank}")
        self.thread.start()

    def _run(self) -> None:
        try:
            while self.num_open:
                self._receive_one()
        except Exception as error:
            for arrivals in self.arrivals.values():
                arrivals.put(error)

    def _receive_one(self) -> None:
        content = torch.empty(STAMP_BYTES, dtype=torch.uint8)
        wait_work(self._receive(content, STAMP_TAG), FOREVER_S)
        stamp = read_stamp(content)
        if stamp.status == FAILURE:
            raise ConnectionError("the source's rank has failed")
        if stamp.status == END:
            self.num_open -= 1
            return
        message = self.formats[stamp.stage]
        self.free[stamp.stage].acquire()
        num_elements = message.count_payload_bytes(stamp) // message.dtype.itemsize
        with enter_stream(self.stream):
            payload = torch.empty(num_elements, dtype=message.dtype, device=self.device)
            work, event = self._receive(payload, PAYLOAD_TAG), None
            if self.stream is not None:
                wait_work(work, FOREVER_S)
                event = torch.cuda.Event()
                event.record(self.stream)
        self.arrivals[stamp.stage].put(Arrival(stamp, payload, work, event))

    def _receive(self, content: Tensor, tag: int) -> dist.Work | None:
        return dist.irecv(content, group=self.group, group_src=self.source_rank, tag=tag)


class P2PReceiver:
    """The draft's end of the messages of one source stage."""

    def __init__(self, message: MessageFormat, inbox: P2PInbox) -> None:
        self.message, self.inbox = message, inbox
        self.stage = message.source.stage
        self.arrival: Arrival | None = None

    def wait_message(self, timeout_s: float) -> Stamp:
        try:
            arrival = self.inbox.arrivals[self.stage].get(timeout=timeout_s)
        except queue.Empty as error:
            raise TimeoutError(f"waited {timeout_s:g} s for its taps") from error
        if isinstance(arrival, Exception):
            raise ConnectionError(str(arrival)) from arrival
        if arrival.event is None:
            wait_work(arrival.work, timeout_s)
        self.arrival = arrival
        return arrival.stamp

    def take(self, stamp: Stamp) -> list[TapRows]:
        assert self.arrival is not None and stamp.status == TAPS
        payload = self.arrival.payload
        if self.arrival.event is not None:
            stream = torch.cuda.current_stream(payload.device)
            stream.wait_event(self.arrival.event)
            payload.record_stream(stream)
        self.arrival = None
        self.inbox.free[self.stage].release()
        return self.message.split_payload(payload, stamp)

    def fail(self) -> None:
        """Nothing goes this way; the source's wait for a slot ends by time-out or with this process."""

    def close(self, timeout_s: float) -> None:
        self.inbox.thread.join(timeout_s)
        if self.inbox.thread.is_alive():
            raise TimeoutError(f"rank {self.inbox.source_rank} has not closed its end within {timeout_s:g} s")
