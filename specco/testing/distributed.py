"""Spawned process groups for tests: the one importer of torch's own test harness."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["GlooTestCase", "instantiate_parametrized_tests", "make_fake_group", "parametrize"]


@contextmanager
def make_fake_group(world_size: int) -> Generator[None]:
    """Be rank 0 of a default group whose other ranks are not there and whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class GlooTestCase(MultiProcContinuousTest):
    """Tests run by every rank of one gloo group, whose processes are spawned once per class.

    Subclasses set ``world_size`` (at most 4). Each rank computes on one thread. A collective that some rank never joins
    fails after 60 seconds, or DISTRIBUTED_TESTS_DEFAULT_TIMEOUT where that is set: on an overloaded machine a rank may
    get no CPU for a minute. Parametrise with torch's ``parametrize`` and ``instantiate_parametrized_tests``: pytest's
    own does not reach unittest classes.

    Ranks are forked from a server that has imported torch once, not started afresh.
    """

    timeout = timedelta(seconds=int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")))

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        # the first of a process decides; torch's harness then leaves it
        torch.multiprocessing.set_start_method("forkserver", force=True)
        torch.multiprocessing.set_forkserver_preload([__name__])
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        super()._spawn_processes(world_size)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
