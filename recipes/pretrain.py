"""The two preparations of the demo, as torchtitan configs: a policy warmed up on "carry", then a draft for it.

    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_policy
    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_eagle3_draft

The policy ends in ``runs/tiny_policy/policy``, the draft in ``runs/tiny_eagle3_draft/draft``. Any field can be set on
the command line as in torchtitan, for example ``--training.steps 100``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from recipes.carry import CarrySamples, save_tokenizer
from specco.packing import PackedTokens, pack_documents
from specco.titan.registry import model_registry
from specco.titan.trainers import PolicyTrainer

MAX_SEQ_LEN = 256
"""Longest document of the tiny policies, prompt and response, in tokens."""


class CarryTokenizer(HuggingFaceTokenizer):
    """The tokenizer of "carry", written to ``tokenizer_path`` when it is built."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        save_tokenizer(Path(tokenizer_path))
        super().__init__(config, tokenizer_path=tokenizer_path)


class PackedLoader(BaseDataLoader):
    """Endless batches of one packed row, without padding, of ``local_batch_size`` documents each.

    Documents go round the data-parallel ranks in blocks, so that a step sees the same documents at any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> None:
        self.samples = self.build_samples(config)
        self.dp_rank, self.dp_world_size, self.local_batch_size = dp_rank, dp_world_size, local_batch_size
        self.num_batches = 0

    def build_samples(self, config: Config) -> CarrySamples:
        return CarrySamples(seed=config.seed)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        while True:
            start = (self.num_batches * self.dp_world_size + self.dp_rank) * self.local_batch_size
            self.num_batches += 1
            tokens = pack_samples([self.samples[start + i] for i in range(self.local_batch_size)], first_id=start)
            labels = tokens.shift(tokens.input_ids, 1, IGNORE_INDEX).masked_fill(~tokens.is_target_row, IGNORE_INDEX)
            yield {"input": tokens.input_ids[None], "positions": tokens.position_ids[None]}, labels[None]

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


def pack_samples(samples: list[tuple[list[int], list[int]]], *, first_id: int) -> PackedTokens:
    """Pack (prompt ids, response ids) pairs into one microbatch that trains on the responses."""
    documents = [torch.tensor(prompt + response) for prompt, response in samples]
    masks = [torch.tensor([False] * len(prompt) + [True] * len(response)) for prompt, response in samples]
    sample_ids = range(first_id, first_id + len(samples))
    (packed,) = pack_documents(documents, masks, max_tokens=sum(map(len, documents)), sample_ids=sample_ids)
    return packed


def tiny_policy() -> PolicyTrainer.Config:
    """The demo's policy: 1.3 million parameters, 500 steps of 64 samples."""
    run = "runs/tiny_policy"
    return PolicyTrainer.Config(
        model_spec=model_registry("tiny"),
        dump_folder=run,
        hf_assets_path=f"{run}/tokenizer",
        tokenizer=CarryTokenizer.Config(),
        dataloader=PackedLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=64),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=".*",
                    optimizer_name="AdamW",
                    optimizer_kwargs={"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.0},
                )
            ]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.2, min_lr_factor=0.1),
        training=TrainingConfig(
            local_batch_size=32,
            global_batch_size=64,
            seq_len=MAX_SEQ_LEN,
            steps=500,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=25),
        debug=DebugConfig(seed=0),
    )
