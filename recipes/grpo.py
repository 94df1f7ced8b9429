"""GRPO that trains the draft of speculative decoding together with the policy: the compact main job.

    torchrun --nproc-per-node 2 -m recipes.grpo --config tiny_eagle3

Every rank owns an in-process vLLM engine and rolls out its share of the prompts. The samples are gathered, the learner
takes one joint step of policy and draft, and both go back into every engine before the next rollout. Any field can be
set on the command line, for example ``--steps 5 --learner.draft_weight 0.5``.

Left out, to stay readable: several updates a rollout, asynchronous rollouts, multi-turn tasks (the environment protocol
has them).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from specco.titan import cpu_support

cpu_support.apply()

from torchtitan.config import Configurable  # noqa: E402
from torchtitan.config.manager import custom_registry  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from recipes.carry import EOS_ID, MAX_RESPONSE_TOKENS, CarryEnvironment  # noqa: E402
from recipes.metrics_log import MetricsLog, check_losses, print_table  # noqa: E402
from recipes.run_info import write_run_info  # noqa: E402
from specco.drafts.export import save_draft_weights  # noqa: E402
from specco.drafts.load import read_draft_config  # noqa: E402
from specco.metrics import all_reduce_pairs, compute_means, compute_standard_error, make_pair, sum_rows  # noqa: E402
from specco.rl.batch import RolloutBatch  # noqa: E402
from specco.rl.engine import EngineConfig, RolloutEngine, SamplingConfig, derive_seed  # noqa: E402
from specco.rl.environment import collect_rollouts  # noqa: E402
from specco.rl.grpo import GrpoLoss, compute_advantages, summarize_rewards  # noqa: E402
from specco.titan.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint  # noqa: E402
from specco.titan.export import read_policy_config, save_policy_weights  # noqa: E402
from specco.titan.learner import DRAFT_PATTERN, Learner  # noqa: E402
from specco.titan.registry import make_model_spec  # noqa: E402

SUMMARY = {
    "step": "step",
    "reward": "reward",
    "validation_accuracy": "validation",
    "acceptance_length": "acceptance",
    "validation_acceptance_length": "valid. acc. length",
    "validation_acceptance_length_start_draft": "... of start draft",
    "mismatch_kl": "mismatch KL",
    "response_tokens": "response",
    "rollout_tokens_per_s": "tokens/s",
    "seconds/step": "s/step",
}
"""Columns of the table at the end of a run."""


class Grpo(Configurable):
    """The job: engine, learner, environment, and the loop over them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str = "grpo"
        """Outputs go to ``runs/NAME``; an earlier run of that name is replaced."""
        arm: Literal["cotrain", "frozen", "none"] = "cotrain"
        """Train the draft with the policy, serve the start draft as it is, or do not speculate."""
        learner: Learner.Config = field(default_factory=Learner.Config)
        """``policy_path`` and ``draft_path`` are the directories that learner and engine start from."""
        loss: GrpoLoss = field(default_factory=GrpoLoss)
        draft_loss: dict[str, float] = field(default_factory=dict)
        """Factors of ``specco.losses.LossTerms`` by name, as ``log_acceptance 1.0``; empty: the draft's own."""
        steps: int = 60
        prompts_per_step: int = 16
        group_size: int = 8
        """Samples of a prompt."""
        max_response_tokens: int = MAX_RESPONSE_TOKENS
        max_tokens: int = 4096
        """Tokens of a packed microbatch."""
        num_speculative_tokens: int = 3
        draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
        max_num_seqs: int = 64
        """Sequences that one engine decodes together."""
        validate_every: int = 10
        """Steps between validations; one comes before the first step and one after the last."""
        export_every: int = 0
        """Steps between exports of policy and draft; 0: at the end alone."""
        validation_prompts: int = 128
        validation_samples: int = 4
        seed: int = 0
        checkpoint_every: int = 10
        """Steps between checkpoints, which go to ``runs/NAME/checkpoints``; 0: none."""
        checkpoint_keep: int = 2
        """Whole checkpoints that stay."""
        resume: bool = False
        """Go on from the last whole checkpoint of this run; from the start where there is none."""
        start_checkpoint: str = ""
        """A checkpoint of another run: policy and draft start from its weights instead of those of the directories."""

        def __post_init__(self) -> None:
            for name in ("steps", "prompts_per_step", "group_size", "validate_every", "validation_prompts"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; allowed are integers >= 1")
            if self.group_size == 1:
                raise ValueError("group_size is 1; a group of one has no advantage, GRPO needs 2 or more")
            if (self.loss.kl_coef > 0) != bool(self.learner.reference_path):
                raise ValueError(
                    f"loss.kl_coef is {self.loss.kl_coef} and learner.reference_path {self.learner.reference_path!r}; "
                    "a KL term needs a reference policy, and a reference policy a KL term"
                )
            if self.loss.ratio_base == "old":
                raise ValueError(
                    'loss.ratio_base is "old"; allowed are "inference" and "current" (one update a rollout)'
                )

    def __init__(self, config: Config) -> None:
        self.config = config
        fields = config.to_dict()
        self.folder = Path("runs") / config.name
        policy_path, draft_path = config.learner.policy_path, config.learner.draft_path
        if not policy_path:
            raise ValueError("learner.policy_path is empty; GRPO starts from a policy's directory")
        if config.arm != "none" and not draft_path:
            raise ValueError(f'learner.draft_path is empty; arm "{config.arm}" needs a draft\'s directory')
        self.environment = CarryEnvironment(seed=derive_seed(config.seed, 1))
        self.validation_environment = CarryEnvironment(seed=derive_seed(0, 2))
        # built first: a wrong path or size is refused before anything is loaded
        draft_config = None if config.arm == "none" else read_draft_config(draft_path, loss_terms=config.draft_loss)
        engine_config = EngineConfig(
            policy_path=policy_path,
            draft_path=None if draft_config is None else draft_path,
            method="eagle3" if draft_config is None else draft_config.method,
            num_speculative_tokens=config.num_speculative_tokens,
            draft_sample_method=config.draft_sample_method,
            max_model_len=self._get_max_model_len(),
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
        )
        is_cotrained = config.arm == "cotrain"
        config.learner.model_spec = make_model_spec(
            read_policy_config(policy_path),
            flavor=Path(policy_path).parent.name,
            draft=draft_config if is_cotrained else None,
        )
        if not is_cotrained:
            config.learner.draft_path = ""
            optimizer = config.learner.optimizer
            optimizer.param_groups = [g for g in optimizer.param_groups if g.pattern != DRAFT_PATTERN]
        config.learner.training.steps = config.steps
        self.learner = Learner(config.learner)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine = RolloutEngine(engine_config)
        if config.start_checkpoint:
            self.learner.load_checkpoint_weights(config.start_checkpoint)
        self.start_draft = [(n, w.clone()) for n, w in self.learner.draft_weights()] if is_cotrained else None
        self.step = 0
        checkpoints = list_checkpoints(self.folder / "checkpoints") if config.resume else []
        if checkpoints:
            load_checkpoint(checkpoints[-1], {"learner": self.learner, "job": self})
        if checkpoints or config.start_checkpoint:
            self._refit(version=self.step)
        last_step = self.step if checkpoints else None
        self.log = MetricsLog(self.folder, last_step) if self.rank == 0 else None
        if self.rank == 0:
            if not config.resume:  # an earlier run's later steps would outlive this run's, and be resumed from
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            write_run_info(self.folder, fields, num_ranks=self.world_size, first_step=self.step)
        self.seconds: dict[str, float] = {}

    def _get_max_model_len(self) -> int:
        prompt = max(len(self.environment.make_prompt(index)) for index in range(16))
        return prompt + self.config.max_response_tokens + self.config.num_speculative_tokens + 1

    @contextlib.contextmanager
    def _time(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[f"seconds/{phase}"] = self.seconds.get(f"seconds/{phase}", 0.0) + time.perf_counter() - start

    def run(self) -> None:
        """Run all steps, export policy and draft, print the table."""
        if self.step == 0:
            self._write({"step": 0} | self._validate(step=0))
        steps = range(self.step + 1, self.config.steps + 1)
        progress = tqdm(
            steps, disable=self.rank != 0, desc=self.config.name, initial=self.step, total=self.config.steps
        )
        for step in progress:
            row = self._step(step)
            self._write(row)
            self.step = step
            if self.config.checkpoint_every and step % self.config.checkpoint_every == 0:
                self._save_checkpoint()
            if self.config.export_every and step % self.config.export_every == 0:
                self.export()
            progress.set_postfix_str(
                f"reward {row['reward']:.2f}, acceptance {row.get('acceptance_length', 1.0):.2f}, "
                f"{row['rollout_tokens_per_s']:.0f} tokens/s"
            )
        self.export()
        if self.log is not None:
            rows = [row for row in self.log.rows if "validation_accuracy" in row]
            print_table(rows, SUMMARY, f"{self.config.name}: {self.config.steps} steps, {self.world_size} ranks")
            self.log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run; prompts, noise and data order follow from it and the seed."""
        return {"step": self.step, "world_size": self.world_size, "seed": self.config.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the position of a run of the same seed and number of ranks."""
        for name, value in {"world_size": self.world_size, "seed": self.config.seed}.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the checkpoint has {name}={state_dict[name]}, this run {value}; the two must be equal"
                )
        self.step = state_dict["step"]

    def _save_checkpoint(self) -> None:
        state = {"learner": self.learner, "job": self}
        save_checkpoint(self.folder / "checkpoints", self.step, state, keep=self.config.checkpoint_keep)

    def _write(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(row)

    def _step(self, step: int) -> dict[str, Any]:
        """Roll out, learn, refit, and validate when it is due; return the step's row."""
        self.seconds, start = {}, time.perf_counter()
        with self._time("rollout"):
            batch, pairs = self._roll_out(step)
        with self._time("learner"):
            advantages = compute_advantages(batch["rewards"], batch["group_ids"])
            share = torch.arange(self.learner.data_parallel_rank, len(batch), self.learner.data_parallel_size)
            microbatches = batch.take(share).pack(self.config.max_tokens, {"advantages": advantages[share]})
            metrics = self.learner.step(microbatches, self.config.loss)
        check_losses(metrics, step)
        with self._time("refit"):
            self._refit(step)
        self.seconds["seconds/step"] = time.perf_counter() - start
        is_due = step % self.config.validate_every == 0 or step == self.config.steps
        validation = self._validate(step) if is_due else {}
        row = {"step": step} | compute_means(pairs) | metrics | validation | self.seconds
        row["rollout_tokens_per_s"] = float(pairs["response_tokens"][0]) / self.seconds["seconds/rollout"]
        return row

    def _roll_out(self, step: int) -> tuple[RolloutBatch, dict[str, torch.Tensor]]:
        """Sample this rank's share of the step's prompts; return all ranks' samples and figures."""
        config = self.config
        first = (step - 1) * config.prompts_per_step
        group_ids = range(first + self.rank, first + config.prompts_per_step, self.world_size)
        cpu_start = time.process_time()
        trajectories = self._sample(self.environment, group_ids, config.group_size, config.seed, step)
        # the one figure that ranks add up instead of averaging
        cpu_seconds = make_pair(time.process_time() - cpu_start, 1 / self.world_size)
        batch = RolloutBatch.from_trajectories(trajectories).gather()
        pairs = all_reduce_pairs(self._get_engine_pairs("") | {"seconds/rollout_cpu": cpu_seconds})
        tokens = batch["response_mask"].sum()
        pairs |= summarize_rewards(batch["rewards"], batch["group_ids"])
        return batch, pairs | {"response_tokens": make_pair(tokens, len(batch))}

    def _sample(self, environment: CarryEnvironment, group_ids: range, n: int, seed: int, step: int) -> list[Any]:
        sampling = SamplingConfig(
            n=n,
            temperature=self.config.learner.temperature,
            max_tokens=self.config.max_response_tokens,
            stop_token_ids=(EOS_ID,),
            seed=derive_seed(derive_seed(seed, step), self.rank),
        )
        return collect_rollouts(self.engine, environment, group_ids, sampling)

    def _get_engine_pairs(self, prefix: str, suffix: str = "") -> dict[str, torch.Tensor]:
        """Return what the engine counted of its drafts since the last call, as (sum, count) pairs of this rank."""
        pairs = self.engine.stats().to_pairs() if self.config.arm != "none" else {}
        return {f"{prefix}{name}{suffix}": pair for name, pair in pairs.items() if name.startswith("acceptance")}

    def _refit(self, version: int) -> None:
        draft = self.learner.draft_weights() if self.learner.draft_config is not None else None
        self.engine.refit(version=version, policy=self.learner.policy_weights(), draft=draft)

    def _validate(self, step: int) -> dict[str, float]:
        """Measure accuracy, and the acceptance of the co-trained and of the start draft on the same policy."""
        with self._time("validation"):
            group_ids = range(self.rank, self.config.validation_prompts, self.world_size)
            num_samples = self.config.validation_samples
            samples = self._sample(self.validation_environment, group_ids, num_samples, 0, step)
            # prompt by prompt: samples of one prompt are alike, so that only prompts count as independent
            scores = torch.tensor([sample.reward for sample in samples]).reshape(len(group_ids), num_samples).mean(1)
            pairs = {"validation_accuracy": sum_rows(scores), "validation_square": sum_rows(scores.square())}
            pairs |= self._get_engine_pairs("validation_")
            if self.start_draft is not None:
                self.engine.refit(version=step, draft=self.start_draft)
                self._sample(self.validation_environment, group_ids, num_samples, 0, step)
                pairs |= self._get_engine_pairs("validation_", "_start_draft")
                self.engine.refit(version=step, draft=self.learner.draft_weights())
            pairs = all_reduce_pairs(pairs)
            stderr = compute_standard_error(pairs["validation_accuracy"], pairs.pop("validation_square"))
            return compute_means(pairs) | {"validation_accuracy_stderr": stderr}

    def export(self) -> None:
        """Write policy and draft, as transformers and vLLM load them, to the run's folder."""
        learner, source = self.learner, self.config.learner.policy_path
        save_policy_weights(
            learner.policy.config,
            learner.policy_weights(),
            self.folder / "policy",
            tokenizer_path=source,
            eos_token_id=EOS_ID,
        )
        if learner.draft_config is not None:
            save_draft_weights(learner.draft_config, learner.draft_weights(), self.folder / "draft")


@record
def main() -> None:
    """Read the config from the command line and run the job; a failure is the last thing that torchrun shows."""
    from recipes.grpo_configs import CONFIGS

    init_logger()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", required=True, choices=CONFIGS)
    args, fields = parser.parse_known_args()
    default = CONFIGS[args.config]()
    config = tyro.cli(type(default), args=fields, default=default, registry=custom_registry)
    job = config.build()
    job.run()
    job.engine.close()
    job.learner.close()
    dist.barrier()  # a rank that ends while gloo still works for it can abort (pytorch/pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    # under the name that the config functions' classes have, not as __main__
    from recipes import grpo

    grpo.main()
