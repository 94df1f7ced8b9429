"""A policy in stages: torch's pipeline schedules over packed microbatches of any sizes, with taps beside them.

    stage 0       tokens -> embedding, layers -> pad   ==P2P==>   stage 1   cut -> layers -> norm -> head -> loss
                                   | taps                            ^ taps
                                   +----------- TapChannel ----------+

torch fixes the shapes that stages exchange, and packed microbatches differ in rows. So a stage's output is padded to
the largest microbatch's rows where it leaves, and cut where it arrives; between the two nobody computes on padding.
Every rank of the pipeline holds the whole microbatch's tokens: layouts, positions and masks are made where they are
needed. Under tensor parallelism each rank sends the rows that sequence parallelism leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.tools.logging import logger

from specco.distributed.pipeline import AttachedTaps, attach_taps
from specco.distributed.pipeline_order import read_order
from specco.distributed.taps import TapChannel, TapPlan, Taps
from specco.drafts.base import DraftRows
from specco.titan.attention import PackedMasks
from specco.titan.head import HeadPlan
from specco.titan.policy import Policy
from specco.titan.stages import PipelineShape, PolicyParts

Finish = Callable[[int, HeadPlan, Tensor, "DraftRows | None"], Tensor]
"""What is made of the hidden rows and the draft's rows of a microbatch, by its number: the loss, a scalar."""


def run_policy(policy: Policy, plan: HeadPlan, rows: Tensor | None = None, **kwargs: Taps) -> Any:
    """Run a policy, or a stage of it, on this rank's rows of a microbatch.

    Args:
        policy: whole or a stage.
        plan: of the microbatch, with a layout.
        rows: ``[1, T, D]``, what the stage before has sent; None: the stage starts from the tokens.
        kwargs: ``taps`` of other stages.

    Returns:
        What ``Policy.forward`` does.
    """
    tokens, layout = plan.tokens, plan.layout
    assert layout is not None
    masks = PackedMasks(layout, plan.group, is_counted=tokens.is_counted)
    positions = layout.shard(tokens.position_ids)[None]
    inputs = layout.shard(tokens.input_ids)[None] if rows is None else rows
    return policy(inputs, positions, masks, packed_tokens=tokens, **kwargs)


class WholePolicy:
    """A policy that one rank, with the peers of its layout, runs from end to end: the pipeline of one stage.

    Args:
        policy: the whole.
        finish: called for every microbatch.
    """

    is_last = True
    """Whether this rank has the last stage."""

    def __init__(self, policy: Policy, finish: Finish) -> None:
        self.policy, self.finish = policy, finish

    def run(self, plans: Sequence[HeadPlan], *, is_training: bool) -> None:
        """Run all microbatches, forward and, in training, backward; see ``PolicyPipeline``."""
        with torch.set_grad_enabled(is_training):
            for number, plan in enumerate(plans):
                loss = self.finish(number, plan, *run_policy(self.policy, plan))
                if is_training:
                    loss.backward()


