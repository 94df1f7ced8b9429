"""What every draft family shares: the module's interface and the rows it hands to the chunked head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens


@dataclass(frozen=True)
class DraftRows:
    """The draft's predictions of one packed microbatch, before its language-model head.

    One row is one prediction: of one branch (an anchor) in one slot (a TTT pass, or a slot of a block). Only rows that
    are trained are here.

    Args:
        hidden: ``[R, D]``, normalised hidden rows, ready for the draft's ``lm_head``.
        teacher_rows: int64 ``[R]``, global trunk row whose policy distribution is the teacher.
        labels: int64 ``[R]``, the token that the policy wrote there.
        slot_ids: int64 ``[R]``, slot of the row, ``0 .. num_slots - 1``.
        branch_ids: int64 ``[R]``, global trunk row of the anchor; rows of one anchor are one branch.
        weights: ``[R]``, loss weight of the row, in the accumulator type.
    """

    hidden: Tensor
    teacher_rows: Tensor
    labels: Tensor
    slot_ids: Tensor
    branch_ids: Tensor
    weights: Tensor


# FSDP2 looks for the output tensors of a module in pytrees, to know when its backward begins
pytree.register_dataclass(DraftRows)


def concat_rows(parts: Sequence[DraftRows]) -> DraftRows:
    """Return the rows of ``parts``, one part after the other."""
    return DraftRows(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(DraftRows)})


def fill_normal(parameter: Tensor, std: float) -> None:
    """Fill a parameter, sharded or not, from N(0, ``std`` squared), the same values for any sharding.

    Every rank draws the whole tensor from its default generator and keeps its shard, so generators must agree.
    """
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device).normal_(std=std)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


class Draft(nn.Module):
    """A draft model: taps of the policy in, ``DraftRows`` out.

    Subclasses set ``target_layer_ids`` (ascending, "output of layer j"), ``num_slots`` and ``lm_head`` (None: the
    policy's own head is used, detached).
    """

    target_layer_ids: tuple[int, ...]
    num_slots: int
    lm_head: nn.Linear | None

    def init_weights(self) -> None:
        """Initialise every parameter in place (after ``to_empty``, also of sharded ones)."""
        raise NotImplementedError(f"{type(self).__name__} has no init_weights")

    def sum_loss_weights(self, tokens: PackedTokens) -> Tensor:
        """Return float64 ``[num_slots]``: the sum of the rows' weights by slot, from the tokens alone (no collective).

        The learner adds these up over microbatches and ranks before any forward, so that the one division of the loss
        is the same for any split of the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sum_loss_weights")

    def forward(
        self,
        taps: Tensor,
        embeddings: Tensor,
        tokens: PackedTokens,
        layout: PackedLayout,
        group: dist.ProcessGroup | None = None,
    ) -> DraftRows:
        """Run every pass of the draft.

        Args:
            taps: ``[T, m * D]``, detached outputs of the tapped layers, concatenated in ascending order, this rank's
                rows in layout order.
            embeddings: ``[T, D]``, detached input embeddings of the policy for this rank's rows.
            tokens: the packed microbatch, global.
            layout: of the trunk.
            group: context-parallel group; None at one rank. Collective over it: every rank must call.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")
