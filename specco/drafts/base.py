"""What every draft family shares: the shape, the module's interface, and the rows it hands to the chunked head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from specco.drafts.vocab import build_vocabulary_maps, compute_target_ids
from specco.losses import LossTerms, compute_draft_loss
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.vocab_parallel import VocabShard


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of a draft. The taps, the policy's embedding and the draft are all ``hidden_size`` wide.

    Args:
        hidden_size: of the policy and of the draft.
        intermediate_size: of the draft's MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides ``num_attention_heads``.
        head_dim: even.
        vocab_size: of the policy.
        target_layer_ids: tapped layers, "output of layer j" counted from 0, ascending and distinct. (vLLM counts the
            input of a layer: one more.)
        rms_norm_eps: of every norm.
        rope_theta: base of the rotary embedding, in its plain form; the policy's value.
        max_position_embeddings: longest document in tokens, what is drafted past its end included. vLLM sizes its
            rotary table by it.
        loss_terms: what the loss of a row is made of.

    Raises:
        ValueError: a value that is out of range or contradicts another, by name.
    """

    method: ClassVar[str]
    """vLLM's name of the family."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 131072
    loss_terms: LossTerms = field(default_factory=lambda: LossTerms(soft_cross_entropy=1.0))

    def __post_init__(self) -> None:
        self._check_positive(
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; the rotary embedding needs an even one")
        ids = self.target_layer_ids
        if not ids or min(ids) < 0 or list(ids) != sorted(set(ids)):
            # the engine sorts and deduplicates the ids, so another order could never be served
            raise ValueError(f"target_layer_ids is {ids}; allowed are distinct layers >= 0 in ascending order")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")


@dataclass(frozen=True)
class DraftRows:
    """The draft's predictions of one packed microbatch, before its language-model head.

    One row is one prediction: of one branch (an anchor) in one slot (a TTT pass, or a slot of a block). Only rows that
    are trained are here.

    Args:
        hidden: ``[R, D]``, normalised hidden rows, ready for the head.
        teacher_rows: int64 ``[R]``, global trunk row whose policy distribution is the teacher.
        labels: int64 ``[R]``, the token that the policy wrote there.
        previous_ids: int64 ``[R]``, the token before it.
        slot_ids: int64 ``[R]``, slot of the row, ``0 .. num_slots - 1``.
        branch_ids: int64 ``[R]``, global trunk row of the anchor; rows of one anchor are one branch.
        weights: ``[R]``, loss weight of the row, in the accumulator type.
    """

    hidden: Tensor
    teacher_rows: Tensor
    labels: Tensor
    previous_ids: Tensor
    slot_ids: Tensor
    branch_ids: Tensor
    weights: Tensor

    def pick(self, index: Tensor, hidden: Tensor) -> DraftRows:
        """Return the rows ``index`` ``[r]`` with ``hidden`` ``[r, D]`` in place of their own."""
        others = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "hidden"}
        return DraftRows(hidden=hidden, **others)


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


def get_local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter that tensor parallelism cuts, with its gradient; a whole one as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Draft(nn.Module):
    """A draft model: taps of the policy in, ``DraftRows`` out.

    Args:
        config: of the family.
        num_slots: predictions of a branch.

    Attributes:
        target_layer_ids: tapped layers, ascending, "output of layer j".
        mask_token_id: token whose embedding stands where nothing is known yet; None: the family has no masks.
        lm_head: the draft's own head; None: the policy's is used, detached.
        d2t, t2d: the maps of a reduced vocabulary, see ``drafts/vocab.py``; None: the draft predicts every token.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DraftConfig, *, num_slots: int) -> None:
        super().__init__()
        self.mask_token_id: int | None = None
        self.lm_head: nn.Linear | None = None
        self.register_buffer("d2t", None)
        self.register_buffer("t2d", None)
        self.config = config
        self.target_layer_ids = tuple(config.target_layer_ids)
        self.num_slots = num_slots

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the matrices from N(0, 1 / fan_in) and set the norms to one, in place (after ``to_empty``).

        A reduced vocabulary is empty until ``set_vocabulary`` or ``load_weights``. Each rank draws whole matrices and
        keeps its shard: ranks whose default generators agree get the values of one rank.
        """
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                fill_normal(parameter, std=parameter.shape[1] ** -0.5)
        for buffer in self.buffers():
            buffer.zero_()

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Choose the tokens ``[V_d]``, ascending, of a reduced vocabulary; every rank must choose the same."""
        assert self.d2t is not None and self.t2d is not None, "the draft predicts every token"
        for buffer, values in zip(
            (self.d2t, self.t2d), build_vocabulary_maps(target_ids, self.config.vocab_size), strict=True
        ):
            buffer.copy_(values)

    def check_inputs(self, tokens: PackedTokens, layout: PackedLayout) -> None:
        """Refuse what ``forward`` cannot run.

        Raises:
            ValueError: a layout of other tokens, a document longer than ``max_position_embeddings``, or a reduced
                vocabulary that was never chosen.
        """
        if self.t2d is not None and not bool(self.t2d.any()):
            raise ValueError(
                "the draft's vocabulary is reduced, but its tokens were never chosen; load a draft that has them, or "
                "choose them from rollouts"
            )
        if not torch.equal(layout.cu_seqlens, tokens.cu_seqlens):
            raise ValueError(
                f"layout has cu_seqlens {layout.cu_seqlens.tolist()}, but tokens {tokens.cu_seqlens.tolist()}; "
                "the two must be equal"
            )
        longest = int(torch.diff(tokens.cu_seqlens).max())
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"a document has {longest} tokens; the draft allows max_position_embeddings="
                f"{self.config.max_position_embeddings}"
            )

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
        mask_embedding: Tensor | None = None,
    ) -> DraftRows:
        """Run every pass of the draft.

        Args:
            taps: ``[T, m * D]``, detached outputs of the tapped layers, concatenated in ascending order, this rank's
                rows in layout order.
            embeddings: ``[T, D]``, detached input embeddings of the policy for this rank's rows.
            tokens: the packed microbatch, global.
            layout: of the trunk.
            group: context-parallel group; None at one rank. Collective over it: every rank must call.
            mask_embedding: ``[D]``, the policy's detached embedding of ``mask_token_id``; None where that is None.

        Raises:
            ValueError: see ``check_inputs``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def get_head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that ``compute_loss`` uses; ``forward`` uses all others."""
        return [] if self.lm_head is None else list(self.lm_head.parameters())

    def compute_logits(self, rows: DraftRows, policy_head: Tensor, shard: VocabShard | None = None) -> Tensor:
        """Return the logits ``[r, V]``, or ``[r, V_d]`` of a reduced vocabulary; with a ``shard``, its columns of them.

        Args:
            rows: of ``forward``, or some of them.
            policy_head: ``[V, D]``, the policy's head weight, detached.
            shard: the tokens that this rank computes, of which ``policy_head`` has the rows; None: all. Collective over
                its group, forward and backward.
        """
        weight = policy_head if self.lm_head is None else get_local_tensor(self.lm_head.weight)
        return F.linear(rows.hidden if shard is None else shard.enter(rows.hidden), weight)

    def compute_loss(
        self, rows: DraftRows, teacher_logits: Tensor, policy_head: Tensor, shard: VocabShard | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss sums ``[num_slots]`` of some rows and their figures; see ``compute_draft_loss``.

        The chunked head calls this outside of ``forward``, while the draft's parameters are unsharded.

        Args:
            rows: as in ``compute_logits``.
            teacher_logits: ``[r, V]``, the policy's detached logits at each row's teacher row, before temperature; with
                a ``shard``, its columns.
            policy_head: as in ``compute_logits``.
            shard: as in ``compute_logits``.
        """
        return compute_draft_loss(
            self.compute_logits(rows, policy_head, shard),
            teacher_logits,
            labels=rows.labels,
            weights=rows.weights,
            slot_ids=rows.slot_ids,
            num_slots=self.num_slots,
            terms=self.config.loss_terms,
            target_ids=None if self.d2t is None else compute_target_ids(self.d2t),
            shard=shard,
        )
