"""Tiny drafts of every family, and documents with everything that a policy would give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specco.drafts.base import Draft, DraftConfig, DraftRows
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.registry import build_draft
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens, pack_documents

VOCAB_SIZE = 11
HIDDEN_SIZE = 12


SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": VOCAB_SIZE,
    "target_layer_ids": (1, 3, 6),
    "rope_theta": 100.0,
}
BLOCKS: dict[str, Any] = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 10, "num_anchors": 3}


def make_config(**changes: Any) -> Eagle3Config:
    return Eagle3Config(**(SHAPE | {"loss_decay": 0.5} | changes))


def make_dflash_config(**changes: Any) -> DFlashConfig:
    return DFlashConfig(**(SHAPE | BLOCKS | changes))


def make_dspark_config(**changes: Any) -> DSparkConfig:
    return DSparkConfig(**(SHAPE | BLOCKS | {"markov_rank": 5} | changes))


def make_draft(config: DraftConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a draft with random weights, norms included, so that no weight can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    draft = build_draft(config).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    return draft


@dataclass(frozen=True)
class Document:
    """Tokens of one document and what the policy computes for them: taps, embeddings, logits."""

    input_ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    embeddings: Tensor
    policy_logits: Tensor
    sample_id: int


def make_embedding_table(seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)


def make_policy_head() -> Tensor:
    """Return ``[V, D]``, a head for drafts that use the policy's."""
    return make_embedding_table(seed=8) / HIDDEN_SIZE**0.5


def make_document(length: int, num_prompt_tokens: int, seed: int, num_taps: int = 3) -> Document:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
    return Document(
        input_ids=input_ids,
        loss_mask=torch.arange(length) >= num_prompt_tokens,
        taps=torch.randn(length, num_taps * HIDDEN_SIZE, generator=generator, dtype=torch.float64),
        embeddings=make_embedding_table()[input_ids],
        policy_logits=2 * torch.randn(length, VOCAB_SIZE, generator=generator, dtype=torch.float64),
        sample_id=seed,
    )


def pack(documents: Sequence[Document]) -> PackedTokens:
    (tokens,) = pack_documents(
        [d.input_ids for d in documents],
        [d.loss_mask for d in documents],
        max_tokens=sum(map(_length, documents)),
        sample_ids=[d.sample_id for d in documents],
    )
    return tokens


def _length(document: Document) -> int:
    return document.input_ids.numel()


def run_draft(draft: Draft, documents: Sequence[Document]) -> DraftRows:
    """Run all documents packed into one microbatch, at one rank."""
    tokens = pack(documents)
    dtype = next(draft.parameters()).dtype
    taps = torch.cat([d.taps for d in documents]).to(dtype)
    embeddings = torch.cat([d.embeddings for d in documents]).to(dtype)
    return draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens), None, embed_mask(draft, dtype))


def embed_mask(draft: Draft, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """Return the embedding of the draft's mask token, if it has one."""
    return None if draft.mask_token_id is None else make_embedding_table()[draft.mask_token_id].to(dtype)


def compute_loss_sums(draft: Draft, documents: Sequence[Document]) -> Tensor:
    """Return the loss sums ``[num_slots]`` of one microbatch."""
    return sum_losses(draft, documents, run_draft(draft, documents))


def sum_losses(draft: Draft, documents: Sequence[Document], rows: DraftRows) -> Tensor:
    """Return the loss sums ``[num_slots]`` of some of a microbatch's rows."""
    teacher = torch.cat([d.policy_logits for d in documents]).to(rows.hidden.dtype)[rows.teacher_rows]
    loss_sums, _ = draft.compute_loss(rows, teacher, make_policy_head().to(rows.hidden.dtype))
    return loss_sums


def compute_gradients(draft: Draft, microbatches: Sequence[Sequence[Document]]) -> dict[str, Tensor]:
    """Return the gradients of the loss summed over slots and microbatches, by parameter."""
    draft.zero_grad(set_to_none=True)
    for documents in microbatches:
        compute_loss_sums(draft, documents).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def change_config(directory: Path, **changes: Any) -> None:
    """Rewrite keys of config.json; None drops one."""
    path = directory / "config.json"
    keys = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in keys.items() if value is not None}))


def change_weights(directory: Path, change_fn: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite model.safetensors by a function of its dict."""
    weights = load_file(directory / "model.safetensors")
    change_fn(weights)
    save_file(weights, directory / "model.safetensors")
