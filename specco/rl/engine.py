"""vLLM behind a small class: generate, refit, stats, close. One in-process engine a rank.

The engine lives in the learner's process, beside its process group: it generates alone, while building it runs vLLM's
own group creation and is therefore collective over the default group. Nothing of vLLM is imported before
``RolloutEngine`` is built, so that the environment of ``vllm_build`` is in force.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from specco.metrics import build_acceptance_pairs, compute_acceptance_length
from specco.rl import refit, vllm_mends
from specco.rl.vllm_build import build_vllm, seed_torch, set_environment

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

BLOCK_METHODS = {"dflash": -1, "dspark": 0}
"""Tokens that a block draft drafts at most, over its block size, by vLLM's name of the family."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a rollout engine is built from.

    Args:
        policy_path: directory of the policy (config.json, safetensors).
        draft_path: directory of the draft; None: no speculation.
        method: vLLM's name of the draft family, a key of ``METHOD_MENDS``.
        num_speculative_tokens: draft tokens a verification. A block draft is served as it was trained with all tokens
            of its block; with fewer, its queries see fewer masks.
        draft_sample_method: "probabilistic" accepts with 1 - TV, "greedy" proposes the draft's argmax.
        dtype: of weights, activations and KV cache in the engine.
        max_model_len: prompt, response and headroom for ``num_speculative_tokens + 1``, in tokens.
        max_num_seqs: sequences decoded together.
        kv_cache_bytes: size of the KV cache, in bytes; a refit clears all of it.
        enforce_eager: no compilation and no CUDA graphs.
        seed: of vLLM itself; a rollout's noise comes from ``SamplingConfig.seed``.
    """

    policy_path: str
    draft_path: str | None = None
    method: str = "eagle3"
    num_speculative_tokens: int = 3
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 128
    kv_cache_bytes: int = 1 << 28
    enforce_eager: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "max_model_len", "max_num_seqs", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are values of 1 and more")
        if self.method not in vllm_mends.METHOD_MENDS:
            raise ValueError(f"method is {self.method!r}; allowed are {tuple(vllm_mends.METHOD_MENDS)}")
        for name in ("policy_path", "draft_path"):
            path = getattr(self, name)
            if path is not None and not (Path(path) / "config.json").is_file():
                raise ValueError(f"{name} is {path!r}, which is no directory with a config.json")
        if self.draft_path is not None and self.method in BLOCK_METHODS:
            block_size = json.loads((Path(self.draft_path) / "config.json").read_text())["block_size"]
            most = block_size + BLOCK_METHODS[self.method]
            if self.num_speculative_tokens > most:
                raise ValueError(
                    f"num_speculative_tokens is {self.num_speculative_tokens}; a {self.method} draft of block_size="
                    f"{block_size} drafts at most {most}"
                )

    @property
    def headroom(self) -> int:
        """Tokens that the last verification of a response may need past its end."""
        return self.num_speculative_tokens + 1 if self.draft_path is not None else 0


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are sampled.

    Args:
        n: responses a prompt.
        temperature: 0 is greedy.
        top_p: mass of the nucleus; below 1 the logprobs are those of the nucleus, not of the whole policy.
        max_tokens: upper bound of a response, in tokens.
        stop_token_ids: a response ends after one of these, which is part of it. Nothing else ends a response early.
        seed: of all noise of one ``generate`` call.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n is {self.n} and max_tokens {self.max_tokens}; both must be 1 or more")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(
                f"n is {self.n} at temperature 0, where all responses to a prompt are the same; allowed is 1"
            )
        if not (self.temperature == 0 or self.temperature >= 0.01) or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature is {self.temperature} (allowed: 0, and from 0.01 on, the least that vLLM takes), top_p "
                f"is {self.top_p} (allowed: above 0, up to 1)"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Args:
        token_ids: the response, the stop token included.
        logprobs: of each token under the sampling distribution (after temperature and top-p; at temperature 0 that of
            temperature 1), natural log.
        finish_reason: "stop" or "length".
        weight_versions: version of the policy that wrote each token.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_versions: list[int]


@dataclass
class EngineStats:
    """Counts of one engine over a stretch of time; they add up over stretches and ranks.

    Args:
        num_drafts: verifications of a draft.
        num_draft_tokens: tokens proposed in them.
        num_accepted_tokens: tokens accepted, without the bonus token.
        num_accepted_tokens_per_pos: accepted at each draft position, ``[num_speculative_tokens]``.
        num_generated_tokens: tokens of all responses.
        generate_seconds: wall time in ``generate``.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_generated_tokens: int = 0
    generate_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification, the bonus token included; NaN when nothing was verified."""
        return compute_acceptance_length(self.num_drafts, self.num_accepted_tokens)

    def take(self) -> EngineStats:
        """Return the counts and start again from zero."""
        counts = replace(self, num_accepted_tokens_per_pos=list(self.num_accepted_tokens_per_pos))
        fresh = EngineStats(num_accepted_tokens_per_pos=[0] * len(self.num_accepted_tokens_per_pos))
        vars(self).update(vars(fresh))
        return counts

    def to_pairs(self) -> dict[str, Tensor]:
        """Return (sum, count) pairs of the acceptance, total and by position; see ``build_acceptance_pairs``."""
        return build_acceptance_pairs(self.num_drafts, self.num_accepted_tokens, self.num_accepted_tokens_per_pos)


class RolloutEngine:
    """A policy, and perhaps its draft, served by vLLM in this process.

    Building is collective over the default process group, if there is one: every rank must build its engine.

    Args:
        config: what to build.
        version: weight version of the policy in ``config.policy_path``.

    Raises:
        ValueError: a draft that cannot be told from the policy's own weights (see ``refit.separate_draft``).
        RuntimeError: vLLM gave no draft model, or weights that cannot be refitted.
    """

    def __init__(self, config: EngineConfig, version: int = 0) -> None:
        set_environment()
        if config.draft_path is not None:
            vllm_mends.check_method(config.method, vllm_mends.get_vllm_version(), vllm_mends.is_cpu_build())
        vllm_mends.apply_mends()
        vllm_mends.keep_process_groups()
        self.config = config
        self._version = version
        self._policy_shapes = refit.read_weight_shapes(config.policy_path)
        self._draft_shapes = refit.read_weight_shapes(config.draft_path) if config.draft_path is not None else {}
        num_positions = config.num_speculative_tokens if config.draft_path is not None else 0
        self._stats = EngineStats(num_accepted_tokens_per_pos=[0] * num_positions)
        self._num_requests = 0
        self._owns_groups = not dist.is_initialized() or any(other._owns_groups for other in _open_engines)
        started = time.perf_counter()
        engine = build_vllm(config, self._stats)
        self._engine: LLMEngine | None = engine
        self._policy: Any = engine.collective_rpc("get_model")[0]
        self._draft: Any = None
        _open_engines.add(self)
        try:
            self._take_models(engine)
        except BaseException:
            self.close()
            raise
        logger.info("rollout engine up in %.1f s", time.perf_counter() - started)

    def _take_models(self, engine: LLMEngine) -> None:
        """Find the draft and see to it that both models can be refitted apart."""
        config = self.config
        if config.draft_path is not None:
            self._draft = engine.collective_rpc("get_draft_model")[0]
            if self._draft is None:
                raise RuntimeError(f"vLLM built no draft model for method {config.method!r} and {config.draft_path!r}")
            refit.separate_draft(self._policy, self._draft, self._draft_shapes)
            refit.check_live_weights("draft", self._draft)
        refit.check_live_weights("policy", self._policy)

    @property
    def version(self) -> int:
        """Weight version of the policy that is served."""
        return self._version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[list[Completion]]:
        """Sample ``sampling.n`` responses to each prompt.

        The same weights, prompts and sampling give the same responses: the noise comes from ``sampling.seed`` alone.
        With probabilistic drafts it also depends on which requests are decoded together, hence on the whole call; what
        is cached of earlier calls changes rounding alone. The caller's random generators are left as they were.

        Args:
            prompts: token ids, at least one a prompt.
            sampling: see ``SamplingConfig``.

        Returns:
            For each prompt its completions.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or no room for prompt, response and headroom.
            RuntimeError: sampled speculation on a vLLM that was not checked for it; a closed engine.
        """
        from vllm import RequestOutput, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._require_open()
        if self._draft is not None and sampling.temperature > 0:
            vllm_mends.check_sampled_speculation(vllm_mends.get_vllm_version(), vllm_mends.is_cpu_build())
        self._check_prompts(prompts, sampling, engine.model_config.get_vocab_size())
        started = time.perf_counter()
        keys: dict[str, int] = {}
        outputs: list[list[Completion]] = [[] for _ in prompts]
        with seed_torch(sampling.seed):
            try:
                for index, prompt in enumerate(prompts):
                    params = SamplingParams(
                        n=sampling.n,
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        max_tokens=sampling.max_tokens,
                        stop_token_ids=list(sampling.stop_token_ids),
                        ignore_eos=True,
                        seed=derive_seed(sampling.seed, index),
                        logprobs=0,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    key = f"{self._num_requests}"
                    self._num_requests += 1
                    keys[key] = index
                    engine.add_request(key, {"prompt_token_ids": list(prompt)}, params)
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        assert isinstance(output, RequestOutput)
                        outputs[keys[output.request_id]] = [self._to_completion(c) for c in output.outputs]
            except BaseException:
                engine.abort_request(list(keys), internal=False)
                raise
        self._stats.generate_seconds += time.perf_counter() - started
        self._stats.num_generated_tokens += sum(len(c.token_ids) for group in outputs for c in group)
        return outputs

    def refit(
        self,
        *,
        version: int,
        policy: Iterable[tuple[str, Tensor]] | None = None,
        draft: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Overwrite the weights of policy, draft or both in place, and forget every cached prefix, its memory included.

        Names and shapes are those of the directory that the engine was built from, all of them; they are checked
        before anything is written, for which a whole copy of each model is held.

        Args:
            version: weight version of the policy after the refit.
            policy: (Hugging Face name, full tensor) pairs, any floating dtype.
            draft: the same for the draft.

        Raises:
            ValueError: unknown, missing or repeated names, other shapes, or neither model given.
            RuntimeError: a draft for an engine without one, requests in flight, or a cache that cannot be reset.
        """
        engine = self._require_open()
        if policy is None and draft is None:
            raise ValueError("refit got neither policy nor draft weights")
        if draft is not None and self._draft is None:
            raise RuntimeError("refit got draft weights, but this engine was built without a draft (draft_path=None)")
        if engine.has_unfinished_requests():
            raise RuntimeError("refit while requests are in flight; wait for generate to return")
        checked: list[tuple[Any, dict[str, Tensor]]] = []
        if policy is not None:
            checked.append((self._policy, refit.check_weights("policy", policy, self._policy_shapes)))
        if draft is not None:
            checked.append((self._draft, refit.check_weights("draft", draft, self._draft_shapes)))
        with torch.no_grad():
            for model, weights in checked:
                model.load_weights(weights.items())
        self._version = version
        engine.set_weight_version(str(version))
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are in use, cached prefixes are stale")
        engine.collective_rpc(_clear_kv_caches)

    def stats(self) -> EngineStats:
        """Return the counts since the last call (or since the engine was built)."""
        return self._stats.take()

    def close(self) -> None:
        """Free the engine; closing twice is harmless.

        A default process group that was there before the engine stays as it is. One that vLLM made for itself goes with
        the last engine of this process.
        """
        engine, self._engine = self._engine, None
        self._policy = self._draft = None
        if engine is not None:
            engine.engine_core.shutdown()
            _open_engines.discard(self)
            if self._owns_groups and not _open_engines:
                vllm_mends.destroy_process_groups()

    def _require_open(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the rollout engine is closed")
        return self._engine

    def _check_prompts(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, vocab_size: int) -> None:
        limit = self.config.max_model_len
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index} is empty; a prompt has one token at least")
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise ValueError(
                    f"prompt {index} has ids {min(prompt)} to {max(prompt)}; allowed are 0 to {vocab_size - 1}"
                )
            needed = len(prompt) + sampling.max_tokens + self.config.headroom
            if needed > limit:
                raise ValueError(
                    f"prompt {index} needs {needed} tokens ({len(prompt)} prompt + {sampling.max_tokens} max_tokens + "
                    f"{self.config.headroom} headroom for drafts), but max_model_len is {limit}"
                )

    def _to_completion(self, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        logprobs = [position[token].logprob for position, token in zip(output.logprobs, token_ids, strict=True)]
        return Completion(token_ids, logprobs, output.finish_reason, [self._version] * len(token_ids))


# vLLM's process groups belong to the process, and so does this list of those who use them
_open_engines: weakref.WeakSet[RolloutEngine] = weakref.WeakSet()


def _clear_kv_caches(worker: Any) -> None:
    """Zero the memory of the KV caches.

    A drafted token can depend on slots that its request never wrote. With another engine's leavings there the responses
    are as likely as before, but they are others: a resumed run would part from the one that it goes on with.
    """
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def derive_seed(seed: int, index: int) -> int:
    """Return a 48-bit seed for item ``index`` of a call; neighbours share nothing (vLLM adds 0 to n-1 itself)."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
