"""TapChannel: taps from the stages of a pipeline to the draft on its last stage, beside the pipeline's own traffic.

    source rank    send(stage, m, taps): wait for a slot (none with ``free_slots``), copy into it, return
                        |  shm | cuda_ipc: written straight into the draft's mailbox;  p2p: a process group of its own
    draft's rank   receive(m): wait for the message of every source, check its stamp, copy it out, free the slot

Nothing here touches the pipeline's groups or its order. Every message carries its stamp, and a stamp that is not the
one expected is an error, so nothing shifts silently. Any error breaks the channel for good, on this rank at once and on
the others where they next wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from specco.distributed.taps.connect import TRANSPORTS, TapEnds, choose_slots, choose_transport, connect
from specco.distributed.taps.group import TapGroup
from specco.distributed.taps.message import MessageFormat, Stamp, TapLink, TapRows
from specco.distributed.taps.plan import TapPlan, TapSource


class TapError(RuntimeError):
    """A failure of the channel, or of the pipeline while the channel was attached to it.

    Args:
        reason: what happened.
        stage: source stage concerned.
        microbatch: concerned.
        rank: pipeline rank of the source stage.
    """

    def __init__(self, reason: str, *, stage: int, microbatch: int, rank: int) -> None:
        super().__init__(f"taps of source stage {stage}, microbatch {microbatch}, rank {rank}: {reason}")
        self.stage, self.microbatch, self.rank = stage, microbatch, rank


@dataclass
class TapStats:
    """What this rank has counted since the channel was built.

    Args:
        num_messages: sent, by source stage.
        num_bytes: of payload sent, by source stage; 0 stays for what was handed over by reference.
        slot_wait_s: seconds that forwards of a source stage waited for a slot.
        tap_wait_s: seconds that forwards of the draft's stage waited for the taps of a source stage.
        slack_s: of the draft's last step, by (source stage, microbatch): seconds from the source's write to the draft's
            wait for it, by the wall clocks of both; what a transfer can hide behind. Below 0: written after.
    """

    num_messages: dict[int, int] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    slot_wait_s: dict[int, float] = field(default_factory=dict)
    tap_wait_s: dict[int, float] = field(default_factory=dict)
    slack_s: dict[tuple[int, int], float] = field(default_factory=dict)


class Taps(NamedTuple):
    """What the draft stage gets for a microbatch, by the names of the taps.

    Args:
        rows: ``[rows, width]`` each, detached, dense, in memory of their own.
        step_rows: ``[num_step_rows, width]`` of the taps that have them, the same for all microbatches of a step.
    """

    rows: dict[str, Tensor]
    step_rows: dict[str, Tensor]


class TapChannel:
    """One rank's end of the channel. Building and closing are collective over ``group``.

    Args:
        plan: the same on every rank.
        group: of the pipeline's ranks in their order, used by nothing else; None at one rank. For ``p2p`` of tensors on
            a GPU its backend is "cpu:gloo,cuda:nccl".
        dtype: of all taps.
        device: of all taps.
        transport: to another rank: "shm" or "cuda_ipc" (same host), "p2p", or "auto": the first of these that the pair
            of ranks can have. Sources on the draft's own rank hand over by reference.
        num_slots: of every source, from its ``least_slots`` on; None: ``free_slots``. More than ``free_slots`` are not
            made.
        timeout_s: seconds after which any wait is an error.

    Raises:
        ValueError: on every rank alike: fewer slots than cannot deadlock, ranks that disagree, a transport that a pair
            of ranks cannot have, a group that has a channel already.
    """

    def __init__(
        self,
        plan: TapPlan,
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transport: str = "auto",
        num_slots: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; allowed are {', '.join(TRANSPORTS)}")
        self.plan, self.dtype, self.device, self.timeout_s = plan, dtype, torch.device(device), timeout_s
        slots = [choose_slots(source, num_slots) for source in plan.sources]
        num_ranks = 1 + max([plan.draft_rank, *(s.rank for s in plan.sources)])
        size = 1 if group is None else group.size()
        if num_ranks > size:
            raise ValueError(f"group has {size} ranks; the plan needs {num_ranks}")
        self.stats = TapStats()
        self.error: TapError | None = None
        self._num_sent = {source.stage: 0 for source in plan.sources}
        self._num_taken = {source.stage: 0 for source in plan.sources}
        self._step_rows: dict[str, Tensor] = {}
        self._group = TapGroup(group)
        try:
            infos = self._group.agree((plan, dtype, self.device.type, transport, num_slots))
            transports = [
                choose_transport(source, infos, plan.draft_rank, transport, self.device) for source in plan.sources
            ]
        except ValueError:
            self._group.release()
            raise
        formats = [MessageFormat(source, dtype, plan.max_rows, plan.microbatches[0]) for source in plan.sources]
        self.links = [TapLink(*values) for values in zip(formats, slots, transports, strict=True)]
        self._ends = connect(plan, self._group, self.links, self.device)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group.group

    @property
    def rank(self) -> int:
        return self._group.rank

    def send(self, stage: int, microbatch: int, outputs: Mapping[str, Tensor | tuple[Tensor, Tensor]]) -> None:
        """Put the taps of a microbatch into a slot and return; waits only when all slots are taken.

        Args:
            stage: the source, on this rank.
            microbatch: the next one in the plan's order.
            outputs: what each tapped module returned, by name: ``[..., width]``, of equal leading sizes; with
                ``num_step_rows`` a pair of that and ``[num_step_rows, width]``. Only read, and detached.

        Raises:
            TapError: a microbatch out of order, a tensor that is not what the plan says, a time-out, a lost draft.
        """
        self.check()
        source = self._get_source(stage)
        step, expected = self._locate(self._num_sent[stage])
        if microbatch != expected:
            raise self.fail(f"the forward of microbatch {microbatch} runs in its place", source, expected)
        try:
            taps = [self._read_output(source, tap.name, outputs, microbatch) for tap in source.taps]
            num_rows = self._check_rows(source, taps)
        except ValueError as error:
            raise self.fail(str(error), source, microbatch) from error
        sender, start = self._ends.senders[stage], time.perf_counter()
        try:
            sender.wait_slot(self.timeout_s)
            self._add(self.stats.slot_wait_s, stage, time.perf_counter() - start)
            stamp = Stamp(step, microbatch, stage, num_rows, time.time_ns())
            num_bytes = sender.put(stamp, taps)
        except (TimeoutError, ConnectionError) as error:
            raise self._explain(error, "no slot for them", source, microbatch) from error
        self._num_sent[stage] += 1
        self._add(self.stats.num_messages, stage, 1)
        self._add(self.stats.num_bytes, stage, num_bytes)

    def receive(self, microbatch: int) -> Taps:
        """Wait for the taps of all sources, and take them.

        Args:
            microbatch: the next one in the plan's order.

        Raises:
            TapError: a microbatch out of order, a wrong stamp, a time-out, a lost source.
        """
        self.check()
        taps = Taps({}, {})
        for source in self.plan.sources:
            step, expected = self._locate(self._num_taken[source.stage])
            if microbatch != expected:
                raise self.fail(f"the draft asks for microbatch {microbatch} in its place", source, expected)
            for tap, part in zip(source.taps, self._take(source, step, microbatch), strict=True):
                taps.rows[tap.name] = part.rows
                if part.step_rows is not None:
                    self._step_rows[tap.name] = part.step_rows
        return taps._replace(step_rows=dict(self._step_rows))

    def _take(self, source: TapSource, step: int, microbatch: int) -> list[TapRows]:
        receiver, start, start_ns = self._ends.receivers[source.stage], time.perf_counter(), time.time_ns()
        try:
            stamp = receiver.wait_message(self.timeout_s)
            waited = time.perf_counter() - start
            expected = (step, microbatch, source.stage)
            if stamp[:3] != expected:
                names = "(step, microbatch, stage)"
                raise self.fail(f"expected the stamp {names} = {expected}, found {stamp[:3]}", source, microbatch)
            parts = receiver.take(stamp)
        except (TimeoutError, ConnectionError) as error:
            raise self._explain(error, "they have not come", source, microbatch) from error
        self._num_taken[source.stage] += 1
        self._add(self.stats.tap_wait_s, source.stage, waited)
        if microbatch == self.plan.microbatches[0]:
            for key in [key for key in self.stats.slack_s if key[0] == source.stage]:
                del self.stats.slack_s[key]
        self.stats.slack_s[source.stage, microbatch] = (start_ns - stamp.sent_ns) / 1e9
        return parts

    def _locate(self, count: int) -> tuple[int, int]:
        """Return (step, microbatch) of the message that follows ``count`` others of a source."""
        step, place = divmod(count, self.plan.num_microbatches)
        return step, self.plan.microbatches[place]

    def _get_source(self, stage: int) -> TapSource:
        source = self.plan.get_source(stage)
        if source is None or stage not in self._ends.senders:
            raise ValueError(f"stage is {stage}; rank {self.rank} sends for {sorted(self._ends.senders)}")
        return source

    def _read_output(
        self, source: TapSource, name: str, outputs: Mapping[str, Tensor | tuple[Tensor, Tensor]], microbatch: int
    ) -> TapRows:
        tap = next(tap for tap in source.taps if tap.name == name)
        output = outputs.get(name)
        if output is None:
            raise ValueError(f"module {name!r} of stage {source.stage} has not run")
        if isinstance(output, tuple) != bool(tap.num_step_rows):
            raise ValueError(
                f"module {name!r} returned {type(output).__name__}, with num_step_rows={tap.num_step_rows}"
            )
        parts = [_flatten(part) for part in (output if isinstance(output, tuple) else (output,))]
        for part in parts:
            if part.shape[1] != tap.width or part.dtype != self.dtype or part.device.type != self.device.type:
                raise ValueError(
                    f"module {name!r} returned {part.shape[1]} columns of {part.dtype} on {part.device.type}; "
                    f"the channel was built for {tap.width} of {self.dtype} on {self.device.type}"
                )
        if tap.num_step_rows and parts[1].shape[0] != tap.num_step_rows:
            raise ValueError(f"module {name!r} returned {parts[1].shape[0]} rows of the step, not {tap.num_step_rows}")
        has_step_rows = tap.num_step_rows and microbatch == self.plan.microbatches[0]
        return TapRows(parts[0], parts[1] if has_step_rows else None)

    def _check_rows(self, source: TapSource, taps: list[TapRows]) -> int:
        counts = {tap.name: part.rows.shape[0] for tap, part in zip(source.taps, taps, strict=True)}
        num_rows = max(counts.values())
        if min(counts.values()) != num_rows:
            raise ValueError(f"the taps of stage {source.stage} differ in rows: {counts}")
        if num_rows > self.plan.max_rows:
            raise ValueError(f"the microbatch has {num_rows} rows; the plan allows max_rows={self.plan.max_rows}")
        return num_rows

    @staticmethod
    def _add(counters: dict[int, Any], stage: int, amount: float) -> None:
        counters[stage] = counters.get(stage, 0) + amount

    def check(self) -> None:
        """Raise the error that has broken the channel, if one has."""
        if self.error is not None:
            raise self.error

    def check_step_end(self) -> None:
        """Check that this rank has sent and taken whole steps.

        Raises:
            TapError: a microbatch was skipped.
        """
        for source in self.plan.sources:
            for stages, counts, verb in (
                (self._ends.senders, self._num_sent, "sent"),
                (self._ends.receivers, self._num_taken, "taken"),
            ):
                count = counts[source.stage]
                if source.stage in stages and count % self.plan.num_microbatches:
                    raise self.fail(f"the step has ended before they were {verb}", source, self._locate(count)[1])

    def fail(self, reason: str, source: TapSource, microbatch: int) -> TapError:
        """Break the channel, tell the other ranks, and return the error to raise."""
        self.error = TapError(reason, stage=source.stage, microbatch=microbatch, rank=source.rank)
        self._group.record_failure(f"{source.stage} {microbatch} {source.rank} {reason}")
        self._break()
        return self.error

    def _break(self) -> None:
        for end in self._ends.list_all():
            end.fail()

    def explain_pipeline(self, error: Exception, stage: int, microbatch: int) -> TapError:
        """Return what to raise for an error of the pipeline's own exchange, which breaks the channel as well.

        Args:
            error: of the pipeline.
            stage: of this rank that ran last.
            microbatch: whose forward comes next there.
        """
        what = f"the pipeline failed on rank {self.rank} before microbatch {microbatch} of its stage {stage}"
        # the nearer to the draft, the better a rank knows what has not come: the others give it the first word
        learned = self._learn(what, wait_s=0.25 * (1 + self.plan.draft_stage - stage))
        if learned is not None:
            return learned
        ended, sources = self._group.list_ended(), self.plan.sources
        before = [s for s in sources if s.rank in ended] or [s for s in sources if s.stage <= stage] or sources
        lost = f"; the processes of ranks {ended} have ended" if ended else ""
        return self.fail(f"{what}{lost}: {error}", before[0], microbatch)

    def _explain(self, error: Exception, what: str, source: TapSource, microbatch: int) -> TapError:
        """Break the channel for an error met here: by the first failure that a rank has left, or by this one."""
        learned = self._learn(what, wait_s=0.0 if isinstance(error, TimeoutError) else 1.0)
        return learned or self.fail(f"{what}: {error}", source, microbatch)

    def _learn(self, what: str, wait_s: float) -> TapError | None:
        """Return the error that broke the channel, here or, as far as known, on another rank."""
        if self.error is not None:
            return self.error
        found = self._group.find_failure(wait_s)
        if found is None:
            return None
        stage, microbatch, rank, reason = found.split(" ", 3)
        reason = f"{reason} (as rank {self.rank} has learned: {what})"
        self.error = TapError(reason, stage=int(stage), microbatch=int(microbatch), rank=int(rank))
        self._break()
        return self.error

    def close(self) -> None:
        """End the channel; all ranks must call, after the same number of steps. A broken channel closes at once."""
        if self.error is None:
            for end in self._ends.list_all():
                end.close(self.timeout_s)
            self._group.exchange("closed")
            self._group.release()
        self._group.close()
        self._ends = TapEnds()


def _flatten(tensor: Tensor) -> Tensor:
    """Return ``[rows, width]``, detached; of a DTensor its local part."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.reshape(-1, tensor.shape[-1])
