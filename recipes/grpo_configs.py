"""The configs of ``recipes.grpo``, by name: Python functions without arguments."""

from __future__ import annotations

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from recipes.grpo import Grpo
from specco.titan.learner import Learner, policy_and_draft_groups

ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.0}


def tiny_eagle3() -> Grpo.Config:
    """The demo: 60 steps of 16 prompts x 8 samples, policy and EAGLE-3 draft co-trained."""
    return Grpo.Config(
        name="tiny_eagle3",
        validate_every=20,
        learner=Learner.Config(
            policy_path="runs/tiny_policy/policy",
            draft_path="runs/tiny_eagle3_draft/draft",
            optimizer=OptimizersContainer.Config(param_groups=policy_and_draft_groups(1.2e-4, 4e-3, **ADAM)),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, min_lr_factor=0.2),
            training=TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            debug=DebugConfig(seed=0),
        ),
    )


def tiny_eagle3_deep() -> Grpo.Config:
    """The demo's trained policy, made deep by ``recipes.deepen``, at 16 sequences a rank (2 ranks): rollouts dominate.

    For phases of a step, not for curves: 10 steps at the rates that the demo ends with, and a validation before and
    after them alone.
    """
    config = tiny_eagle3()
    config.name = "tiny_eagle3_deep"
    config.learner.policy_path = "runs/tiny_deep_policy/policy"
    config.learner.draft_path = "runs/tiny_eagle3_cotrain_seed0/draft"
    config.learner.optimizer.param_groups = policy_and_draft_groups(2.4e-5, 8e-4, **ADAM)
    config.steps, config.prompts_per_step, config.validate_every = 10, 4, 10
    config.max_num_seqs, config.checkpoint_every = 16, 0
    return config


def tiny_dflash() -> Grpo.Config:
    """The demo with a DFlash draft."""
    config = tiny_eagle3()
    config.name, config.num_speculative_tokens = "tiny_dflash", 4
    config.learner.draft_path = "runs/tiny_dflash_draft/draft"
    return config


def tiny_dspark() -> Grpo.Config:
    """The demo with a DSpark draft."""
    config = tiny_eagle3()
    config.name, config.num_speculative_tokens = "tiny_dspark", 4
    config.learner.draft_path = "runs/tiny_dspark_draft/draft"
    return config


def smoke() -> Grpo.Config:
    """Four layers and three steps: what a test runs end to end."""
    config = tiny_eagle3()
    config.name = "smoke"
    config.learner.policy_path = "runs/smoke_policy/policy"
    config.learner.draft_path = "runs/smoke_eagle3_draft/draft"
    config.steps, config.prompts_per_step, config.validate_every = 3, 4, 3
    config.validation_prompts, config.validation_samples = 8, 2
    return config


CONFIGS = {
    "tiny_eagle3": tiny_eagle3,
    "tiny_eagle3_deep": tiny_eagle3_deep,
    "tiny_dflash": tiny_dflash,
    "tiny_dspark": tiny_dspark,
    "smoke": smoke,
}
