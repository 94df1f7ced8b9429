"""Build vLLM in this process and keep what it does to the process at bay.

vLLM reads its environment when it is imported, and building it seeds random generators and takes over the number of
threads: all of that is set or restored here.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    from specco.rl.engine import EngineConfig, EngineStats

MAX_BATCHED_TOKENS = 8192
"""Prompt tokens of one engine step, unless one prompt needs more."""

# In force before vLLM is imported; a value that the user has set wins.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads belong to the learner, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are some fifteen lines a rank
}


def set_environment() -> None:
    """Set the variables above, and have the engine core in this process, always."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def build_vllm(config: EngineConfig, stats: EngineStats) -> LLMEngine:
    """Build vLLM's engine core in this process, with a logger that fills ``stats``."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    with _keep_process_state():
        vllm_config = _make_arguments(config).create_engine_config()
        return LLMEngine(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=True,
            stat_loggers=[_make_stats_logger(stats)],
            multiprocess_mode=False,
        )


def _make_arguments(config: EngineConfig) -> EngineArgs:
    from vllm.engine.arg_utils import EngineArgs

    speculative_config: dict[str, Any] | None = None
    if config.draft_path is not None:
        speculative_config = {
            "method": config.method,
            "model": config.draft_path,
            "num_speculative_tokens": config.num_speculative_tokens,
            "draft_sample_method": config.draft_sample_method,
        }
    return EngineArgs(
        model=config.policy_path,
        skip_tokenizer_init=True,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        speculative_config=speculative_config,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        use_tqdm_on_load=False,
        async_scheduling=False,
        # whole prompts only: after a part of one, vLLM rewinds the request's generator, which a CPU generator cannot
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(config.max_model_len, MAX_BATCHED_TOKENS),
    )


def _make_stats_logger(stats: EngineStats) -> type[StatLoggerBase]:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StatsLogger(StatLoggerBase):
        """Adds each step's counts up; vLLM's own counters are shared by all engines of a process."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            step = scheduler_stats.spec_decoding_stats if scheduler_stats is not None else None
            if step is None:
                return
            stats.num_drafts += step.num_drafts
            stats.num_draft_tokens += step.num_draft_tokens
            stats.num_accepted_tokens += step.num_accepted_tokens
            for position, accepted in enumerate(step.num_accepted_tokens_per_pos):
                stats.num_accepted_tokens_per_pos[position] += accepted

        def log_engine_initialized(self) -> None:
            pass

    return StatsLogger


@contextlib.contextmanager
def _keep_process_state() -> Generator[None]:
    """Restore what building vLLM changes for the whole process: random generators and the control of threads."""
    import numpy

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    num_threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with _keep_generators():
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def seed_torch(seed: int) -> Generator[None]:
    """Seed torch's global generators, from which vLLM draws draft noise, and restore them afterwards."""
    with _keep_generators():
        torch.manual_seed(seed)
        yield


def _keep_generators() -> contextlib.AbstractContextManager[None]:
    """Restore torch's generators of the CPU and of the device in use."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices=devices)
