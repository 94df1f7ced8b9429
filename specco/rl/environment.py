"""What the policy is trained on: prompts, turns of a conversation, rewards; and how rollouts of it are collected.

An environment is a pure function of a prompt's id: any rank, any call and any resumed run sees the same prompts and
gives the same rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specco.rl.engine import Completion, SamplingConfig, derive_seed


@dataclass
class Trajectory:
    """One conversation: a prompt, what the policy wrote, and what the environment answered in between.

    Args:
        group_id: id of the prompt; trajectories of one prompt are compared with each other.
        sample_id: id of this trajectory, unique in a step and independent of ranks and batches.
        token_ids: all tokens so far, the prompt first.
        num_prompt_tokens: length of the prompt.
        response_mask: True where the policy wrote the token; as long as ``token_ids``, like the next two.
        inference_logprobs: of the policy's tokens under the sampling distribution; 0 elsewhere.
        weight_versions: version of the policy that wrote the token; -1 elsewhere.
        finish_reason: of the policy's last turn, "stop" or "length"; empty before the first.
        reward: set once it is complete.
    """

    group_id: int
    sample_id: int
    token_ids: list[int]
    num_prompt_tokens: int = 0
    response_mask: list[bool] = field(default_factory=list)
    inference_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    reward: float = 0.0

    @classmethod
    def start(cls, group_id: int, sample_id: int, prompt: Sequence[int]) -> Trajectory:
        """Return a trajectory that holds its prompt alone."""
        trajectory = cls(group_id, sample_id, [], num_prompt_tokens=len(prompt))
        trajectory.add_tokens(prompt)
        return trajectory

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write."""
        self.token_ids += token_ids
        self.response_mask += [False] * len(token_ids)
        self.inference_logprobs += [0.0] * len(token_ids)
        self.weight_versions += [-1] * len(token_ids)

    def add_completion(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        self.token_ids += completion.token_ids
        self.response_mask += [True] * len(completion.token_ids)
        self.inference_logprobs += completion.logprobs
        self.weight_versions += completion.weight_versions
        self.finish_reason = completion.finish_reason

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]


class Environment(Protocol):
    """A task with a verifiable reward."""

    def make_prompt(self, group_id: int) -> list[int]:
        """Return the token ids of prompt ``group_id``; the same at every call, on every rank."""
        ...

    def answer_turn(self, trajectory: Trajectory) -> list[int] | None:
        """Return the tokens that follow the policy's last turn, or None when the conversation is over."""
        ...

    def score(self, trajectory: Trajectory) -> float:
        """Return the reward of a complete trajectory."""
        ...


class Generator(Protocol):
    """The part of ``RolloutEngine`` that a rollout needs."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[list[Completion]]: ...


def collect_rollouts(
    engine: Generator, environment: Environment, group_ids: Sequence[int], sampling: SamplingConfig
) -> list[Trajectory]:
    """Roll out ``sampling.n`` trajectories of each prompt until the environment ends them.

    Args:
        engine: serves the policy.
        environment: the task; it bounds the number of turns.
        group_ids: prompts of this rank.
        sampling: of every turn; ``seed`` is that of the step, turns get seeds of their own.

    Returns:
        Complete trajectories with rewards, prompt by prompt. Trajectory j of prompt g has the id ``g * n + j``.
    """
    prompts = [environment.make_prompt(group_id) for group_id in group_ids]
    rollouts: list[Trajectory] = []
    running: list[Trajectory] = []
    for group_id, prompt, completions in zip(group_ids, prompts, engine.generate(prompts, sampling), strict=True):
        for index, completion in enumerate(completions):
            rollouts.append(Trajectory.start(group_id, group_id * sampling.n + index, prompt))
            rollouts[-1].add_completion(completion)
    turn, running = 1, _answer(environment, rollouts)
    while running:
        seeded = replace(sampling, n=1, seed=derive_seed(sampling.seed, -turn))
        completions = engine.generate([trajectory.token_ids for trajectory in running], seeded)
        for trajectory, (completion,) in zip(running, completions, strict=True):
            trajectory.add_completion(completion)
        turn, running = turn + 1, _answer(environment, running)
    for trajectory in rollouts:
        trajectory.reward = environment.score(trajectory)
    return rollouts


def _answer(environment: Environment, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Let the environment answer each trajectory; return those that go on."""
    running = []
    for trajectory in trajectories:
        answer = environment.answer_turn(trajectory)
        if answer is not None:
            trajectory.add_tokens(answer)
            running.append(trajectory)
    return running
