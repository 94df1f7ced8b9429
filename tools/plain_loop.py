"""A plain PyTorch loop of policy and draft, as a yardstick for the learner: no FSDP, no packing, no chunks.

Padded rows, ``F.scaled_dot_product_attention``, whole logits, one AdamW with two groups. Weights come by their Hugging
Face names, so that the same numbers are trained.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specco.drafts.eagle3.config import Eagle3Config
from specco.rl.grpo import GrpoLoss
from specco.titan.policy import Policy


def make_rope(length: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[length, size]`` of half-split RoPE."""
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[B, N, L, H]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class PlainModel(nn.Module):
    """Qwen3 and EAGLE-3 as two dictionaries of parameters and two functions."""

    def __init__(
        self,
        policy: Policy.Config,
        policy_weights: Iterable[tuple[str, Tensor]],
        draft: Eagle3Config,
        draft_weights: Iterable[tuple[str, Tensor]],
    ) -> None:
        super().__init__()
        self.config, self.draft_config = policy, draft
        self.policy = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(w.clone()) for n, w in policy_weights})
        self.draft = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(w.clone()) for n, w in draft_weights})

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm.eps)

    def run_policy(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (embeddings, taps, logits) of ``[B, L]`` padded on the right."""
        attention = self.config.layers[0].attention
        size = attention.head_dim
        cos, sin = make_rope(input_ids.shape[1], size, attention.rope.theta)
        p = self.policy
        h = embeddings = p["model/embed_tokens/weight"][input_ids]
        taps = []
        for index in range(len(self.config.layers)):
            w = {n.removeprefix(f"model/layers/{index}/"): v for n, v in p.items() if f"/layers/{index}/" in n}
            x = self._norm(h, w["input_layernorm/weight"])
            q, k, v = (F.linear(x, w[f"self_attn/{n}_proj/weight"]).unflatten(-1, (-1, size)) for n in "qkv")
            q, k = self._norm(q, w["self_attn/q_norm/weight"]), self._norm(k, w["self_attn/k_norm/weight"])
            q, k, v = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            h = h + F.linear(out.transpose(1, 2).flatten(2), w["self_attn/o_proj/weight"])
            x = self._norm(h, w["post_attention_layernorm/weight"])
            gated = F.silu(F.linear(x, w["mlp/gate_proj/weight"])) * F.linear(x, w["mlp/up_proj/weight"])
            h = h + F.linear(gated, w["mlp/down_proj/weight"])
            if index in self.draft_config.target_layer_ids:
                taps.append(h.detach())
        logits = F.linear(self._norm(h, p["model/norm/weight"]), p["lm_head/weight"])
        return embeddings.detach(), torch.cat(taps, dim=-1), logits

    def run_draft(self, embeddings: Tensor, taps: Tensor) -> list[Tensor]:
        """Return the draft's logits ``[B, L, V]`` of each pass."""
        c, w = self.draft_config, self.draft
        length = embeddings.shape[1]
        cos, sin = make_rope(length + c.ttt_steps, c.head_dim, c.rope_theta)
        hidden, logits = F.linear(taps, w["fc/weight"]), []
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        trunk: tuple[Tensor, Tensor] = (embeddings, embeddings)  # replaced by the first pass
        branch_k, branch_v = [], []
        for step in range(c.ttt_steps):
            tokens = F.pad(embeddings[:, step + 1 :], (0, 0, 0, step + 1))
            x = torch.cat(
                [
                    self._norm(tokens, w["midlayer/input_layernorm/weight"]),
                    self._norm(hidden, w["midlayer/hidden_norm/weight"]),
                ],
                dim=-1,
            )
            q, k, v = (
                F.linear(x, w[f"midlayer/self_attn/{n}_proj/weight"]).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
                for n in "qkv"
            )
            here = slice(step, step + length)
            q, k = rotate(q, cos[here], sin[here]), rotate(k, cos[here], sin[here])
            if step == 0:
                trunk = (k, v)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                branch_k.append(k)
                branch_v.append(v)
                repeat = q.shape[1] // k.shape[1]
                keys, values = (x.repeat_interleave(repeat, 1) for x in trunk)
                scores = (q @ keys.transpose(2, 3)).masked_fill(future, float("-inf"))
                own = torch.stack([(q * b.repeat_interleave(repeat, 1)).sum(-1) for b in branch_k], dim=-1)
                weights = torch.softmax(torch.cat([scores, own], dim=-1) * c.head_dim**-0.5, dim=-1)
                out = weights[..., :length] @ values
                for index, b in enumerate(branch_v):
                    out = out + weights[..., length + index, None] * b.repeat_interleave(repeat, 1)
            hidden = hidden + F.linear(out.transpose(1, 2).flatten(2), w["midlayer/self_attn/o_proj/weight"])
            x = self._norm(hidden, w["midlayer/post_attention_layernorm/weight"])
            gated = F.silu(F.linear(x, w["midlayer/mlp/gate_proj/weight"]))
            gated = gated * F.linear(x, w["midlayer/mlp/up_proj/weight"])
            hidden = hidden + F.linear(gated, w["midlayer/mlp/down_proj/weight"])
            logits.append(F.linear(self._norm(hidden, w["norm/weight"]), w["lm_head/weight"]))
        return logits

    def compute_loss(self, batch: dict[str, Tensor], loss_fn: GrpoLoss) -> Tensor:
        """Return policy loss plus draft loss, means over the batch's trained tokens.

        Args:
            batch: ``input_ids``, ``response_mask``, ``inference_logprobs`` ``[B, L]`` and ``advantages`` ``[B]``.
            loss_fn: of the policy.
        """
        ids, mask = batch["input_ids"], batch["response_mask"]
        embeddings, taps, logits = self.run_policy(ids)
        targets = mask[:, 1:]
        logprobs = F.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)[targets]
        values = {
            "inference_logprobs": batch["inference_logprobs"][:, 1:][targets],
            "advantages": batch["advantages"][:, None].expand_as(targets)[targets],
        }
        loss = loss_fn(logprobs, values)[0] / targets.sum()
        teacher = F.softmax(logits.detach(), dim=-1)
        total, count = logits.new_zeros(()), 0
        for step, draft_logits in enumerate(self.run_draft(embeddings, taps), start=1):
            picked = mask[:, step + 1 :]
            rows = draft_logits[:, : -step - 1][picked]
            total = total - (teacher[:, step:-1][picked] * F.log_softmax(rows, dim=-1)).sum()
            count += int(picked.sum())
        return loss + total / count
