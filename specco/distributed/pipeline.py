"""Attach a TapChannel to the stages of a torch pipeline, without a change to its actions or its exchanges.

torch has public hooks on modules: forward hooks on the tapped modules read their outputs, and a forward pre-hook on the
draft stage's model hands it the taps. They know neither the microbatch nor whether a forward is the schedule's own, so
``forward_one_chunk`` of each stage is wrapped on the instance, and the hooks act only inside of it: shape inference and
the recomputation of checkpointed activations run outside. ``step`` is wrapped for its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specco.distributed.taps import STAGE_INPUT, TapChannel, TapError


class AttachedTaps:
    """The taps of one rank's stages; see ``attach_taps``."""

    def __init__(self, schedule: Any, stages: Sequence[Any], channel: TapChannel) -> None:
        self.schedule, self.stages, self.channel = schedule, list(stages), channel
        self._active: tuple[int, int] | None = None  # (stage, microbatch) of the forward that is running
        self._due = (self.stages[0].stage_index, channel.plan.microbatches[0])  # what this rank comes to next
        self._outputs: dict[str, Any] = {}
        self._is_computing = False
        self._handles: list[RemovableHandle] = []
        for stage in self.stages:
            self._attach(stage)
        # an attribute of the instance hides the method of the class until it is deleted
        schedule.step = partial(self._step, schedule.step)

    def remove(self) -> None:
        """Take all hooks off again; the channel stays as it is."""
        for handle in self._handles:
            handle.remove()
        for stage in self.stages:
            del stage.forward_one_chunk, stage.backward_one_chunk
        del self.schedule.step

    def _attach(self, stage: Any) -> None:
        source = self.channel.plan.get_source(stage.stage_index)
        for tap in source.taps if source is not None else ():
            module = stage.submod.get_submodule(tap.name)
            self._handles.append(module.register_forward_hook(partial(self._keep_output, stage.stage_index, tap.name)))
        if stage.stage_index == self.channel.plan.draft_stage:
            self._handles.append(stage.submod.register_forward_pre_hook(self._hand_over, with_kwargs=True))
        stage.forward_one_chunk = partial(self._forward, stage, stage.forward_one_chunk)
        stage.backward_one_chunk = partial(self._backward, stage.backward_one_chunk)

    def _forward(self, stage: Any, forward: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._active = self._due = (stage.stage_index, fwd_chunk_id)
        self._is_computing = True
        try:
            output = forward(fwd_chunk_id, *args, **kwargs)
            if self.channel.plan.get_source(stage.stage_index) is not None:
                self.channel.send(stage.stage_index, fwd_chunk_id, self._outputs)
        finally:
            self._active = None
            self._outputs.clear()
        self._is_computing = False  # not in ``finally``: an error of the model's own leaves it set
        microbatches = self.channel.plan.microbatches
        following = microbatches.index(fwd_chunk_id) + 1
        self._due = (stage.stage_index, microbatches[following % len(microbatches)])
        return output

    def _backward(self, backward: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_computing = True
        result = backward(*args, **kwargs)
        self._is_computing = False
        return result

    def _keep_output(self, stage_index: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._active is not None and self._active[0] == stage_index:
            self._outputs[name] = output

    def _hand_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._active is None:
            return None
        taps = self.channel.receive(self._active[1])
        if self.channel.plan.has_input_tap:
            # the pipeline receives into the same buffer in the next step
            taps.rows[STAGE_INPUT] = _copy_rows(args[0])
        return args, kwargs | {"taps": taps}

    def _step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self.channel.check()
        self._is_computing = False
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            tap_error = _find_tap_error(error)
            if tap_error is not None:
                raise tap_error from None
            if self._is_computing:
                # the model's own error; the other ranks learn where it was
                self._fail(f"the computation failed on rank {self.channel.rank}: {error}")
                raise
            raise self.channel.explain_pipeline(error, *self._due) from error
        self.channel.check_step_end()
        return result

    def _fail(self, reason: str) -> None:
        stage, microbatch = self._due
        sources = [s for s in self.channel.plan.sources if s.stage <= stage] or self.channel.plan.sources
        self.channel.fail(reason, sources[-1], microbatch)


def attach_taps(schedule: Any, stages: Sequence[Any], channel: TapChannel) -> AttachedTaps:
    """Make the stages of this rank send and receive taps whenever the schedule runs.

    The model of the draft's stage gets a keyword argument ``taps`` (``Taps``) in each forward of the schedule, and none
    outside of it, as in torch's shape inference. Any number of ``step()`` and ``eval()`` calls may follow, as long as
    all ranks make the same ones. After an error on any rank the channel is broken, and so is the pipeline: ranks that
    wait in the pipeline's own exchange end by its time-out, or when a neighbour's process has ended.

    Args:
        schedule: of torch.distributed.pipelining, in the order that the channel's plan was built from.
        stages: all stages of this rank.
        channel: of this rank; its group must not be the pipeline's.

    Raises:
        ValueError: stages that the plan does not know, or a group that both use.
        TapError: by ``step()`` and ``eval()``, naming source stage, microbatch and rank.
    """
    plan = channel.plan
    if schedule._n_microbatches != plan.num_microbatches:
        raise ValueError(f"schedule has {schedule._n_microbatches} microbatches; the plan {plan.num_microbatches}")
    for stage in stages:
        if stage.num_stages != plan.draft_stage + 1:
            raise ValueError(f"the pipeline has {stage.num_stages} stages; the plan {plan.draft_stage + 1}")
        if channel.group is not None and stage.group is channel.group:
            raise ValueError("group of the channel is the pipeline's; it must be one of its own")
    return AttachedTaps(schedule, stages, channel)


def _find_tap_error(error: BaseException | None) -> TapError | None:
    """Return the TapError that an error was raised from; torch wraps what a stage's forward raises."""
    while error is not None and not isinstance(error, TapError):
        error = error.__cause__
    return error


def _copy_rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).clone()
