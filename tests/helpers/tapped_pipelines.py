"""A tiny policy in stages with a draft on the last one, and what a step of it does, recorded."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from helpers.pipelines import build_schedule, list_stages
from specco.distributed.pipeline_order import Event, Kind
from specco.distributed.taps import STAGE_INPUT, Tap, Taps

VOCAB, WIDTH, ROWS, LAYERS_PER_STAGE = 11, 6, 5, 2


class Embedding(nn.Module):
    """Returns the embeddings of the tokens and, detached, of token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=torch.float64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(ids, self.weight), self.weight[:1].detach()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Draft(nn.Module):
    """Predicts from taps, embeddings and the mask token's row; ``names`` fixes their order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.linear = nn.Linear(WIDTH * (len(names) + 1), VOCAB, dtype=torch.float64)

    def forward(self, taps: Taps) -> Tensor:
        rows = torch.cat([taps.rows[name] for name in self.names], -1)
        mask_row = taps.step_rows["embedding"].expand(len(rows), -1)
        return F.log_softmax(self.linear(torch.cat([rows, mask_row], -1)), -1)


class StageModel(nn.Module):
    """Stage ``index`` of ``num_stages``; with one stage, the unpipelined model."""

    def __init__(self, index: int, num_stages: int, num_layers: int, names: list[str], is_checkpointed: bool) -> None:
        super().__init__()
        per_stage = num_layers // num_stages
        # every stage draws the whole model's weights, so that they do not depend on the number of stages
        torch.manual_seed(0)
        embedding, blocks = Embedding(), [Block() for _ in range(num_layers)]
        head, draft = nn.Linear(WIDTH, VOCAB, dtype=torch.float64), Draft(names)
        self.embedding = embedding if index == 0 else None
        own = range(index * per_stage, (index + 1) * per_stage)
        self.layers = nn.ModuleDict({str(i): blocks[i] for i in own})
        is_last = index == num_stages - 1
        self.head, self.draft = (head, draft) if is_last else (None, None)
        self.is_whole, self.is_checkpointed = num_stages == 1, is_checkpointed
        self.num_draft_runs = 0
        self.kept: list[tuple[Tensor, Tensor]] = []  # the first taps that came, and copies of them

    def forward(self, x: Tensor, taps: Taps | None = None) -> Tensor | tuple[Tensor, Tensor]:
        own = Taps({}, {})
        if self.embedding is not None:
            x, own.step_rows["embedding"] = self.embedding(x)
            own.rows["embedding"] = x.detach().flatten(0, 1)
        for name, layer in self.layers.items():
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            own.rows[f"layers.{name}"] = x.detach().flatten(0, 1)
        if self.head is None:
            return x
        logits = self.head(x)
        if self.is_whole:
            taps = own
        if taps is None:
            return logits, logits.new_zeros(1)
        self.num_draft_runs += 1
        if not self.is_whole and not self.kept:
            self.kept = [(rows, rows.clone()) for rows in taps.rows.values()]
        assert self.draft is not None
        if STAGE_INPUT in self.draft.names and STAGE_INPUT not in taps.rows:
            before = min(int(n) for n in self.layers) - 1
            taps.rows[STAGE_INPUT] = own.rows[f"layers.{before}"]
        return logits, -self.draft(taps)[:, 0].sum()[None]


def compute_losses(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of policy and draft."""
    logits, draft_loss = output
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), draft_loss.sum()


