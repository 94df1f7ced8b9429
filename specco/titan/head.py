"""The chunked head: one lm_head product a chunk of rows serves the policy's loss and every pass of the draft.

    policy hidden [T, D] --(target rows)--> chunk --lm_head--> logits [c, V] --> policy logprobs --> policy loss
                                                                  | detached
                                                                  v teacher of the draft rows that point into the chunk
    draft hidden [R, D] --(sorted by teacher row)--> chunk --draft lm_head--> draft logits --> draft loss

Under context parallelism T are this rank's rows. A draft row whose teacher row another rank holds gets that hidden row
from there, and the rows that came go through ``lm_head`` in chunks of their own.

Gradients of a chunk are taken at once and folded into the gradients of the hidden rows, of the policy's head weight and
of what the draft computes its loss with, so that no ``[rows, vocabulary]`` tensor outlives its chunk. The policy's
chunks hold the policy's rows alone: their boundaries and their arithmetic do not know whether there is a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear

from specco.drafts.base import Draft, DraftRows
from specco.ops.exchange import fetch_rows
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.vocab_parallel import VocabShard, compute_logprobs


class PolicyLoss(Protocol):
    """The policy's loss of a chunk of rows, as sums.

    ``row_value_names`` are the entries of ``PackedTokens.row_values`` that it reads.
    """

    @property
    def row_value_names(self) -> tuple[str, ...]: ...

    def __call__(self, logprobs: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss sum with gradient, detached sums by name, the same names for any rows); never means.

        Args:
            logprobs: ``[r]``, of the tokens that the rows predict, at the sampling temperature.
            values: ``[r]`` by name, of the same tokens.
        """
        ...


class HeadLinear(Linear):
    """torchtitan's ``Linear`` that can hand its weight to a function while its FSDP unit is unsharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor, *, head_fn: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return ``input @ weight.T``, or what ``head_fn(input, weight)`` makes of the two.

        Args:
            input: ``[..., D]``.
            head_fn: called with the input and the ``[V, D]`` weight, under tensor parallelism both DTensors of one
                axis; its one output tensor is returned.
        """
        return super().forward(input) if head_fn is None else head_fn(input, self.weight)


@dataclass
class HeadStats:
    """What the head saw, all detached and local to this rank.

    Args:
        target_rows: int64 ``[r]``, the target rows of this rank, global and ascending.
        logprobs: ``[r]`` policy logprobs of the target rows, at the sampling temperature.
        policy_sums: sums that the policy loss function reported, added up over chunks.
        draft_sums: draft loss by slot, ``[num_slots]``, weighted sums.
        draft_rows: per-row figures of the draft by name, ``[R]``, in the order of ``DraftRows``.
    """

    target_rows: Tensor
    logprobs: Tensor
    policy_sums: dict[str, Tensor] = field(default_factory=dict)
    draft_sums: Tensor | None = None
    draft_rows: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadPlan:
    """What the head is to compute of one microbatch.

    Args:
        tokens: the microbatch, global.
        policy_loss_fn: None trains no policy (the draft's pre-training): its rows get no gradient.
        policy_scale: factor of the policy's loss sum (one over the global count of target tokens).
        draft_scale: factor of the draft's loss sum (its weight over the global sum of row weights).
        temperature: of sampling; divides the policy's logits, not the teacher's.
        chunk_rows: rows of one lm_head product.
        layout: which rows of the microbatch this rank holds; None: all, in order.
        group: context-parallel group of the layout; None at one rank.
        tp_group: ranks over which the vocabulary is cut; None: it is not.
    """

    tokens: PackedTokens
    policy_loss_fn: PolicyLoss | None
    policy_scale: float = 1.0
    draft_scale: float = 1.0
    temperature: float = 1.0
    chunk_rows: int = 1024
    layout: PackedLayout | None = None
    group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.chunk_rows < 1:
            raise ValueError(f"chunk_rows is {self.chunk_rows}; allowed are integers >= 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; training needs one > 0, the one of the rollouts")


