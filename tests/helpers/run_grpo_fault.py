"""Run recipes.grpo with one fault built in, or none; the arguments after it are the job's own.

    torchrun --nproc-per-node N tests/helpers/run_grpo_fault.py REWARD KIND CALL RANK --config smoke ...

``REWARD`` is "task", which a policy of random weights never gets, or "any": the share of even token ids, so that every
step moves the policy. At the ``CALL``-th call (from 1) of the place that ``KIND`` names, rank ``RANK`` is killed or
fails; the time of it, in seconds of the epoch, is written to the file ``fault_time`` before.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from recipes import grpo
from recipes.carry import CarryEnvironment
from specco.rl.engine import RolloutEngine
from specco.rl.environment import Trajectory
from specco.rl.grpo import GrpoLoss
from specco.titan.learner import Learner


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_engine(*_: Any) -> None:
    raise RuntimeError("the engine broke on purpose")


def fill_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hang(*_: Any) -> None:
    signal.pause()


FAULTS: dict[str, tuple[type, str, Callable[..., None]]] = {
    "kill_step": (Learner, "_update", kill),
    "kill_save": (FileSystemWriter, "finish", kill),
    "kill_refit": (RolloutEngine, "refit", kill),
    "fail_engine": (RolloutEngine, "generate", fail_engine),
    "fill_disk": (FileSystemWriter, "write_data", fill_disk),
    "hang": (Learner, "_update", hang),
}


def install(kind: str, call: int, rank: int) -> None:
    """Replace the method so that its ``call``-th call on ``rank`` meets the fault before it begins."""
    if kind == "none":
        return
    if kind == "nan_loss":
        install_nan_loss(call)
        return
    owner, name, fault = FAULTS[kind]
    method = getattr(owner, name)
    calls = 0

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and dist.get_rank() == rank:
            write_fault_time()
            fault()
        return method(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def write_fault_time() -> None:
    Path("fault_time").write_text(str(time.time()))


def install_nan_loss(call: int) -> None:
    method, calls = GrpoLoss.__call__, 0

    def wrapped(self: GrpoLoss, logprobs: Any, values: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, sums = method(self, logprobs, values)
        if calls == call:
            write_fault_time()
            loss, sums["policy_loss"] = loss * float("nan"), sums["policy_loss"] * float("nan")
        return loss, sums

    GrpoLoss.__call__ = wrapped


def score_even_ids(self: CarryEnvironment, trajectory: Trajectory) -> float:
    """Return the share of even token ids in a response."""
    return sum(token % 2 == 0 for token in trajectory.response_ids) / len(trajectory.response_ids)


def prepare(reward: str, kind: str, call: int, rank: int) -> None:
    """Set the reward and the fault of this process."""
    if reward == "any":
        CarryEnvironment.score = score_even_ids
    install(kind, call, rank)


if __name__ == "__main__":
    prepare(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.argv = ["recipes.grpo", *sys.argv[5:]]
    grpo.main()
