"""DSpark on vLLM's older model runner, the only one of the CPU build, which refuses it by a check of the config.

A block's first query is the token just sampled and already predicts; its tokens are drawn from left to right, each
under the Markov bias of the one before.

Source: vLLM 0.32, ``v1/worker/gpu/spec_decode/dspark/speculator.py`` (the newer runner's), written on the older
runner's ``DFlashProposer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token


class BlockProposer(DFlashProposer):
    """vLLM's proposer of DFlash, and for DSpark one whose every query predicts the token after it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        speculative_config = vllm_config.speculative_config
        assert speculative_config is not None
        method = speculative_config.method
        self.is_dspark = method == "dspark"
        self._anchor_ids = torch.empty(0)
        speculative_config.method = "dflash"  # the base class reads its layout off the name
        try:
            super().__init__(vllm_config, device, runner)
        finally:
            speculative_config.method = method
        if self.is_dspark:
            self._check_dspark(vllm_config)

    def _check_dspark(self, vllm_config: VllmConfig) -> None:
        hf_config = self.draft_model_config.hf_config
        if not getattr(hf_config, "sample_from_anchor", True):
            raise ValueError("sample_from_anchor is False; a DSpark draft is served with True only")
        if hf_config.draft_vocab_size != vllm_config.model_config.get_vocab_size():
            raise ValueError(
                f"draft_vocab_size is {hf_config.draft_vocab_size}; a DSpark draft is served with the policy's whole "
                f"vocabulary of {vllm_config.model_config.get_vocab_size()} only"
            )

    def set_inputs_first_pass(self, *args: Any, next_token_ids: Tensor, **kwargs: Any) -> tuple[int, Tensor, Any]:
        """Lay out the queries of a block: DSpark has one fewer than DFlash, and each of them is sampled from."""
        if not self.is_dspark:
            return super().set_inputs_first_pass(*args, next_token_ids=next_token_ids, **kwargs)
        self._anchor_ids = next_token_ids
        num_speculative_tokens = self.num_speculative_tokens
        self.num_speculative_tokens = num_speculative_tokens - 1
        try:
            num_queries, _, metadata = super().set_inputs_first_pass(*args, next_token_ids=next_token_ids, **kwargs)
        finally:
            self.num_speculative_tokens = num_speculative_tokens
        return num_queries, torch.arange(num_queries, dtype=torch.int32, device=self.device), metadata

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Return (token ids ``[batch * K]``, probabilities ``[batch * K, V]`` or None for greedy drafts)."""
        if not self.is_dspark:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        model: Any = self.model
        logits = model.compute_draft_logits(hidden_states).unflatten(0, (-1, self.num_speculative_tokens))
        is_greedy = not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy
        previous_ids, drafted, probs = self._anchor_ids.long(), [], []
        for slot_logits in logits.unbind(1):
            biased = slot_logits + model.markov_bias(model.markov_embed(previous_ids))
            if is_greedy:
                previous_ids = biased.argmax(dim=-1)
            else:
                previous_ids, slot_probs = compute_probs_and_sample_next_token(
                    biased, sampling_metadata, self.use_fp64_gumbel
                )
                probs.append(slot_probs)
            drafted.append(previous_ids)
        return torch.stack(drafted, dim=1).flatten(), None if is_greedy else torch.stack(probs, dim=1).flatten(0, 1)
