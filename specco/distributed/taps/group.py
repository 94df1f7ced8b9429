"""The process group of a TapChannel: that it carries one channel, what its ranks agree on, and the first failure."""

from __future__ import annotations

import logging
import os
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from specco.distributed.taps.transports import PeerWatch, SharedMailbox

logger = logging.getLogger(__name__)


class RankInfo(NamedTuple):
    """What each rank tells the others when a channel is built.

    Args:
        agreement: must be equal on all ranks.
        host: equal for ranks that can see each other's processes and map the same memory.
        pid: process id.
    """

    agreement: tuple[Any, ...]
    host: tuple[str, ...]
    pid: int


class TapGroup:
    """One rank's view of a group that belongs to one channel at a time.

    Args:
        group: of the pipeline's ranks; None at one rank.

    Raises:
        ValueError: the group has a channel on this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.watches: dict[int, PeerWatch] = {}
        self._claim()

    @property
    def _claim_key(self) -> str:
        return f"taps/channels of rank {self.rank}"

    def _claim(self) -> None:
        if self.group is None:
            return
        store = self.group.get_group_store()
        if store.add(self._claim_key, 1) > 1:
            store.add(self._claim_key, -1)
            raise ValueError(f"group {self.group.group_name!r} has a TapChannel on rank {self.rank}; it can carry one")

    def release(self) -> None:
        """Let another channel have the group."""
        if self.group is not None:
            self.group.get_group_store().add(self._claim_key, -1)

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value. Collective: every rank must call."""
        if self.group is None:
            return [value]
        values = [None] * self.group.size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, agreement: tuple[Any, ...]) -> list[RankInfo]:
        """Exchange what the ranks must agree on, and begin to watch those of this host. Collective.

        Raises:
            ValueError: they disagree.
        """
        infos = self.exchange(RankInfo(agreement, _describe_host(), os.getpid()))
        if any(info.agreement != infos[0].agreement for info in infos):
            raise ValueError(f"the ranks disagree: {[info.agreement for info in infos]}")
        for peer, info in enumerate(infos):
            if peer != self.rank and info.host == infos[self.rank].host:
                self.watches[peer] = PeerWatch(info.pid)
        return infos

    def list_ended(self) -> list[int]:
        """Return the ranks of this host whose processes have ended."""
        return [peer for peer, watch in self.watches.items() if watch.has_ended()]

    def record_failure(self, text: str) -> None:
        """Leave a failure where all ranks find it, unless one is there."""
        if self.group is None:
            return
        try:
            store = self.group.get_group_store()
            if store.add("taps/number of failures", 1) == 1:
                store.set("taps/failure", text)
        except RuntimeError as error:
            # the store went with the rank that held it; every rank then names what it waits for itself
            logger.warning("Rank %d cannot tell the others of its failure: %s", self.rank, error)

    def find_failure(self, wait_s: float) -> str | None:
        """Return the first failure that a rank has left, waiting for one for a moment."""
        if self.group is None:
            return None
        deadline = time.monotonic() + wait_s
        try:
            store = self.group.get_group_store()
            while not store.check(["taps/failure"]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            return store.get("taps/failure").decode()
        except RuntimeError as error:
            logger.warning("Rank %d cannot ask the others for the failure: %s", self.rank, error)
            return None

    def close(self) -> None:
        """Stop watching the others."""
        for watch in self.watches.values():
            watch.close()
        self.watches = {}


def _describe_host() -> tuple[str, ...]:
    if SharedMailbox.find_obstacle() is not None:
        return ("cannot share memory", str(os.getpid()))
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")
