"""Rollouts as one padded batch of tensors: gathered over ranks, cut into shares, packed for the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from specco.packing import PackedTokens, pack_documents
from specco.rl.environment import Trajectory

PADDING = {
    "input_ids": 0,
    "prompt_mask": False,
    "response_mask": False,
    "inference_logprobs": 0.0,
    "weight_versions": -1,
}


class RolloutBatch:
    """``N`` trajectories of at most ``L`` tokens, on the CPU.

    ``data`` is a ``TensorDict`` of batch size ``[N]``:

        input_ids           int64 [N, L]    prompt, responses and the environment's turns; 0 = padding
        prompt_mask         bool [N, L]     True in the prompt
        response_mask       bool [N, L]     True where the policy wrote the token: these are trained
        inference_logprobs  float32 [N, L]  of the policy's own tokens, at the sampling temperature; 0 elsewhere
        weight_versions     int64 [N, L]    version of the policy that wrote the token; -1 elsewhere
        lengths             int64 [N]       tokens without padding
        rewards             float32 [N]
        group_ids           int64 [N]       responses to one prompt share it
        sample_ids          int64 [N]       unique

    All values of column t speak of token t.
    """

    def __init__(self, data: TensorDict) -> None:
        self.data = data

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Pad trajectories to the longest of them; none give an empty batch."""
        lengths = torch.tensor([len(t.token_ids) for t in trajectories], dtype=torch.int64)
        width = int(lengths.max()) if trajectories else 0
        prompt_lengths = torch.tensor([t.num_prompt_tokens for t in trajectories], dtype=torch.int64)
        logprobs = [t.inference_logprobs for t in trajectories]
        columns = {
            "input_ids": _pad([t.token_ids for t in trajectories], width, "input_ids", torch.int64),
            "prompt_mask": torch.arange(width)[None] < prompt_lengths[:, None],
            "response_mask": _pad([t.response_mask for t in trajectories], width, "response_mask", torch.bool),
            "inference_logprobs": _pad(logprobs, width, "inference_logprobs", torch.float32),
            "weight_versions": _pad([t.weight_versions for t in trajectories], width, "weight_versions", torch.int64),
            "lengths": lengths,
            "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            "group_ids": torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
            "sample_ids": torch.tensor([t.sample_id for t in trajectories], dtype=torch.int64),
        }
        return cls(TensorDict(columns, batch_size=[len(trajectories)]))

    def __len__(self) -> int:
        return self.data.batch_size[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]

    def take(self, rows: Tensor | slice) -> RolloutBatch:
        """Return the trajectories ``rows`` (a slice, indices or a mask), without padding that none of them needs."""
        data = self.data[rows]
        width = int(data["lengths"].max()) if data.batch_size[0] else 0
        columns = {name: value[:, :width] if name in PADDING else value for name, value in data.items()}
        return RolloutBatch(TensorDict(columns, batch_size=data.batch_size))

    def gather(self, group: dist.ProcessGroup | None = None) -> RolloutBatch:
        """Return all ranks' trajectories, rank by rank, on every rank. Collective over ``group`` (None: the default).

        Ranks may hold different numbers of trajectories of different lengths, or none.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts, self.data.to_dict(), group=group)
        width = max(part["input_ids"].shape[1] for part in parts)
        columns = {}
        for name in parts[0]:
            values = [part[name] for part in parts]
            if name in PADDING:
                pads = [(0, width - value.shape[1]) for value in values]
                values = [torch.nn.functional.pad(v, p, value=PADDING[name]) for v, p in zip(values, pads, strict=True)]
            columns[name] = torch.cat(values)
        return RolloutBatch(TensorDict(columns, batch_size=[columns["lengths"].numel()]))

    def pack(self, max_tokens: int, values: Mapping[str, Tensor]) -> list[PackedTokens]:
        """Pack the trajectories, in order, into microbatches of at most ``max_tokens`` tokens.

        Args:
            max_tokens: bound of a microbatch.
            values: what the loss reads beside ``inference_logprobs``: ``[N]``, one a trajectory (advantages), or
                ``[N, L]``, one a token, by name.

        Raises:
            ValueError: values of another shape, or a trajectory longer than ``max_tokens``.
        """
        columns = {"inference_logprobs": self["inference_logprobs"]}
        for name, value in values.items():
            if value.shape not in (self["lengths"].shape, self["input_ids"].shape):
                allowed = [tuple(self["lengths"].shape), tuple(self["input_ids"].shape)]
                raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed are {allowed}")
            columns[name] = value if value.ndim == 2 else value[:, None].expand(-1, self["input_ids"].shape[1])
        lengths = self["lengths"].tolist()
        return pack_documents(
            _cut(self["input_ids"], lengths),
            _cut(self["response_mask"], lengths),
            max_tokens=max_tokens,
            sample_ids=self["sample_ids"].tolist(),
            row_values={name: _cut(column, lengths) for name, column in columns.items()},
        )


def _pad(rows: Sequence[Sequence[float]], width: int, name: str, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(rows), width), PADDING[name], dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def _cut(column: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return each row of ``[N, L]`` without its padding."""
    return [row[:length] for row, length in zip(column, lengths, strict=True)]
