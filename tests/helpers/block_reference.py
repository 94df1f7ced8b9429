"""One block of a DFlash or DSpark draft in plain tensors, as an engine runs it: row by row, token by token.

Written apart from specco: it knows the keys of ``config.json`` and the names in ``model.safetensors``, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.rotation import rotate


class BlockReference:
    """Draft a block after a context.

    Args:
        keys: what ``config.json`` holds.
        weights: what ``model.safetensors`` holds.
        embedding: ``[V, D]``, the policy's.
        head: ``[V, D]``, the policy's.
    """

    def __init__(self, keys: dict[str, Any], weights: dict[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.keys, self.weights, self.embedding, self.head = keys, weights, embedding, head
        self.is_dspark = keys["architectures"] == ["Qwen3DSparkModel"]

    def roll_out(self, taps: Tensor, token_id: int, forced_ids: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        """Draft the tokens after ``token_id``.

        Args:
            taps: ``[p, m * D]``, outputs of the tapped layers at rows 0 .. p - 1.
            token_id: the token at row p, which the policy has just sampled.
            forced_ids: what follows it, for the Markov bias; where they end, the drafted tokens are used.

        Returns:
            (most probable token of each prediction, logits ``[n, V]``).
        """
        position, size = taps.shape[0], self.keys["block_size"]
        mask_id = self.keys["mask_token_id"] if self.is_dspark else self.keys["dflash_config"]["mask_token_id"]
        context = [self._norm(self.weights["fc.weight"] @ row, "hidden_norm") for row in taps]
        rows = [self.embedding[token_id], *[self.embedding[mask_id]] * (size - 1)]
        for layer in range(self.keys["num_hidden_layers"]):
            rows = self._run_layer(f"layers.{layer}.", layer, context, rows, position)
        predictions = [self._norm(row, "norm") for row in (rows if self.is_dspark else rows[1:])]
        logits, drafted, previous = [], [], token_id
        for index, row in enumerate(predictions):
            logits.append(self.head @ row + self._bias(previous))
            drafted.append(int(logits[-1].argmax()))
            previous = forced_ids[index] if index < len(forced_ids) else drafted[-1]
        return drafted, torch.stack(logits)

    def _bias(self, previous: int) -> Tensor | float:
        if not self.is_dspark:
            return 0.0
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][previous]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.keys["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return (self.weights[f"{name}.weight"] @ x).view(-1, self.keys["head_dim"])

    def _run_layer(
        self, layer: str, index: int, context: list[Tensor], rows: list[Tensor], anchor: int
    ) -> list[Tensor]:
        attn = layer + "self_attn."
        is_sliding = self.keys["layer_types"][index] == "sliding_attention"
        keys, values = [], []
        normed = [self._norm(row, layer + "input_layernorm") for row in rows]
        for position, row in enumerate([*context, *normed]):
            k = self._norm(self._heads(row, attn + "k_proj"), attn + "k_norm")
            keys.append(rotate(k, position, self.keys["rope_theta"]))
            values.append(self._heads(row, attn + "v_proj"))
        out = []
        for offset, (row, x) in enumerate(zip(rows, normed, strict=True)):
            position = anchor + offset
            seen = [
                t for t in range(len(keys)) if not is_sliding or position - self.keys["sliding_window"] < t <= position
            ]
            q = rotate(self._norm(self._heads(x, attn + "q_proj"), attn + "q_norm"), position, self.keys["rope_theta"])
            repeats = q.shape[0] // keys[0].shape[0]
            k = torch.stack([keys[t] for t in seen]).repeat_interleave(repeats, dim=1)
            v = torch.stack([values[t] for t in seen]).repeat_interleave(repeats, dim=1)
            scores = torch.einsum("nh,tnh->nt", q, k) / self.keys["head_dim"] ** 0.5
            attended = torch.einsum("nt,tnh->nh", scores.softmax(dim=1), v).flatten()
            residual = row + self.weights[attn + "o_proj.weight"] @ attended
            x = self._norm(residual, layer + "post_attention_layernorm")
            gate, up = (self.weights[f"{layer}mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            out.append(residual + self.weights[layer + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return out
