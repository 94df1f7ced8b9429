"""torchtitan's Trainer, extended to end with an export: one that trains a policy, one that trains a draft on a policy.

Both take torchtitan's configs, fields and command line, so that ``-m torchtitan.train`` runs them on a GPU; on a CPU
machine ``-m specco.titan.train`` does the same after applying CPU support.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.export import save_draft
from specco.drafts.vocab import select_target_ids
from specco.metrics import sum_acceptance_length_estimates
from specco.packing import PackedTokens
from specco.titan.export import load_policy, save_policy
from specco.titan.head import HeadPlan, compute_head_loss
from specco.titan.parallelize import check_trainer_parallelism
from specco.titan.policy import Policy


class PolicyTrainer(Trainer):
    """torchtitan's Trainer for a ``Policy``; the trained policy ends in ``dump_folder/policy``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            check_trainer_parallelism(self.parallelism)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.tokenizer.eos_id is None:
            raise ValueError(f"the tokenizer in {config.hf_assets_path} has no end token; an exported policy needs one")
        self.eos_token_id = self.tokenizer.eos_id

    def train(self) -> None:
        super().train()
        path = Path(self.config.dump_folder) / "policy"
        policy = cast(Policy, self.model_parts[0])
        save_policy(policy, path, tokenizer_path=self.config.hf_assets_path, eos_token_id=self.eos_token_id)
        logger.info(f"Policy exported to {path}")


class DraftTrainer(Trainer):
    """Trains the draft of a frozen policy by the learner's own head and loss; the draft ends in ``dump_folder/draft``.

    The data loader yields ``packed_tokens`` (``PackedTokens``) among the inputs; its labels count the target tokens.
    For a reduced draft vocabulary it has ``count_response_tokens(vocab_size)``, how often the policy wrote each token.
    The policy's weights come from ``hf_assets_path``, whose directory also holds its tokenizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        chunk_rows: int = 1024
        """Rows of one lm_head product."""
        draft_vocab_size: int = 0
        """Tokens that an EAGLE-3 draft predicts, those that the policy writes most often; 0: as its config says."""

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            check_trainer_parallelism(self.parallelism)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        assert config.model_spec is not None, "model_spec is set by the config function"
        model_config = cast(Policy.Config, config.model_spec.model)
        if model_config.draft is None:
            raise ValueError("model_spec has no draft; DraftTrainer trains one")
        if config.draft_vocab_size:
            if not isinstance(model_config.draft, Eagle3Config):
                raise ValueError(
                    f"draft_vocab_size is {config.draft_vocab_size}; a {model_config.draft.method} draft predicts "
                    "every token, only an eagle3 draft has a reduced vocabulary"
                )
            model_config.draft = replace(model_config.draft, draft_vocab_size=config.draft_vocab_size)
        super().__init__(config)
        self.policy = cast(Policy, self.model_parts[0])
        assert self.policy.draft is not None
        self.draft = self.policy.draft
        load_policy(self.policy, config.hf_assets_path)
        if self.draft.d2t is not None:
            counts = cast(Any, self.dataloader).count_response_tokens(self.draft.config.vocab_size)
            self.draft.set_vocabulary(select_target_ids(counts, self.draft.d2t.numel()))

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Any], Tensor]]) -> None:
        """Take one optimizer step; the loss is the weighted mean over the rows of all ranks and microbatches."""
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        draw_key = (self.config.debug.seed or 0, self.step)
        for inputs, _ in batches:
            inputs["packed_tokens"] = replace(inputs["packed_tokens"], draw_key=draw_key)
        weight_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, _ in batches:
            weight_sum += self.draft.sum_loss_weights(inputs["packed_tokens"]).sum().to(self.device)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(weight_sum, group=self.parallel_dims.get_mesh("batch").get_group())
        self.draft_scale = 1.0 / max(float(weight_sum), 1.0)
        super().train_step(iter(batches))
        if self.metrics_processor.should_log(self.step):
            total, count = self.acceptance_estimate
            logger.info(
                f"step: {self.step}  acceptance length, estimated on one microbatch: {float(total / count):.3f}"
            )

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Any] | list[dict[str, Any]],
        labels: Tensor | list[Tensor],
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """Run policy, draft and head on one microbatch; return its share of the step's loss."""
        assert isinstance(input_dict, dict), "DraftTrainer does not run pipeline parallelism"
        tokens: PackedTokens = input_dict["packed_tokens"]
        self.ntokens_seen += tokens.num_tokens
        hidden, rows = self.policy(input_dict["input"], input_dict["positions"], packed_tokens=tokens)
        plan = HeadPlan(
            tokens=tokens, policy_loss_fn=None, draft_scale=self.draft_scale, chunk_rows=self.config.chunk_rows
        )
        loss, stats = compute_head_loss(self.policy.lm_head, hidden, plan, self.draft, rows)
        loss.backward()
        tv = stats.draft_rows["tv"]
        self.acceptance_estimate = sum_acceptance_length_estimates(
            tv, 1 - tv, rows.slot_ids, rows.branch_ids, self.draft.num_slots
        )
        return loss.detach()

    def train(self) -> None:
        super().train()
        path = Path(self.config.dump_folder) / "draft"
        save_draft(self.draft, path)
        logger.info(f"Draft exported to {path}")
