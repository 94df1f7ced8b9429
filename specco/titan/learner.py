"""The learner: one optimizer step of policy and draft from packed rollouts, laid out by torchtitan.

A step, on every rank:

    counts of all microbatches, reduced once ->
    for each microbatch, or in the order of a pipeline's schedule:
        policy forward (taps) -> draft forward -> chunked head -> one backward ->
    clip the policy's gradients, clip the draft's apart -> one optimizer step -> metrics as (sum, count), reduced once
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import TORCH_DTYPE_MAP, Configurable
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.export import iterate_weights
from specco.drafts.load import load_weights
from specco.metrics import all_reduce_pairs, compute_means, make_pair, sum_acceptance_length_estimates, sum_rows_by_slot
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.titan.checkpoint import load_checkpoint
from specco.titan.export import load_policy, named_policy_weights
from specco.titan.head import HeadPlan, HeadStats, PolicyLoss, compute_head_loss
from specco.titan.parallelize import check_model, check_parallelism
from specco.titan.pipeline import Boundary, Finish, PolicyPipeline, WholePolicy
from specco.titan.policy import Policy
from specco.titan.stages import PipelineShape, PolicyParts, share_weights

DRAFT_PATTERN = r"^draft\."
"""Matches the names of the draft's parameters in the policy's model."""


def policy_and_draft_groups(policy_lr: float, draft_lr: float | None, **kwargs: Any) -> list[ParamGroupConfig]:
    """Return AdamW parameter groups for ``OptimizersContainer.Config``: the draft's first, then everything else.

    Args:
        policy_lr: learning rate of the policy.
        draft_lr: learning rate of the draft; None when there is none.
        kwargs: further AdamW arguments, the same for both.
    """
    groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": policy_lr, **kwargs})]
    if draft_lr is not None:
        draft = ParamGroupConfig(
            pattern=DRAFT_PATTERN, optimizer_name="AdamW", optimizer_kwargs={"lr": draft_lr, **kwargs}
        )
        groups.insert(0, draft)
    return groups


class Learner(Configurable):
    """Trains a policy and, if its model has one, the draft that hangs on it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Annotated[ModelSpec | None, tyro.conf.Suppress] = None
        policy_path: str = ""
        """Directory of the policy to start from (Hugging Face safetensors); empty: fresh weights from the seed."""
        draft_path: str = ""
        """Directory of the draft to start from; empty: fresh weights from the seed."""
        reference_path: str = ""
        """Directory of a fixed policy of the same shape, for a loss with a KL term; empty: none."""
        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        lr_scheduler: LRSchedulersContainer.Config = field(default_factory=LRSchedulersContainer.Config)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        activation_checkpoint: ActivationCheckpointingConfig = None
        compile: CompileConfig = field(default_factory=CompileConfig)
        comm: CommConfig = field(default_factory=CommConfig)
        debug: DebugConfig = field(default_factory=DebugConfig)
        draft_weight: float = 1.0
        """Factor of the draft's loss in ``policy_loss + draft_weight * draft_loss``."""
        draft_max_norm: float = 1.0
        """The draft's gradient norm is clipped to this, apart from the policy's (``training.max_norm``)."""
        temperature: float = 1.0
        """Sampling temperature of the rollouts: the policy's logprobs are taken at it, the teacher's are not."""
        chunk_rows: int = 1024
        """Rows of one lm_head product."""
        tap_transport: Literal["auto", "shm", "cuda_ipc", "p2p"] = "auto"
        """How taps reach the draft from other stages of a pipeline; see ``TapChannel``."""

        def __post_init__(self) -> None:
            check_parallelism(self.parallelism)
            if self.model_spec is not None:
                check_model(cast(Policy.Config, self.model_spec.model), self.parallelism)
            if not self.temperature > 0:
                raise ValueError(f"learner.temperature is {self.temperature}; allowed is > 0 (the rollouts' own)")
            if self.draft_weight < 0:
                raise ValueError(f"learner.draft_weight is {self.draft_weight}; allowed is >= 0")
            if self.chunk_rows < 1:
                raise ValueError(f"learner.chunk_rows is {self.chunk_rows}; allowed is >= 1")

    def __init__(self, config: Config) -> None:
        assert config.model_spec is not None, "model_spec is set by the config function"
        check_model(cast(Policy.Config, config.model_spec.model), config.parallelism)
        self.config = config
        self.device = utils.get_local_device()
        world_size = dist_utils.init_distributed(config.comm)
        self.parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
        self.parallel_dims.build_mesh()
        # "batch": ranks with different microbatches; "loss": those and the ranks that hold other rows of the same one
        self.batch_group, self.loss_group = self._get_group("batch"), self._get_group("loss")
        self.cp_group, self.tp_group, self.pp_group = (self._get_group(axis) for axis in ("cp", "tp", "pp"))
        self.cp_rank = 0 if self.cp_group is None else dist.get_rank(self.cp_group)
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        dist_utils.set_determinism(self.parallel_dims, self.device, config.debug, distinct_seed_mesh_dims=["pp"])
        model_config = cast(Policy.Config, config.model_spec.model)
        self.stages: PipelineShape | None = None
        if self.pp_group is not None:
            self.stages = PipelineShape.build(model_config, config.parallelism, dist.get_rank(self.pp_group))
        self.policy = self._build_parts(model_config)
        self.draft: Draft | None = self.policy.parts[-1].draft
        self._load_weights()
        self.runner = self._build_runner(self.policy, self._compute_loss)
        self.reference_runner: WholePolicy | PolicyPipeline | None = None
        if config.reference_path:
            self.reference = self._build_parts(replace(model_config, draft=None, is_frozen=True))
            for part in self.reference.parts:
                load_policy(part, config.reference_path)
            self.reference_runner = self._build_runner(self.reference, self._keep_reference_logprobs)
        self.optimizers = self._build_optimizers()
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=config.training.steps)
        self.num_skipped = {"policy": 0, "draft": 0}
        self.num_steps = 0
        self._results: dict[int, dict[str, Tensor]] = {}
        self._reference_logprobs: dict[int, Tensor] = {}

    @property
    def draft_config(self) -> DraftConfig | None:
        """Of the draft, on whichever stage it is; None where there is none."""
        return self.policy.config.draft

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a batch this rank trains on, of ``data_parallel_size``; its other peers train on the same."""
        return 0 if self.batch_group is None else dist.get_rank(self.batch_group)

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares a batch is cut: replicas times FSDP shards, not the ranks of "cp", "tp", "pp"."""
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    def _get_group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of a mesh axis; None where its degree is 1."""
        mesh = self.parallel_dims.get_optional_mesh(axis)
        return None if mesh is None else mesh.get_group()

    def _build_parts(self, model_config: Policy.Config) -> PolicyParts:
        return PolicyParts.build(self.config, model_config, self.parallel_dims, self.stages, self.device)

    def _load_weights(self) -> None:
        if self.config.policy_path:
            for part in self.policy.parts:
                load_policy(part, self.config.policy_path)
        if self.draft is not None and self.config.draft_path:
            load_weights(self.draft, self.config.draft_path)

    def _build_runner(self, policy: PolicyParts, finish: Finish) -> WholePolicy | PolicyPipeline:
        if self.stages is None or self.pp_group is None:
            return WholePolicy(policy.parts[0], finish)
        config, tp_mesh = self.config, self.parallel_dims.get_optional_mesh("tp")
        boundary = Boundary(
            num_rows=0,
            width=policy.config.dim,
            dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
            device=self.device,
            tp_mesh=tp_mesh,
            is_sharded=tp_mesh is not None and config.parallelism.enable_sequence_parallel,
        )
        return PolicyPipeline(
            policy,
            self.stages,
            boundary,
            group=self.pp_group,
            finish=finish,
            transport=config.tap_transport,
            timeout_s=config.comm.train_timeout_seconds,
        )

    def _build_optimizers(self) -> OptimizersContainer:
        """Return one container for all stages of this rank; a rank without the draft has no group for it."""
        config = self.config.optimizer
        if self.stages is not None and self.draft is None:
            groups = [group for group in config.param_groups if group.pattern != DRAFT_PATTERN]
            config = replace(config, param_groups=groups)
        # torchtitan asks its model parts for nothing but their parameters and the names of these
        return config.build(model_parts=[cast(nn.Module, self.policy)])

    def step(self, microbatches: Sequence[PackedTokens], policy_loss_fn: PolicyLoss) -> dict[str, float]:
        """Take one optimizer step. Collective: every rank must call.

        Args:
            microbatches: this data-parallel rank's share, the same on all its cp, tp and pp peers; data-parallel ranks
                may hold different numbers of them, or none.
            policy_loss_fn: sums of the policy's loss from logprobs and the ``row_values`` of the tokens; the same on
                every rank.

        Returns:
            The step's metrics, the same on every rank. Losses are means over all trained tokens of all ranks.

        Raises:
            ValueError: other microbatches on a cp, tp or pp peer, on every rank.
        """
        draw_key = (self.config.debug.seed or 0, self.num_steps)
        microbatches = [replace(tokens, draw_key=draw_key) for tokens in microbatches]
        num_microbatches, num_targets, draft_weights = self._count(microbatches)
        draft_total = float(draft_weights.sum())
        made_up = _nothing_to_train(policy_loss_fn)
        plans = [
            HeadPlan(
                tokens=tokens.to(self.device),
                policy_loss_fn=policy_loss_fn,
                policy_scale=1.0 / max(num_targets, 1.0),
                draft_scale=self.config.draft_weight / draft_total if draft_total > 0 else 0.0,
                temperature=self.config.temperature,
                chunk_rows=self.config.chunk_rows,
                layout=self.build_layout(tokens),
                group=self.cp_group,
                tp_group=self.tp_group,
            )
            for tokens in [*microbatches, *[made_up] * (num_microbatches - len(microbatches))]
        ]
        if self.reference_runner is not None:
            plans = self._add_reference_logprobs(plans, self.reference_runner)
        self.runner.run(plans, is_training=True)
        metrics = self._get_learning_rates() | self._update()
        self.num_steps += 1
        metrics |= self._reduce(self._results)
        self._results = {}
        return metrics if self.stages is None else self._share_metrics(metrics)

    def _count(self, microbatches: Sequence[PackedTokens]) -> tuple[int, float, Tensor]:
        """Return (microbatches to run, target tokens of all ranks, draft weights of all ranks by slot).

        A rank runs as many microbatches as the fullest one has, and as the schedule wants. Draft weights are there on
        the draft's stage alone.
        """
        num_slots = 0 if self.draft is None else self.draft.num_slots
        sums = torch.zeros(2 + num_slots, dtype=torch.float64, device=self.device)
        sums[0] = self._find_differing_peers(microbatches)
        for tokens in microbatches:
            sums[1] += tokens.is_target_row.sum()
            if self.draft is not None:
                sums[2:] += self.draft.sum_loss_weights(tokens).to(self.device)
        most = torch.tensor(len(microbatches), device=self.device)
        if self.batch_group is not None:
            dist.all_reduce(sums, group=self.batch_group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.batch_group)
        if float(sums[0]) > 0:
            raise ValueError(
                "microbatches differ between the cp, tp and pp peers of a data-parallel rank; all must get the same"
            )
        num_microbatches = max(int(most), 1)
        if self.stages is not None:
            num_microbatches = self.stages.round_up(num_microbatches)
        return num_microbatches, float(sums[1]), sums[2:]

    def _find_differing_peers(self, microbatches: Sequence[PackedTokens]) -> float:
        """Return 1 where a peer that trains on the same data was given other microbatches, else 0."""
        digest = float(compute_digest(microbatches) >> 16)  # 48 bits: whole in float64
        differs = 0.0
        for group in (self.cp_group, self.tp_group, self.pp_group):
            if group is not None:
                values = torch.tensor([digest, -digest, differs], dtype=torch.float64, device=self.device)
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
                differs = max(float(values[2]), float(values[0] != -values[1]))
        return differs

    def build_layout(self, tokens: PackedTokens) -> PackedLayout:
        """Return which rows of a microbatch this rank holds."""
        return PackedLayout.build(tokens.cu_seqlens, self.parallel_dims.cp, self.cp_rank)

    def _add_reference_logprobs(
        self, plans: Sequence[HeadPlan], runner: WholePolicy | PolicyPipeline
    ) -> list[HeadPlan]:
        """Return the plans, on the last stage with the row value ``reference_logprobs`` of their tokens.

        It is 0 but for this rank's trained tokens.
        """
        runner.run([replace(plan, policy_loss_fn=None) for plan in plans], is_training=False)
        found, self._reference_logprobs = self._reference_logprobs, {}
        extended = []
        for number, plan in enumerate(plans):
            values = {"reference_logprobs": found[number]} if runner.is_last else {}
            tokens = replace(plan.tokens, row_values=plan.tokens.row_values | values)
            extended.append(replace(plan, tokens=tokens))
        return extended

    def _keep_reference_logprobs(self, number: int, plan: HeadPlan, hidden: Tensor, rows: DraftRows | None) -> Tensor:
        loss, stats = compute_head_loss(self.reference.parts[-1].lm_head, hidden, plan)
        logprobs = stats.logprobs.new_zeros(plan.tokens.num_tokens)
        # a target row speaks of the token that follows it
        logprobs[stats.target_rows + 1] = stats.logprobs
        self._reference_logprobs[number] = logprobs
        return loss

    def _compute_loss(self, number: int, plan: HeadPlan, hidden: Tensor, rows: DraftRows | None) -> Tensor:
        """Return the loss of one microbatch; keep its figures as (sum, count) pairs of this rank."""
        loss, stats = compute_head_loss(self.policy.parts[-1].lm_head, hidden, plan, self.draft, rows)
        num_targets = stats.logprobs.numel()
        pairs = {name: make_pair(value, num_targets) for name, value in stats.policy_sums.items()}
        if rows is not None:
            assert self.draft is not None
            pairs |= summarize_draft(self.draft, rows, stats)
        self._results[number] = pairs
        return loss

    def _update(self) -> dict[str, float]:
        """Clip both gradients apart, skip what is not finite, step; return norms and counts."""
        metrics = {}
        max_norms = {"policy": self.config.training.max_norm, "draft": self.config.draft_max_norm}
        for name, parameters in self._parameters().items():
            has_experts = name == "policy" and self.parallel_dims.ep_enabled
            norm = dist_utils.clip_grad_norm_(
                parameters,
                max_norms[name],
                foreach=True,
                pp_mesh=self.parallel_dims.get_optional_mesh("pp") if name == "policy" else None,
                ep_enabled=has_experts,
            )
            metrics[f"grad_norm/{name}"] = float(norm)
            if not math.isfinite(norm):
                self.num_skipped[name] += 1
                count = self.num_skipped[name]
                logger.warning(f"The {name}'s gradient norm is {float(norm)}: its update is skipped ({count} so far)")
                for parameter in parameters:
                    parameter.grad = None
            metrics[f"skipped/{name}"] = float(self.num_skipped[name])
        self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad(set_to_none=True)
        return metrics

    def _parameters(self) -> dict[str, list[nn.Parameter]]:
        named = [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]
        groups = {"policy": [p for name, p in named if not name.startswith("draft.")]}
        if self.draft is not None:
            groups["draft"] = [p for name, p in named if name.startswith("draft.")]
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the learner: weights, optimizer, schedules, counts of steps and skips."""
        return {
            "model": self.policy.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.lr_schedulers.state_dict(),
            "num_skipped": dict(self.num_skipped),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, in any layout of the same model."""
        self.policy.load_state_dict(state_dict["model"])
        self.optimizers.load_state_dict(state_dict["optimizer"])
        self.lr_schedulers.load_state_dict(state_dict["lr_scheduler"])
        self.num_skipped = dict(state_dict["num_skipped"])
        self.num_steps = state_dict["num_steps"]

    def load_checkpoint_weights(self, path: str) -> None:
        """Take policy and draft, and nothing else, from a checkpoint of a learner. Collective: every rank must call."""
        state = {"learner": {"model": self.policy.state_dict()}}
        load_checkpoint(path, state)
        self.policy.load_state_dict(state["learner"]["model"])

    def _get_learning_rates(self) -> dict[str, float]:
        """Return the rates of the coming update by parameter group."""
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        names = ["draft", "policy"] if self.draft is not None else ["policy"]
        return {f"lr/{name}": float(rate) for name, rate in zip(names, rates, strict=True)}

    def _reduce(self, results: dict[int, dict[str, Tensor]]) -> dict[str, float]:
        """Return the means over all microbatches and ranks; a figure of which nothing was counted is left out.

        There are none but on the last stage.
        """
        if not results:
            return {}
        parts = [results[number] for number in sorted(results)]
        pairs = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        if self.loss_group is not None:
            pairs = all_reduce_pairs(pairs, self.loss_group)
        return compute_means({name: pair for name, pair in pairs.items() if pair[1] > 0})

    def _share_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a pipeline's last stage, which alone knows the draft, on every rank.

        Added are the seconds that all stages waited for taps, and for slots to put them into.
        """
        assert isinstance(self.runner, PolicyPipeline)
        waits = torch.tensor(self.runner.take_waits(), dtype=torch.float64, device=self.device)
        dist.all_reduce(waits, group=self.pp_group)
        shared: list[Any] = [
            metrics | dict(zip(("seconds/tap_wait", "seconds/slot_wait"), waits.tolist(), strict=True))
        ]
        dist.broadcast_object_list(shared, group_src=self.runner.shape.ranks[-1], group=self.pp_group)
        self.num_skipped = {name: int(shared[0].get(f"skipped/{name}", 0)) for name in self.num_skipped}
        return shared[0]

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of the policy. Collective: every rank must drain it."""
        if self.stages is None or self.pp_group is None:
            yield from named_policy_weights(self.policy.parts[0])
            return
        own = dict(zip(self.stages.own, self.policy.parts, strict=True))
        for stage, owner in enumerate(self.stages.ranks):
            weights = named_policy_weights(own[stage]) if stage in own else None
            yield from share_weights(weights, owner, self.pp_group)

    def draft_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (served name, full tensor) of the draft. Collective: every rank must drain it."""
        assert self.draft_config is not None, "this learner has no draft"
        weights = None if self.draft is None else iterate_weights(self.draft)
        if self.stages is not None and self.pp_group is not None:
            return share_weights(weights, self.stages.ranks[-1], self.pp_group)
        assert weights is not None
        return weights

    def close(self) -> None:
        """Close what a pipeline holds beside its groups. Collective: every rank must call."""
        if isinstance(self.runner, PolicyPipeline):
            self.runner.close()


def summarize_draft(draft: Draft, rows: DraftRows, stats: HeadStats) -> dict[str, Tensor]:
    """Return the draft's figures of one microbatch as (sum, count) pairs, each row counted once.

    ``draft_loss`` and ``draft_loss/slot{k}`` are means over weights; ``draft_tv`` and ``draft_top1`` over rows.
    ``acceptance_length_estimate`` is an estimate from the policy's own tokens, biased low.
    """
    assert stats.draft_sums is not None
    weights = sum_rows_by_slot(rows.weights, rows.slot_ids, draft.num_slots)[:, 0]
    losses = stats.draft_sums.double()
    pairs = {"draft_loss": make_pair(losses.sum(), weights.sum())}
    tv, top1 = (stats.draft_rows.get(name, rows.weights.new_zeros(0)) for name in ("tv", "top1"))
    for slot in range(draft.num_slots):
        pairs[f"draft_loss/slot{slot}"] = make_pair(losses[slot], weights[slot])
    for name, values in {"draft_tv": tv, "draft_top1": top1}.items():
        for slot, pair in enumerate(sum_rows_by_slot(values, rows.slot_ids, draft.num_slots)):
            pairs[f"{name}/slot{slot}"] = pair
    pairs["acceptance_length_estimate"] = sum_acceptance_length_estimates(
        tv, 1 - tv, rows.slot_ids, rows.branch_ids, draft.num_slots
    )
    return pairs


def compute_digest(microbatches: Sequence[PackedTokens]) -> int:
    """Return 64 bits that depend on every value of the microbatches, and on the way they are packed."""
    digest = hashlib.blake2b(digest_size=8)
    for tokens in microbatches:
        tensors = {"ids": tokens.input_ids, "mask": tokens.loss_mask, "cu_seqlens": tokens.cu_seqlens}
        tensors |= {"sample_ids": tokens.sample_ids, **tokens.row_values}
        for name, value in sorted(tensors.items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _nothing_to_train(policy_loss_fn: PolicyLoss) -> PackedTokens:
    """Return one token without a target, for a rank that has run out of microbatches while others go on."""
    return PackedTokens(
        input_ids=torch.zeros(1, dtype=torch.int64),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        sample_ids=torch.zeros(1, dtype=torch.int64),
        row_values={name: torch.zeros(1) for name in policy_loss_fn.row_value_names},
        is_counted=False,
    )
