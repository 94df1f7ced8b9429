"""An autoregressive EAGLE-3 draft in plain tensors, as an engine runs it: a KV cache, one token a step.

Written apart from specco: it knows the keys of ``config.json`` and the names in ``model.safetensors``, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.rotation import rotate


class Eagle3Reference:
    """Draft tokens step by step.

    Args:
        keys: what ``config.json`` holds.
        weights: what ``model.safetensors`` holds (layers named ``midlayer.``).
        embedding: ``[V, D]``, the policy's.
    """

    def __init__(self, keys: dict[str, Any], weights: dict[str, Tensor], embedding: Tensor) -> None:
        self.keys, self.weights, self.embedding = keys, weights, embedding
        self.cached_keys: list[Tensor] = []
        self.cached_values: list[Tensor] = []

    @classmethod
    def from_directory(cls, directory: str | Path, embedding: Tensor) -> Eagle3Reference:
        keys = json.loads((Path(directory) / "config.json").read_text())
        weights = load_file(Path(directory) / "model.safetensors")
        return cls(keys, {name: weight.to(embedding.dtype) for name, weight in weights.items()}, embedding)

    def roll_out(
        self, taps: Tensor, token_ids: Sequence[int], num_steps: int, forced_ids: Sequence[int] = ()
    ) -> tuple[list[int], Tensor]:
        """Draft ``num_steps`` tokens after ``token_ids``.

        Args:
            taps: ``[L, m * D]``, outputs of the tapped layers at rows 0 .. L-1, concatenated in ascending order.
            token_ids: ``L + 1`` tokens, the one that the policy sampled at row L-1 included.
            num_steps: tokens to draft.
            forced_ids: fed instead of the drafted tokens (the first ones of them), for teacher forcing.

        Returns:
            (most probable token of each step, logits ``[num_steps, V]``).
        """
        assert len(token_ids) == taps.shape[0] + 1
        self.cached_keys.clear()
        self.cached_values.clear()
        hidden, feedback = torch.empty(0), torch.empty(0)
        for position in range(taps.shape[0]):
            hidden, feedback = self._step(token_ids[position + 1], self._fuse(taps[position]), position)
        logits = [self.weights["lm_head.weight"] @ hidden]
        drafted = [int(logits[-1].argmax())]
        for step in range(1, num_steps):
            fed = forced_ids[step - 1] if step <= len(forced_ids) else drafted[-1]
            hidden, feedback = self._step(fed, feedback, taps.shape[0] - 1 + step)
            logits.append(self.weights["lm_head.weight"] @ hidden)
            drafted.append(int(logits[-1].argmax()))
        return drafted, torch.stack(logits)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + self.keys["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _fuse(self, taps: Tensor) -> Tensor:
        if self.keys["norm_before_fc"]:
            taps = self._norm(taps, "input_norm")
        if self.keys["fc_norm"]:
            parts = taps.split(self.keys["hidden_size"])
            taps = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.weights["fc.weight"] @ taps

    def _step(self, token_id: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return (hidden row for the head, hidden row for the next step)."""
        keys, weights = self.keys, self.weights
        head_dim, layer = keys["head_dim"], "midlayer."
        normed = self._norm(hidden, layer + "hidden_norm")
        residual = normed if keys["norm_before_residual"] else hidden
        x = torch.cat([self._norm(self.embedding[token_id], layer + "input_layernorm"), normed])
        q, k, v = ((weights[f"{layer}self_attn.{name}_proj.weight"] @ x).view(-1, head_dim) for name in ("q", "k", "v"))
        self.cached_keys.append(rotate(k, position, self.keys["rope_theta"]))
        self.cached_values.append(v)
        repeats = q.shape[0] // k.shape[0]
        all_k = torch.stack(self.cached_keys).repeat_interleave(repeats, dim=1)
        all_v = torch.stack(self.cached_values).repeat_interleave(repeats, dim=1)
        scores = torch.einsum("nh,tnh->nt", rotate(q, position, self.keys["rope_theta"]), all_k) / head_dim**0.5
        attended = torch.einsum("nt,tnh->nh", scores.softmax(dim=1), all_v).flatten()
        residual = residual + weights[layer + "self_attn.o_proj.weight"] @ attended
        x = self._norm(residual, layer + "post_attention_layernorm")
        gate = weights[layer + "mlp.gate_proj.weight"] @ x
        up = weights[layer + "mlp.up_proj.weight"] @ x
        out = residual + weights[layer + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = self._norm(out, "norm")
        return normed, normed if keys["norm_output"] else out