class _LossWithGradients(torch.autograd.Function):
    """Carry gradients that were computed in the forward into the backward."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, list[Tensor | None]]], *inputs: Tensor | None) -> Tensor:
        loss, grads = compute(*(None if x is None else x.detach() for x in inputs))
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        grads = [None if g is None else g * grad_output.to(g.dtype) for g in ctx.saved_tensors]
        return (None, *grads)


@dataclass(frozen=True)
class _TeacherIndex:
    """Draft rows by the logits that teach them, ascending.

    Args:
        order: int64 ``[n]``, draft rows.
        places: int64 ``[n]``, for each of them the row of the logits, ascending.
    """

    order: Tensor
    places: Tensor


class _ChunkLoop:
    """One run over the chunks; holds the gradient buffers and the statistics."""

    def __init__(self, plan: HeadPlan, draft: Draft | None, rows: DraftRows | None, shard: VocabShard) -> None:
        self.plan, self.draft, self.rows, self.shard = plan, draft, rows, shard
        tokens = plan.tokens
        self.layout = PackedLayout.build(tokens.cu_seqlens) if plan.layout is None else plan.layout
        global_rows = self.layout.on_device("global_rows", tokens.input_ids.device)
        is_target_row = tokens.is_target_row
        self.target_rows = ((global_rows >= 0) & is_target_row[global_rows]).nonzero().squeeze(1)
        targets = global_rows[self.target_rows]
        self.labels = tokens.shift(tokens.input_ids, 1, 0)[targets]
        names = () if plan.policy_loss_fn is None else plan.policy_loss_fn.row_value_names
        self.values = {name: tokens.shift(tokens.row_values[name], 1, 0)[targets] for name in names}
        self.stats = HeadStats(target_rows=targets, logprobs=torch.empty(0))
        if rows is not None:
            # such a row would be dropped without a word
            assert bool(is_target_row[rows.teacher_rows].all()), "a draft row's teacher row is no target row"
            order = torch.argsort(rows.teacher_rows, stable=True)
            teachers = rows.teacher_rows[order]
            is_local = torch.isin(teachers, targets)
            self.local = _TeacherIndex(order[is_local], torch.searchsorted(targets, teachers[is_local]))
            self.fetched_rows, places = torch.unique(teachers[~is_local], return_inverse=True)
            self.fetched = _TeacherIndex(order[~is_local], places)

    def __call__(
        self, hidden: Tensor, weight: Tensor, draft_hidden: Tensor | None, *draft_parameters: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        is_policy_trained = self.plan.policy_loss_fn is not None
        grad_hidden = torch.zeros_like(hidden) if is_policy_trained else None
        grad_weight = _zeros_for_sum(weight) if is_policy_trained else None
        grad_draft_hidden = None if draft_hidden is None else torch.zeros_like(draft_hidden)
        grad_parameters = [_zeros_for_sum(parameter) for parameter in draft_parameters]
        loss = hidden.new_zeros((), dtype=_accumulator_dtype(hidden.dtype))
        logprobs = []

        def run_draft(logits: Tensor, start: int, index: _TeacherIndex) -> Tensor:
            assert draft_hidden is not None and grad_draft_hidden is not None
            return self._run_draft(logits, start, index, draft_hidden, weight, grad_draft_hidden, grad_parameters)

        # at least one chunk, if an empty one: every rank reports the same sums
        for start in range(0, max(self.target_rows.numel(), 1), self.plan.chunk_rows):
            chunk = slice(start, start + self.plan.chunk_rows)
            rows = self.target_rows[chunk]
            logits = hidden[rows] @ weight.t()
            chunk_loss, chunk_logprobs, grad_logits = self._compute_policy(logits, chunk)
            logprobs.append(chunk_logprobs)
            loss += chunk_loss
            if grad_logits is not None:
                assert grad_hidden is not None and grad_weight is not None
                grad_hidden[rows] = grad_logits @ weight
                grad_weight += grad_logits.t() @ hidden[rows]
            if draft_hidden is not None:
                loss += run_draft(logits, start, self.local)
        if draft_hidden is not None and self.plan.group is not None:
            fetched = fetch_rows(hidden, self.fetched_rows, self.layout, self.plan.group)
            for start in range(0, fetched.shape[0], self.plan.chunk_rows):
                logits = fetched[start : start + self.plan.chunk_rows] @ weight.t()
                loss += run_draft(logits, start, self.fetched)
        self.stats.logprobs = torch.cat(logprobs)
        grads = [grad_hidden, grad_weight, grad_draft_hidden, *grad_parameters]
        inputs = [hidden, weight, draft_hidden, *draft_parameters]
        return loss, [None if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]

    def _compute_policy(self, logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (scaled loss, logprobs [c], gradient of the logits or None)."""
        wide = logits.to(_accumulator_dtype(logits.dtype))
        with torch.enable_grad():
            leaf = wide.detach().requires_grad_()
            tempered = leaf if self.plan.temperature == 1.0 else leaf / self.plan.temperature
            logprobs = compute_logprobs(tempered, self.labels[chunk], self.shard)
            if self.plan.policy_loss_fn is None:
                return wide.new_zeros(()), logprobs.detach(), None
            values = {name: v[chunk] for name, v in self.values.items()}
            loss_sum, sums = self.plan.policy_loss_fn(logprobs, values)
            loss = loss_sum * self.plan.policy_scale
            (grad,) = torch.autograd.grad(loss, leaf)
        for name, value in sums.items():
            self.stats.policy_sums[name] = self.stats.policy_sums.get(name, 0) + value
        return loss.detach(), logprobs.detach(), grad.to(logits.dtype)

    def _run_draft(
        self,
        logits: Tensor,
        start: int,
        index: _TeacherIndex,
        draft_hidden: Tensor,
        policy_head: Tensor,
        grad_hidden: Tensor,
        grad_parameters: list[Tensor],
    ) -> Tensor:
        """Add the draft rows that a chunk of logits teaches, ``chunk_rows`` at a time; return the loss.

        ``logits`` are rows ``start ..`` of those that ``index`` speaks of.
        """
        assert self.rows is not None and self.draft is not None
        parameters = self.draft.get_head_parameters()
        bounds = torch.tensor([start, start + logits.shape[0]], device=index.places.device)
        first, last = torch.searchsorted(index.places, bounds).tolist()
        total = logits.new_zeros((), dtype=_accumulator_dtype(logits.dtype))
        for begin in range(first, last, self.plan.chunk_rows):
            picked = index.order[begin : min(begin + self.plan.chunk_rows, last)]
            teacher = logits[index.places[begin : begin + picked.numel()] - start]
            with torch.enable_grad():
                leaf = draft_hidden[picked].requires_grad_()
                rows = self.rows.pick(picked, leaf)
                loss_sums, row_stats = self.draft.compute_loss(rows, teacher, policy_head, self.shard)
                loss = loss_sums.sum() * self.plan.draft_scale
                grad, *grads = torch.autograd.grad(loss, [leaf, *parameters])
            grad_hidden[picked] = grad
            for total_grad, chunk_grad in zip(grad_parameters, grads, strict=True):
                total_grad += chunk_grad
            self._add_draft_stats(loss_sums.detach(), row_stats, picked, draft_hidden.shape[0])
            total += loss.detach()
        return total

    def _add_draft_stats(self, loss_sums: Tensor, row_stats: dict[str, Tensor], picked: Tensor, num_rows: int) -> None:
        self.stats.draft_sums = loss_sums if self.stats.draft_sums is None else self.stats.draft_sums + loss_sums
        for name, value in row_stats.items():
            if name not in self.stats.draft_rows:
                self.stats.draft_rows[name] = value.new_full((num_rows,), float("nan"))
            self.stats.draft_rows[name][picked] = value


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros_for_sum(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=_accumulator_dtype(weight.dtype))


