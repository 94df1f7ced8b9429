"""Run GRPO jobs in processes that are forked from this one, which has imported torch, torchtitan and vLLM once.

    test --> server --> agent (torchrun's own, in a session of its own) --> ranks

A job is a line on standard input: JSON of ``folder`` (where it runs), ``output`` (file of its output), ``num_ranks``,
``fault`` (the first four arguments of run_grpo_fault.py) and ``arguments`` (of recipes.grpo). A line with its exit
status comes back. Only torchrun's command line is left out: tests that mean it start it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from helpers import run_grpo_fault
from recipes import grpo
from specco.rl.vllm_build import ENVIRONMENT

TIMEOUT_S = 240
Fault = tuple[str, str, int, int]
NO_FAULT: Fault = ("task", "none", 0, 0)


class JobServer:
    """The test's end of a server."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        paths = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.job_server"],
            env=os.environ | ENVIRONMENT | paths | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, num_ranks: int, *arguments: str, fault: Fault = NO_FAULT) -> tuple[int, str]:
        """Run a job to its end; return its exit status and output."""
        assert self.process.stdin is not None and self.process.stdout is not None
        output = folder / "job_output.txt"
        job = {"folder": str(folder), "output": str(output), "num_ranks": num_ranks, "fault": fault}
        print(json.dumps(job | {"arguments": arguments}), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), output.read_text()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def run_job(job: dict[str, Any]) -> None:
    """Become the agent of a job's ranks."""
    os.setsid()
    os.chdir(job["folder"])
    file = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job["num_ranks"],
        run_id="job",
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run_rank)(job["fault"], job["arguments"])


def run_rank(fault: Sequence[Any], arguments: Sequence[str]) -> None:
    """Run the job as one of its ranks."""
    run_grpo_fault.prepare(*fault)
    sys.argv = ["recipes.grpo", *arguments]
    grpo.main()


def wait_job(pid: int) -> int:
    """Return the exit status of a job, killed with all its ranks when its time is over."""
    deadline = time.monotonic() + TIMEOUT_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


def serve() -> None:
    """Serve jobs, one after the other, until standard input ends."""
    import vllm.engine.arg_utils
    import vllm.v1.engine.llm_engine
    import vllm.v1.sample.rejection_sampler
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.freeze()  # what is imported is not searched for garbage in every job
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                run_job(json.loads(line))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        print(wait_job(pid), flush=True)


if __name__ == "__main__":
    serve()
