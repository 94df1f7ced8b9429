"""The two preparations of the demo, as torchtitan configs: a policy warmed up on "carry", then a draft for it.

    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_policy
    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_eagle3_draft

The policy ends in ``runs/tiny_policy/policy``, the draft in ``runs/tiny_eagle3_draft/draft``; ``tiny_dflash_draft`` and
``tiny_dspark_draft`` are the other families' drafts for it. ``smoke_policy`` and ``smoke_eagle3_draft`` do the same in
seconds, with a policy that has learnt nothing. Any field can be set on the command line as in torchtitan, for example
``--training.steps 100``, or ``--draft_vocab_size 16`` for an EAGLE-3 draft of the 16 tokens that the policy writes most
often.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from recipes.carry import EOS_ID, MAX_RESPONSE_TOKENS, VOCAB_SIZE, CarryEnvironment, CarrySamples, save_tokenizer
from specco.drafts.base import DraftConfig
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.packing import PackedTokens, pack_documents
from specco.rl.engine import EngineConfig, RolloutEngine, SamplingConfig
from specco.titan.registry import FLAVORS, model_registry
from specco.titan.trainers import DraftTrainer, PolicyTrainer

MAX_SEQ_LEN = 128
"""Longest document, prompt and response, in tokens."""

DRAFT_PROMPT_SEED = 1
"""Seed of the prompts that the draft's data is sampled from; the warm start's is 0."""

Sample = tuple[list[int], list[int]]
"""(prompt ids, response ids with the end token)."""


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

    Sample i of a step is the same at any number of ranks: ranks take turns by blocks of ``local_batch_size``.
    """

    def __init__(self, *, dp_rank: int, dp_world_size: int, local_batch_size: int) -> None:
        self.dp_rank, self.dp_world_size, self.local_batch_size = dp_rank, dp_world_size, local_batch_size
        self.num_batches = 0

    def draw_sample(self, index: int) -> Sample:
        """Return the sample at ``index`` of the endless list of training samples."""
        raise NotImplementedError(f"{type(self).__name__} has no draw_sample")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield (inputs, labels); labels are the next tokens where they are trained, ``IGNORE_INDEX`` elsewhere."""
        while True:
            start = (self.num_batches * self.dp_world_size + self.dp_rank) * self.local_batch_size
            self.num_batches += 1
            indices = range(start, start + self.local_batch_size)
            tokens = pack_samples([self.draw_sample(index) for index in indices], sample_ids=indices)
            labels = tokens.shift(tokens.input_ids, 1, IGNORE_INDEX).masked_fill(~tokens.is_target_row, IGNORE_INDEX)
            yield self.build_inputs(tokens), labels[None]

    def build_inputs(self, tokens: PackedTokens) -> dict[str, Any]:
        """Return what the trainer hands to the model."""
        return {"input": tokens.input_ids[None], "positions": tokens.position_ids[None]}

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


def pack_samples(samples: Sequence[Sample], *, sample_ids: Sequence[int]) -> PackedTokens:
    """Pack samples into one microbatch that trains on their responses."""
    documents = [torch.tensor(prompt + response) for prompt, response in samples]
    masks = [torch.arange(len(prompt) + len(response)) >= len(prompt) for prompt, response in samples]
    num_tokens = sum(document.numel() for document in documents)
    (packed,) = pack_documents(documents, masks, max_tokens=num_tokens, sample_ids=sample_ids)
    return packed


class CarryLoader(PackedLoader):
    """The warm-start data."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        super().__init__(dp_rank=dp_rank, dp_world_size=dp_world_size, local_batch_size=local_batch_size)
        self.samples = CarrySamples(seed=config.seed)

    def draw_sample(self, index: int) -> Sample:
        return self.samples[index]


class RolloutLoader(PackedLoader):
    """What the policy itself writes at temperature 1, sampled with vLLM when the loader is built; shuffled epochs."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0
        num_samples: int = 1500
        policy_path: str = ""
        """Directory of the policy that writes the samples."""

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        super().__init__(dp_rank=dp_rank, dp_world_size=dp_world_size, local_batch_size=local_batch_size)
        self.config = config
        self.samples = sample_policy(config.policy_path, config.num_samples, seed=config.seed)

    def draw_sample(self, index: int) -> Sample:
        epoch, position = divmod(index, len(self.samples))
        return self.samples[self.shuffle_epoch(epoch)[position]]

    def count_response_tokens(self, vocab_size: int) -> Tensor:
        """Return int64 ``[vocab_size]``: how often each token is in the responses."""
        responses = [token_id for _, response in self.samples for token_id in response]
        return torch.bincount(torch.tensor(responses), minlength=vocab_size)

    @functools.lru_cache(maxsize=2)  # noqa: B019  the loader lives as long as the process
    def shuffle_epoch(self, epoch: int) -> list[int]:
        """Return the order of the samples in an epoch."""
        order = list(range(len(self.samples)))
        random.Random(f"epoch {self.config.seed} {epoch}").shuffle(order)
        return order

    def build_inputs(self, tokens: PackedTokens) -> dict[str, Any]:
        return super().build_inputs(tokens) | {"packed_tokens": tokens}


def sample_policy(policy_path: str, num_samples: int, *, seed: int) -> list[Sample]:
    """Let a policy answer ``num_samples`` prompts at temperature 1, each rank its share.

    Collective over the default group: every rank must call.

    Returns:
        All samples, in the order of their prompts, on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    environment = CarryEnvironment(seed=DRAFT_PROMPT_SEED)
    prompts = [environment.make_prompt(index) for index in range(rank, num_samples, world_size)]
    engine = RolloutEngine(EngineConfig(policy_path=policy_path, max_model_len=MAX_SEQ_LEN, max_num_seqs=256))
    sampling = SamplingConfig(max_tokens=MAX_RESPONSE_TOKENS, stop_token_ids=(EOS_ID,), seed=seed * world_size + rank)
    own = [(prompt, out[0].token_ids) for prompt, out in zip(prompts, engine.generate(prompts, sampling), strict=True)]
    engine.close()
    shares: list[list[Sample]] = [[] for _ in range(world_size)]
    dist.all_gather_object(shares, own)
    return [shares[index % world_size][index // world_size] for index in range(num_samples)]


def make_adamw(lr: float, pattern: str = ".*") -> OptimizersContainer.Config:
    """AdamW on the parameters whose names match; without weight decay."""
    kwargs = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.0}
    group = ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)
    return OptimizersContainer.Config(param_groups=[group])


