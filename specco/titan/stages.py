"""How a policy is cut into the stages of a pipeline, and this rank's stages as one thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
    _get_pp_rank_to_stage_indices_mapping,
    _split_module,
)
from torchtitan.tools import utils

from specco.distributed.pipeline_order import V_SCHEDULES
from specco.distributed.taps import Tap
from specco.titan.policy import EMBEDDING, Policy, get_layer_name


@dataclass(frozen=True)
class PipelineShape:
    """Which stages there are, and which of them are this rank's.

    Args:
        module_names: names of the modules of each stage; the last one has the draft.
        own: indices of this rank's stages.
        schedule: name of the schedule.
        ranks: pipeline rank of each stage.
    """

    module_names: tuple[tuple[str, ...], ...]
    own: tuple[int, ...]
    schedule: str
    ranks: tuple[int, ...]

    @classmethod
    def build(cls, config: Policy.Config, parallelism: ParallelismConfig, rank: int) -> PipelineShape:
        """Cut the layers as torchtitan does.

        Args:
            config: of the whole policy.
            parallelism: degree, schedule, layers of the stages.
            rank: of the pipeline.

        Raises:
            ValueError: degrees that the layers do not fit, or stages that lack a module or are too many for a schedule.
        """
        degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
        names = parallelism.module_fqns_per_model_part
        if names is None:
            dims = cast(ParallelDims, _OnlyPipeline(degree))
            num_stages, *weights = _get_pipeline_metadata(dims, parallelism, config)
            names = _generate_llm_fqn_per_model_part(num_stages, *weights)
        _check_stages(names, len(config.layers), degree, schedule)
        own = [_get_pp_rank_to_stage_indices_mapping(r, degree, schedule, len(names)) for r in range(degree)]
        ranks = tuple(next(r for r in range(degree) if stage in own[r]) for stage in range(len(names)))
        last = (*names[-1], "draft")
        return cls((*map(tuple, names[:-1]), last), own[rank], schedule, ranks)

    @property
    def num_stages(self) -> int:
        return len(self.module_names)

    def find_stage(self, name: str) -> int:
        """Return the stage that holds a module."""
        return next(stage for stage, names in enumerate(self.module_names) if name in names)

    def cut(self, policy: Policy) -> list[Policy]:
        """Return this rank's stages of a policy on the meta device."""
        return [cast(Policy, _split_module(policy, list(self.module_names[stage]))) for stage in self.own]

    def round_up(self, num_microbatches: int) -> int:
        """Return the least number of microbatches, not below the one given, that the schedule can run."""
        if self.schedule == "GPipe":
            return num_microbatches
        # looped schedules want whole rounds of the ranks, and the others at least one microbatch for each stage
        degree = 1 if self.schedule == "1F1B" else max(self.ranks) + 1
        return -(-max(num_microbatches, self.num_stages) // degree) * degree

    def list_taps(self, policy: Policy) -> list[Tap]:
        """Return what other stages have to send to the draft; a layer right before its stage comes by the pipeline.

        Args:
            policy: with a draft in its config, whole or any stage.
        """
        config, draft = policy.config, policy.config.draft
        assert draft is not None
        last = self.num_stages - 1
        mask_rows = int(policy.mask_token_id is not None)
        taps = [Tap(EMBEDDING, self.find_stage(EMBEDDING), config.dim, num_step_rows=mask_rows)]
        layers = [int(name.partition(".")[2]) for name in self.module_names[last] if name.startswith("layers.")]
        first = min(layers, default=len(config.layers))
        sent = [layer_id for layer_id in draft.target_layer_ids if layer_id < first - 1]
        return taps + [Tap(get_layer_name(i), self.find_stage(get_layer_name(i)), config.dim) for i in sent]


def _check_stages(names: Sequence[Sequence[str]], num_layers: int, degree: int, schedule: str) -> None:
    """Refuse stages that are not all modules in order, or that the ranks of a schedule cannot share out."""
    given = [name for stage in names for name in stage]
    expected = [EMBEDDING, *map(get_layer_name, range(num_layers)), "norm", "lm_head"]
    if given != expected:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part has {given}; its stages must have, in order and once each, "
            f"{expected}"
        )
    is_single = issubclass(get_schedule_class(schedule), PipelineScheduleSingle)
    per_rank = len(names) // degree
    is_allowed = per_rank == 1 if is_single else per_rank == 2 if schedule in V_SCHEDULES else per_rank > 1
    if len(names) % degree or not is_allowed:
        allowed = "1" if is_single else "2" if schedule in V_SCHEDULES else "2 or more"
        raise ValueError(
            f"there are {len(names)} stages for pipeline_parallel_degree={degree}; {schedule} runs {allowed} a rank"
        )


@dataclass(frozen=True)
class _OnlyPipeline:
    """The one figure that torchtitan's cut reads of its ``ParallelDims``."""

    pp: int


class PolicyParts:
    """This rank's stages of a policy, the whole without a pipeline, under the names of the whole.

    Args:
        parts: in the order of the stages.
    """

    def __init__(self, parts: Sequence[Policy]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def build(
        cls,
        config: Any,
        model_config: Policy.Config,
        parallel_dims: ParallelDims,
        shape: PipelineShape | None,
        device: torch.device,
    ) -> PolicyParts:
        """Build this rank's stages, laid out over the mesh, with fresh weights.

        Fresh weights of a pipeline are other draws than those of the whole policy.

        Args:
            config: of the learner.
            model_config: of the whole policy; takes over what the job's config says of the model.
            parallel_dims: degrees and meshes.
            shape: of the pipeline; None: there is none.
            device: of the weights.
        """
        model_config.update_from_config(config=config)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = model_config.build()
        model.verify_module_protocol()
        parts = []
        for part in [model] if shape is None else shape.cut(model):
            part = config.model_spec.parallelize_fn(
                part,
                parallel_dims=parallel_dims,
                training=config.training,
                parallelism=config.parallelism,
                compile_config=config.compile,
                ac_config=config.activation_checkpoint,
                dump_folder="",
            )
            part.to_empty(device=device.type)
            with torch.no_grad():
                part.init_weights()
            parts.append(part.train())
        return cls(parts)

    @property
    def config(self) -> Policy.Config:
        """Of the whole policy."""
        return self.parts[0].config

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of every stage, the draft's too."""
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of every stage, the draft's too."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) of every stage, the draft's too."""
        for part in self.parts:
            yield from part.named_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of every stage; ranks with other stages hold other names."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        for part in self.parts:
            part.load_state_dict({name: state_dict[name] for name in part.state_dict()})


def share_weights(
    weights: Iterator[tuple[str, Tensor]] | None, owner: int, group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one rank of a pipeline on all of them, one at a time.

    Collective over the group: every rank must run the iterator to its end.

    Args:
        weights: (name, full tensor) on the owner; None on the others.
        owner: rank of the group.
        group: of the pipeline.
    """
    while True:
        name, tensor = (None, None) if weights is None else next(weights, (None, None))
        meta: list[Any] = [None if tensor is None else (name, tensor.shape, tensor.dtype, tensor.device.type)]
        dist.broadcast_object_list(meta, group_src=owner, group=group)
        if meta[0] is None:
            return
        name, shape, dtype, device = meta[0]
        tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
        dist.broadcast(tensor, group_src=owner, group=group)
        yield name, tensor