@dataclass(frozen=True)
class Boundary:
    """How rows cross from one stage to the next.

    Args:
        num_rows: of every message.
        width: of the policy.
        dtype: of its activations.
        device: of its activations.
        tp_mesh: ranks that share the rows or hold copies of them; None at one rank.
        is_sharded: whether they share them (sequence parallelism).
    """

    num_rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    tp_mesh: DeviceMesh | None = None
    is_sharded: bool = False

    def count_rows(self, plan: HeadPlan) -> int:
        """Return the most rows of a microbatch that a rank of the "tp" mesh holds."""
        assert plan.layout is not None
        rows = plan.layout.global_rows.numel()
        return -(-rows // self.tp_mesh.size()) if self.is_sharded and self.tp_mesh is not None else rows

    def make_example(self) -> Tensor:
        """Return a tensor of the shape and type of every message."""
        shape = (1, self.num_rows, self.width)
        return torch.empty(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def leave(self, output: Tensor) -> Tensor:
        """Return this rank's rows of a stage's output, padded."""
        local = output.to_local() if isinstance(output, DTensor) else output
        return F.pad(local, (0, 0, 0, self.num_rows - local.shape[1]))

    def enter(self, message: Tensor, plan: HeadPlan) -> Tensor:
        """Return the rows ``[1, T, D]`` of a microbatch; under tensor parallelism a DTensor as the layers take it."""
        assert plan.layout is not None
        rows = plan.layout.global_rows.numel()
        if self.tp_mesh is None:
            return message[:, :rows]
        shape, placements = torch.Size((1, rows, self.width)), [Shard(1) if self.is_sharded else Replicate()]
        (_, own_rows, _), _ = compute_local_shape_and_global_offset(shape, self.tp_mesh, placements)
        stride = (shape[1] * shape[2], shape[2], 1)
        return DTensor.from_local(message[:, :own_rows], self.tp_mesh, placements, shape=shape, stride=stride)


class PolicyStage(PipelineStage):
    """One stage, which takes the microbatch by its number."""

    plans: Sequence[HeadPlan] = ()

    def __init__(
        self, policy: Policy, index: int, shape: PipelineShape, boundary: Boundary, group: Any, finish: Finish
    ) -> None:
        self.boundary, self.finish = boundary, finish
        rows, loss_dtype = boundary.make_example(), torch.promote_types(boundary.dtype, torch.float32)
        is_last = index == shape.num_stages - 1
        loss = torch.zeros(1, dtype=loss_dtype, device=boundary.device, requires_grad=True)
        super().__init__(
            policy,
            index,
            shape.num_stages,
            boundary.device,
            input_args=torch.zeros(1, dtype=torch.int64) if index == 0 else rows,
            output_args=loss if is_last else rows,
            group=group,
        )

    def forward_maybe_with_nosync(self, *args: Tensor, microbatch: Tensor) -> Tensor:
        """Run the stage on the microbatch of a number: from its tokens, or from what the stage before has sent."""
        number = int(microbatch)
        plan = self.plans[number]
        rows = None if self.is_first else self.boundary.enter(args[0], plan)
        output = run_policy(cast(Policy, self.submod), plan, rows)
        # no view of the loss, which zero-bubble schedules detach in place
        return torch.stack([self.finish(number, plan, *output)]) if self.is_last else self.boundary.leave(output)


class PolicyPipeline:
    """This rank's stages of a policy under a schedule, with a channel for the taps of its draft.

    Schedule, stages and channel are made for a number of microbatches and of rows, and made anew when a step has
    another number of microbatches or more rows.

    Args:
        policy: this rank's stages; taps are sent if it has a draft.
        shape: of the pipeline.
        boundary: how rows cross; its ``num_rows`` grow as microbatches do.
        group: of the pipeline.
        finish: called on the last stage's rank.
        transport: see ``TapChannel``.
        timeout_s: of the channel.
    """

    def __init__(
        self,
        policy: PolicyParts,
        shape: PipelineShape,
        boundary: Boundary,
        *,
        group: dist.ProcessGroup,
        finish: Finish,
        transport: str = "auto",
        timeout_s: float = 300.0,
    ) -> None:
        self.policy, self.shape, self.boundary, self.group, self.finish = policy, shape, boundary, group, finish
        self.tap_group: dist.ProcessGroup | None = None
        if policy.config.draft is not None:
            backend = "gloo" if boundary.device.type == "cpu" else f"cpu:gloo,{boundary.device.type}:nccl"
            ranks = dist.get_process_group_ranks(group)
            own_group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            self.tap_group = cast(dist.ProcessGroup, own_group)
        self.transport, self.timeout_s = transport, timeout_s
        self.channel: TapChannel | None = None
        self.num_microbatches = 0
        self._taps: AttachedTaps | None = None
        self._stages: list[PolicyStage] = []
        self._schedule: Any = None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.shape.num_stages - 1 in self.shape.own

    def run(self, plans: Sequence[HeadPlan], *, is_training: bool) -> None:
        """Run all microbatches, forward and, in training, backward. Collective over the pipeline.

        Args:
            plans: of the microbatches, the same on every rank, as many as ``PipelineShape.round_up`` allows.
            is_training: whether gradients are added up.
        """
        num_rows = max(self.boundary.count_rows(plan) for plan in plans)
        if len(plans) != self.num_microbatches or num_rows > self.boundary.num_rows:
            self._rebuild(len(plans), max(num_rows, self.boundary.num_rows))
        for stage in self._stages:
            stage.plans = plans
        index = torch.arange(len(plans))
        args = (index,) if 0 in self.shape.own else ()
        run: Callable[..., Any] = self._schedule.step if is_training else self._schedule.eval
        kwargs: Mapping[str, Any] = {"return_outputs": False} if is_training else {}
        with torch.set_grad_enabled(is_training):
            run(*args, target=index if self.is_last else None, microbatch=index, **kwargs)
        for stage in self._stages:
            stage.plans = ()

    def take_waits(self) -> tuple[float, float]:
        """Return the seconds that this rank has waited for taps and for slots since the last call or rebuild."""
        if self.channel is None:
            return 0.0, 0.0
        stats = self.channel.stats
        waits = sum(stats.tap_wait_s.values()), sum(stats.slot_wait_s.values())
        stats.tap_wait_s.clear()
        stats.slot_wait_s.clear()
        return waits

    def close(self) -> None:
        """Close the channel. Collective over the pipeline."""
        if self._taps is not None:
            self._taps.remove()
        if self.channel is not None:
            self.channel.close()
        self._taps = self.channel = None

    def _rebuild(self, num_microbatches: int, num_rows: int) -> None:
        self.close()
        if num_microbatches < 2 * self.shape.num_stages and not self.num_microbatches:
            logger.warning(
                f"{num_microbatches} microbatches on {self.shape.num_stages} stages leave much of the pipeline idle"
            )
        self.num_microbatches, self.boundary = num_microbatches, replace(self.boundary, num_rows=num_rows)
        self._stages = [
            PolicyStage(part, index, self.shape, self.boundary, self.group, self.finish)
            for part, index in zip(self.policy.parts, self.shape.own, strict=True)
        ]
        schedule_class: Any = get_schedule_class(self.shape.schedule)
        is_single = issubclass(schedule_class, PipelineScheduleSingle)
        self._schedule = schedule_class(
            self._stages[0] if is_single else self._stages,
            num_microbatches,
            loss_fn=lambda loss, target: loss.sum(),
            scale_grads=False,
        )
        if self.tap_group is not None:
            taps = self.shape.list_taps(self.policy.parts[0])
            self.channel = TapChannel(
                TapPlan.build(read_order(self._schedule), taps, max_rows=num_rows),
                self.tap_group,
                dtype=self.boundary.dtype,
                device=self.boundary.device,
                transport=self.transport,
                timeout_s=self.timeout_s,
            )
            self._taps = attach_taps(self._schedule, self._stages, self.channel)