def compute_head_loss(
    lm_head: HeadLinear, hidden: Tensor, plan: HeadPlan, draft: Draft | None = None, rows: DraftRows | None = None
) -> tuple[Tensor, HeadStats]:
    """Compute ``policy_scale * policy loss sum + draft_scale * draft loss sum`` chunk by chunk, ready for ``backward``.

    Args:
        lm_head: the policy's head; called once, so that FSDP gathers its weight once and reduces its gradient once.
        hidden: ``[1, T, D]``, the policy's final normalised hidden rows, this rank's in layout order; under tensor
            parallelism a DTensor, whole on every rank of "tp".
        plan: what to compute.
        draft: the draft whose rows are given; its own parameters must be unsharded now.
        rows: the draft's rows, or None: the policy alone.

    Returns:
        (loss scalar in the accumulator type, statistics). Collective over the plan's groups, and over what FSDP
        gathers: every rank must call.
    """
    loop = _ChunkLoop(plan, draft, rows, VocabShard.build(lm_head.out_features, plan.tp_group))
    draft_hidden = None if rows is None else rows.hidden
    draft_parameters = [] if draft is None or rows is None else draft.get_head_parameters()

    def run(flat: Tensor, weight: Tensor) -> Tensor:
        if isinstance(flat, DTensor):
            # each rank's gradient of the rows is that of its own part of the vocabulary
            flat, weight = flat.to_local(grad_placements=[Partial()]), cast(DTensor, weight).to_local()
        return _LossWithGradients.apply(loop, flat, weight, draft_hidden, *draft_parameters)

    loss = lm_head(hidden.flatten(0, 1), head_fn=run)
    if rows is not None and draft is not None and loop.stats.draft_sums is None:
        loop.stats.draft_sums = loss.new_zeros(draft.num_slots)
    return loss, loop.stats
