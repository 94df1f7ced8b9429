"""Choose a transport for each source of a TapChannel and build this rank's ends of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specco.distributed.taps.cuda_ipc import CudaIpcReceiver, CudaIpcSender, DeviceSlots
from specco.distributed.taps.group import RankInfo, TapGroup
from specco.distributed.taps.message import STAMP_BYTES, TapLink, TapReceiver, TapSender
from specco.distributed.taps.p2p import P2PInbox, P2PReceiver, P2PSender
from specco.distributed.taps.plan import TapPlan, TapSource
from specco.distributed.taps.transports import LocalQueue, SharedMailbox, ShmReceiver, ShmSender

TRANSPORTS = ("auto", "shm", "cuda_ipc", "p2p")


@dataclass
class TapEnds:
    """This rank's ends, by source stage."""

    senders: dict[int, TapSender] = field(default_factory=dict)
    receivers: dict[int, TapReceiver] = field(default_factory=dict)

    def list_all(self) -> list[TapSender | TapReceiver]:
        """Return every end once (a local queue is both ends)."""
        both: dict[int, TapSender | TapReceiver] = {id(end): end for end in self.senders.values()}
        both |= {id(end): end for end in self.receivers.values()}
        return list(both.values())


def choose_slots(source: TapSource, num_slots: int | None) -> int:
    """Return the slots of a source: ``num_slots``, and no more than can ever be used.

    Raises:
        ValueError: fewer than cannot deadlock.
    """
    if num_slots is None or num_slots > source.free_slots:
        return source.free_slots
    if num_slots < source.least_slots:
        raise ValueError(
            f"num_slots is {num_slots}; with fewer than {source.least_slots} for the taps of source stage "
            f"{source.stage} (rank {source.rank}), its microbatch {num_slots} deadlocks"
        )
    return num_slots


def choose_transport(
    source: TapSource, infos: Sequence[RankInfo], draft_rank: int, transport: str, device: torch.device
) -> str:
    """Return the transport of a source.

    Args:
        source: of the taps.
        infos: of all ranks.
        draft_rank: that they go to.
        transport: what the user asked for.
        device: of the taps.

    Raises:
        ValueError: this pair of ranks cannot have it.
    """
    if source.is_local:
        return "local"
    is_same_host = infos[source.rank].host == infos[draft_rank].host
    on_host = "cuda_ipc" if device.type == "cuda" else "shm"
    if transport == "auto":
        return on_host if is_same_host else "p2p"
    if transport != "p2p" and (transport != on_host or not is_same_host):
        raise ValueError(
            f"transport is {transport!r}; allowed between ranks {source.rank} and {draft_rank}, with tensors on "
            f"{device.type}, are auto, p2p" + (f" and {on_host}" if is_same_host else "")
        )
    return transport


def connect(plan: TapPlan, group: TapGroup, links: Sequence[TapLink], device: torch.device) -> TapEnds:
    """Build this rank's ends. Collective: every rank must call.

    Args:
        plan: of the channel.
        group: of the channel.
        links: one for each source of the plan.
        device: of the taps.
    """
    is_draft = group.rank == plan.draft_rank
    mine = [link for link in links if is_draft or link.source.rank == group.rank]
    mailboxes, device_slots = _share_mailboxes(mine, group, plan.draft_rank, device)
    inboxes: dict[int, P2PInbox] = {}
    ends = TapEnds()
    for link in mine:
        source, stage, is_shm = link.source, link.source.stage, link.transport == "shm"
        if link.transport == "local":
            ends.senders[stage] = ends.receivers[stage] = LocalQueue(link.num_slots)
        elif link.transport == "p2p" and is_draft:
            assert group.group is not None
            if source.rank not in inboxes:
                same_rank = [k for k in mine if k.source.rank == source.rank and k.transport == "p2p"]
                inboxes[source.rank] = P2PInbox(same_rank, group.group, source.rank, device)
            ends.receivers[stage] = P2PReceiver(link.message, inboxes[source.rank])
        elif link.transport == "p2p":
            assert group.group is not None
            ends.senders[stage] = P2PSender(link, group.group, plan.draft_rank, device)
        elif is_draft:
            common = (link.message, mailboxes[stage], group.watches[source.rank])
            ends.receivers[stage] = ShmReceiver(*common) if is_shm else CudaIpcReceiver(*common, device_slots[stage])
        else:
            common = (link.message, mailboxes[stage], group.watches[plan.draft_rank])
            ends.senders[stage] = ShmSender(*common) if is_shm else CudaIpcSender(*common, device_slots[stage])
    return ends


def _share_mailboxes(
    links: Sequence[TapLink], group: TapGroup, draft_rank: int, device: torch.device
) -> tuple[dict[int, SharedMailbox], dict[int, DeviceSlots]]:
    """Return this rank's mailboxes, made by the draft's rank and opened by the sources', and their slots on a GPU.

    Args:
        links: of this rank.
        group: of the channel.
        draft_rank: that makes them.
        device: of the taps.
    """
    is_draft = group.rank == draft_rank
    on_gpu = {link.source.stage: link for link in links if link.transport == "cuda_ipc"}
    on_host = {link.source.stage: link for link in links if link.transport == "shm"} | on_gpu
    sizes = {
        stage: (link.num_slots, STAMP_BYTES if stage in on_gpu else link.message.slot_bytes)
        for stage, link in on_host.items()
    }
    made = {stage: SharedMailbox(*size) for stage, size in sizes.items()} if is_draft else {}
    allocated = {s: DeviceSlots.make(k.message, k.num_slots, device) for s, k in on_gpu.items()} if is_draft else {}
    handles = group.exchange(
        ({s: mailbox.handle for s, mailbox in made.items()}, {s: a.get_handle() for s, a in allocated.items()})
    )[draft_rank]
    mailboxes = made or {stage: SharedMailbox(*size, handles[0][stage]) for stage, size in sizes.items()}
    device_slots = allocated or {stage: DeviceSlots.open(handles[1][stage]) for stage in on_gpu}
    group.exchange("opened")
    for mailbox in mailboxes.values():
        mailbox.close_file()
    return mailboxes, device_slots