class RecordingStage(PipelineStage):
    """Writes down what the schedule asks of it, as the events of ``PipelineOrder``."""

    log: list[Any]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(Event(Kind.FORWARD, self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(Event(Kind.BACKWARD, self.stage_index, bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _note(self, kind: Kind, microbatch: int, ops: list[Any]) -> list[Any]:
        self.log.extend(Event(kind, self.stage_index, microbatch) for _ in ops)
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._note(Kind.RECV_F, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._note(Kind.RECV_B, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._note(Kind.SEND_F, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._note(Kind.SEND_B, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))


def list_taps(num_stages: int) -> list[Tap]:
    """Return the embedding, the first and the last layer of stage 0, one of each further stage, the draft's input."""
    last = num_stages - 1
    taps = [Tap("embedding", 0, WIDTH, num_step_rows=1), Tap("layers.0", 0, WIDTH)]
    taps += [Tap(f"layers.{(s + 1) * LAYERS_PER_STAGE - 1}", s, WIDTH) for s in range(last - 1)]
    return [*taps, Tap(STAGE_INPUT, last, WIDTH)]


class TappedPipeline:
    """A rank's stages under a schedule.

    Args:
        name: of the schedule.
        group: of the pipeline.
        num_microbatches: of a step.
        is_checkpointed: whether layers are recomputed in the backward.
        is_static: whether stages are told the shapes; else torch infers them by an extra forward.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        num_microbatches: int,
        *,
        is_checkpointed: bool = False,
        is_static: bool = False,
    ) -> None:
        indices = list_stages(name, group.rank(), group.size())
        self.num_stages = group.size() * len(indices)
        self.num_microbatches = num_microbatches
        self.taps = list_taps(self.num_stages)
        self.names = [tap.name for tap in self.taps]
        num_layers = LAYERS_PER_STAGE * self.num_stages
        self.models = [StageModel(i, self.num_stages, num_layers, self.names, is_checkpointed) for i in indices]
        self.log: list[Any] = []
        self.losses: list[tuple[Tensor, Tensor]] = []  # of policy and draft, by microbatch, on the last stage's rank
        self.stages = [self._build_stage(m, i, group, is_static) for m, i in zip(self.models, indices, strict=True)]
        self.schedule = build_schedule(name, self.stages, num_microbatches, self._compute_loss)

    def _build_stage(self, model: StageModel, index: int, group: dist.ProcessGroup, is_static: bool) -> RecordingStage:
        shapes = {}
        if is_static:
            hidden = torch.empty(1, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
            ids, logits = torch.zeros(1, ROWS, dtype=torch.int64), torch.empty(1, ROWS, VOCAB, dtype=torch.float64)
            is_last = index == self.num_stages - 1
            shapes = {
                "input_args": (ids if index == 0 else hidden,),
                "output_args": (logits.requires_grad_(), logits.new_zeros(1)) if is_last else (hidden,),
            }
        stage = RecordingStage(model, index, self.num_stages, torch.device("cpu"), group=group, **shapes)
        stage.log = self.log
        return stage

    def _compute_loss(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        policy, draft = compute_losses(output, target)
        self.losses.append((policy.detach(), draft.detach()))
        return policy + draft

    def make_batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_microbatches, ROWS)
        return tuple(torch.randint(VOCAB, shape, generator=generator) for _ in range(2))

    def step(self, seed: int) -> None:
        ids, target = self.make_batch(seed)
        has_first = any(stage.is_first for stage in self.stages)
        has_last = any(stage.is_last for stage in self.stages)
        self.schedule.step(*((ids,) if has_first else ()), target=target if has_last else None)

    def evaluate(self, seed: int) -> Any:
        ids, target = self.make_batch(seed)
        has_first = any(stage.is_first for stage in self.stages)
        has_last = any(stage.is_last for stage in self.stages)
        with torch.no_grad():
            return self.schedule.eval(*((ids,) if has_first else ()), target=target if has_last else None, losses=None)

    def get_grads(self) -> dict[str, Tensor]:
        return {name: p.grad for model in self.models for name, p in model.named_parameters() if p.grad is not None}


def run_unpipelined(
    pipeline: TappedPipeline, seeds: list[int]
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return gradients and losses of the whole model over the same microbatches; the stage's input is a layer there."""
    num_layers = LAYERS_PER_STAGE * pipeline.num_stages
    before = f"layers.{num_layers - LAYERS_PER_STAGE - 1}"
    model = StageModel(0, 1, num_layers, [before if n == STAGE_INPUT else n for n in pipeline.names], False)
    losses = []
    for seed in seeds:
        ids, target = pipeline.make_batch(seed)
        for i in range(pipeline.num_microbatches):
            policy, draft = compute_losses(model(ids[i : i + 1]), target[i : i + 1])
            (policy + draft).backward()
            losses.append((policy.detach(), draft.detach()))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


class P2PRecorder:
    """Writes down every exchange that is made on a group: its kind, peer, shape and order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.calls = group, []
        original_init, recorder = dist.P2POp.__init__, self

        def init(op: Any, kind: Any, tensor: Tensor, peer: Any = None, group: Any = None, *args: Any, **kwargs: Any):
            if group is recorder.group:
                recorder.calls.append((kind.__name__, tuple(tensor.shape), peer))
            original_init(op, kind, tensor, peer, group, *args, **kwargs)

        def count(name: str) -> Any:
            original = getattr(dist, name)

            def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if kwargs.get("group") is recorder.group:
                    recorder.calls.append((name, tuple(tensor.shape), kwargs.get("src", kwargs.get("dst"))))
                return original(tensor, *args, **kwargs)

            return mock.patch.object(dist, name, call)

        self.patches = [mock.patch.object(dist.P2POp, "__init__", init), count("send"), count("recv")]

    def __enter__(self) -> P2PRecorder:
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *args: object) -> None:
        for patch in self.patches:
            patch.stop()