def make_training(steps: int, batch_size: int) -> TrainingConfig:
    """A step of ``batch_size`` documents: at two ranks in one go, at one rank in two."""
    return TrainingConfig(
        local_batch_size=batch_size // 2,
        global_batch_size=batch_size,
        seq_len=MAX_SEQ_LEN,
        steps=steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )


def make_policy_config(name: str, flavor: str, *, steps: int, batch_size: int) -> PolicyTrainer.Config:
    """Config of a policy's warm start, run in ``runs/NAME``."""
    return PolicyTrainer.Config(
        model_spec=model_registry(flavor),
        dump_folder=f"runs/{name}",
        hf_assets_path=f"runs/{name}/tokenizer",
        tokenizer=CarryTokenizer.Config(),
        dataloader=CarryLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        optimizer=make_adamw(2e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=steps // 25, decay_ratio=0.2, min_lr_factor=0.1),
        training=make_training(steps, batch_size),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward="never"),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=25),
        debug=DebugConfig(seed=0),
    )


def make_draft_config(
    name: str, flavor: str, draft: DraftConfig, *, policy_path: str, steps: int, batch_size: int, num_samples: int
) -> DraftTrainer.Config:
    """Config of a draft's pre-training on a frozen policy, run in ``runs/NAME``."""
    return DraftTrainer.Config(
        model_spec=model_registry(flavor, draft=draft, is_frozen=True),
        dump_folder=f"runs/{name}",
        hf_assets_path=policy_path,
        dataloader=RolloutLoader.Config(policy_path=policy_path, num_samples=num_samples),
        # torchtitan builds some loss; the draft's own is the chunked head's
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        optimizer=make_adamw(4e-3, pattern=r"^draft\."),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=steps // 15, decay_ratio=0.5, min_lr_factor=0.1),
        training=make_training(steps, batch_size),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward="never"),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=25),
        debug=DebugConfig(seed=0),
    )


def make_shape(flavor: str, target_layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """Fields of a draft with layers like the policy's. An EAGLE-3 draft has one layer and, by default, three passes."""
    sizes = FLAVORS[flavor]
    return {
        "hidden_size": sizes["dim"],
        "intermediate_size": sizes["hidden_dim"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": VOCAB_SIZE,
        "target_layer_ids": target_layer_ids,
    }


BLOCKS: dict[str, Any] = {"num_hidden_layers": 2, "mask_token_id": VOCAB_SIZE - 1, "num_anchors": 16}
"""Fields of the block drafts: two layers; the mask is a token that no sample has; a third of a response's rows."""


def tiny_policy() -> PolicyTrainer.Config:
    """The demo's policy: 1.3 million parameters, 500 steps of 64 samples; arithmetic appears near step 300."""
    return make_policy_config("tiny_policy", "tiny", steps=500, batch_size=64)


def make_tiny_draft_config(name: str, draft: DraftConfig) -> DraftTrainer.Config:
    """Return the config of a draft for the demo's policy, the same training for each family."""
    return make_draft_config(
        name,
        "tiny",
        draft,
        policy_path="runs/tiny_policy/policy",
        steps=150,
        batch_size=48,
        num_samples=1500,
    )


def tiny_eagle3_draft() -> DraftTrainer.Config:
    """The demo's draft: 150 steps of 48 of the warm policy's own samples."""
    return make_tiny_draft_config("tiny_eagle3_draft", Eagle3Config(**make_shape("tiny", (1, 3, 6))))


def tiny_dflash_draft() -> DraftTrainer.Config:
    """A DFlash draft for the demo's policy, four tokens a block."""
    draft = DFlashConfig(**make_shape("tiny", (1, 3, 6)), **BLOCKS, block_size=5)
    return make_tiny_draft_config("tiny_dflash_draft", draft)


def tiny_dspark_draft() -> DraftTrainer.Config:
    """A DSpark draft for the demo's policy, four tokens a block."""
    draft = DSparkConfig(**make_shape("tiny", (1, 3, 6)), **BLOCKS, block_size=4, markov_rank=16)
    return make_tiny_draft_config("tiny_dspark_draft", draft)


def smoke_policy() -> PolicyTrainer.Config:
    """A policy that is good for nothing but tests: 4 layers, 25 steps."""
    return make_policy_config("smoke_policy", "smoke", steps=25, batch_size=16)


def smoke_eagle3_draft() -> DraftTrainer.Config:
    """A draft for the ``smoke_policy``."""
    return make_draft_config(
        "smoke_eagle3_draft",
        "smoke",
        Eagle3Config(**make_shape("smoke", (0, 1, 2))),
        policy_path="runs/smoke_policy/policy",
        steps=15,
        batch_size=16,
        num_samples=64,
    )
