"""Packed token sequences: several documents laid end to end in one row of tokens.

Everything here is *global*: under context parallelism each rank holds the same ids, masks and offsets (a few bytes a
token); only tensors of hidden width are sharded. All shifts are made here, per document, before any row is picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTokens:
    """One packed microbatch of ``n`` documents and ``S`` tokens, without padding.

    Args:
        input_ids: int64 ``[S]``, token ids.
        loss_mask: bool ``[S]``, True where the policy wrote the token (the token is trained).
        cu_seqlens: int32 ``[n + 1]``, global offsets of the documents, on the CPU.
        sample_ids: int64 ``[n]``, an id that stays with a document through any packing, on the CPU.
        row_values: further ``[S]`` tensors that travel with the tokens, by name.
        draw_key: (seed, step). What is drawn for a document in training depends on this and on its sample id alone.
        is_counted: whether the documents are part of the batch; False of what a rank that has nothing to train runs,
            which enters no router's statistics.

    Raises:
        ValueError: lengths that do not add up.
    """

    input_ids: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    sample_ids: Tensor
    row_values: dict[str, Tensor] = field(default_factory=dict)
    draw_key: tuple[int, int] = (0, 0)
    is_counted: bool = True

    def __post_init__(self) -> None:
        num_tokens = self.input_ids.numel()
        last = int(self.cu_seqlens[-1])
        if last != num_tokens:
            raise ValueError(f"cu_seqlens ends at {last}, but input_ids has {num_tokens} tokens; the two must be equal")
        for name, value in {"loss_mask": self.loss_mask, **self.row_values}.items():
            if value.shape[0] != num_tokens:
                raise ValueError(f"{name} has {value.shape[0]} rows, but input_ids has {num_tokens} tokens")
        if self.sample_ids.numel() != self.num_documents:
            raise ValueError(f"sample_ids has {self.sample_ids.numel()} entries for {self.num_documents} documents")

    def to(self, device: torch.device | str) -> PackedTokens:
        """Return the microbatch with all that is as long as its tokens on a device; the rest stays on the CPU."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            loss_mask=self.loss_mask.to(device),
            row_values={name: value.to(device) for name, value in self.row_values.items()},
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def document_ids(self) -> Tensor:
        """int64 ``[S]``, the document of each row."""
        lengths = torch.diff(self.cu_seqlens.long())
        return torch.repeat_interleave(torch.arange(self.num_documents), lengths).to(self.input_ids.device)

    @property
    def position_ids(self) -> Tensor:
        """int64 ``[S]``, the position of each row in its document, from 0."""
        starts = self.cu_seqlens.long().to(self.input_ids.device)[self.document_ids]
        return torch.arange(self.num_tokens, device=self.input_ids.device) - starts

    def shift(self, values: Tensor, distance: int, fill: int | float | bool) -> Tensor:
        """Return ``out[i] = values[i + distance]`` where both rows are of one document, ``fill`` elsewhere.

        Args:
            values: ``[S, ...]``, global.
            distance: rows to look ahead, >= 0.
            fill: value of rows whose source lies past the end of their document.
        """
        if distance == 0:
            return values
        out = torch.full_like(values, fill)
        if distance < self.num_tokens:
            document_ids = self.document_ids
            is_same = document_ids[:-distance] == document_ids[distance:]
            out[:-distance][is_same] = values[distance:][is_same]
        return out

    @property
    def is_target_row(self) -> Tensor:
        """bool ``[S]``, True where the row predicts a trained token of its own document."""
        return self.shift(self.loss_mask, 1, False)


def pack_documents(
    documents: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    max_tokens: int,
    sample_ids: Sequence[int] | None = None,
    row_values: dict[str, Sequence[Tensor]] | None = None,
) -> list[PackedTokens]:
    """Pack documents, in the order given, into microbatches of at most ``max_tokens`` tokens each.

    Args:
        documents: int64 ``[length]`` each.
        loss_masks: bool ``[length]`` each.
        max_tokens: upper bound of a microbatch, in tokens.
        sample_ids: one id a document; default their positions.
        row_values: further per-token tensors, by name, one a document.

    Returns:
        Microbatches; an empty list for no documents.

    Raises:
        ValueError: an empty document, or one longer than ``max_tokens``.
    """
    sample_ids = list(range(len(documents))) if sample_ids is None else list(sample_ids)
    row_values = row_values or {}
    bins: list[list[int]] = []
    room = 0
    for index, document in enumerate(documents):
        length = document.numel()
        if not 0 < length <= max_tokens:
            raise ValueError(f"document {index} has {length} tokens; allowed are 1 to max_tokens={max_tokens}")
        if length > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(index)
        room -= length
    packed = []
    for indices in bins:
        lengths = torch.tensor([0] + [documents[i].numel() for i in indices])
        packed.append(
            PackedTokens(
                input_ids=torch.cat([documents[i] for i in indices]),
                loss_mask=torch.cat([loss_masks[i] for i in indices]),
                cu_seqlens=lengths.cumsum(0).to(torch.int32),
                sample_ids=torch.tensor([sample_ids[i] for i in indices]),
                row_values={name: torch.cat([rows[i] for i in indices]) for name, rows in row_values.items()},
            )
        )
    return packed
