"""The EAGLE-3 network and its unroll, the training-time test (TTT).

Pass 1 runs the one decoder layer over every row: its keys and values are the trunk. Pass d > 1 runs the same layer
again, on its own previous output at the anchors (the rows that some pass is trained at). The query of anchor i sees the
trunk up to i and the keys that passes 2..d made at the same anchor, which are its branch. For a document of 4 rows and
pass 3 (columns: keys):

              trunk (pass 1)    branch, pass 2     branch, pass 3
    anchor     0  1  2  3         0  1  2  3         0  1  2  3
      0        1  .  .  .         1  .  .  .         1  .  .  .
      1        1  1  .  .         .  1  .  .         .  1  .  .
      2        1  1  1  .         .  .  1  .         .  .  1  .
      3        1  1  1  1         .  .  .  1         .  .  .  1

This is what a served draft computes when it drafts d tokens from row i, with the policy's tokens in place of its own.

Names of parameters are those of the checkpoint.

Source: EAGLE-3 (arXiv 2503.01840), sections 3.1 and 3.2; layer and names as vLLM 0.32 serves them
(``model_executor/models/llama_eagle3.py``). We differ: documents are packed, and the rotary angles are float32 (float64
for float64 models) whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specco.drafts.base import Draft, DraftRows, concat_rows
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.eagle3.loss import build_pass_rows, find_anchors, find_trained_anchors, sum_pass_weights
from specco.drafts.layers import SwigluMLP, apply_rope
from specco.ops.branch_attention import Trunk
from specco.ops.exchange import fetch_rows
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens

AttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q ``[B, N, H]``, k and v ``[T or B, K, H]``) of one pass -> attention output ``[B, N, H]``."""


class TttAttention:
    """Attention of the passes, called once a pass: the first call makes the trunk, later ones add a branch key.

    Args:
        anchors: int64 ``[B]``, local rows whose queries, and from pass 2 on whose keys, the calls bring.
        layout: of the trunk, whose ``[T]`` rows bring keys in the first call.
        group: context-parallel group.
    """

    def __init__(self, anchors: Tensor, layout: PackedLayout, group: dist.ProcessGroup | None) -> None:
        self.anchors = anchors
        self.layout = layout
        self.group = group
        self.trunk: Trunk | None = None
        self.branch_keys: list[Tensor] = []
        self.branch_values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.trunk is None:
            self.trunk = Trunk(k, v, self.layout, self.group)
        else:
            self.branch_keys.append(k.unsqueeze(1))
            self.branch_values.append(v.unsqueeze(1))
        out = self.trunk.attend(
            q.unsqueeze(1), self.branch_keys, self.branch_values, anchors=self.anchors, trunk_inclusive=True
        )
        assert isinstance(out, Tensor)
        return out.squeeze(1)


class Eagle3Attention(nn.Module):
    """Projections of the one layer; their widths give the number of heads, so they may be sharded by heads."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, query_rows: Tensor | None, attend_fn: AttendFn) -> Tensor:
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        k = apply_rope(k, positions, self.rope_theta)
        if query_rows is not None:
            x, positions = x.index_select(0, query_rows), positions[query_rows]
        q = apply_rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), positions, self.rope_theta)
        return self.o_proj(attend_fn(q, k, v).flatten(-2))


class Eagle3DecoderLayer(nn.Module):
    """The one layer: attention over (embedding, hidden), then the MLP, with residuals of the hidden alone."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwigluMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, query_rows: Tensor | None, attend_fn: AttendFn
    ) -> Tensor:
        """Run the layer: every row given brings a key; those of ``query_rows`` (None = all) come out."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        if query_rows is not None:
            residual = residual.index_select(0, query_rows)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        residual = residual + self.self_attn(x, positions, query_rows, attend_fn)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Draft(Draft):
    """EAGLE-3: one decoder layer over fused taps, with its own ``lm_head``.

    vLLM makes one module of the two heads if the draft's equals the policy's when an engine starts; a refit of the
    draft would then overwrite the policy's head. So ``init_weights`` draws the draft's head at random and never copies
    the policy's.
    """

    config: Eagle3Config
    lm_head: nn.Linear

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, num_slots=config.ttt_steps)
        num_taps, eps = len(config.target_layer_ids), config.rms_norm_eps
        self.input_norm = nn.RMSNorm(num_taps * config.hidden_size, eps=eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(config.hidden_size, eps=eps) for _ in range(num_taps)) if config.fc_norm else None
        )
        self.fc = nn.Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            self.t2d = torch.zeros(config.vocab_size, dtype=torch.bool)

    def sum_loss_weights(self, tokens: PackedTokens) -> Tensor:
        return sum_pass_weights(tokens, self.config.ttt_steps, self.config.loss_decay, self.t2d)

    def forward(
        self,
        taps: Tensor,
        embeddings: Tensor,
        tokens: PackedTokens,
        layout: PackedLayout,
        group: dist.ProcessGroup | None = None,
        mask_embedding: Tensor | None = None,
    ) -> DraftRows:
        """Run the passes; see ``Draft.forward``."""
        self.check_inputs(tokens, layout)
        rows = layout.on_device("global_rows", taps.device)
        positions = layout.on_device("position_ids", taps.device)
        # nothing is predicted from the other rows (most of a prompt): they bring keys of the trunk and nothing else
        anchors = (find_anchors(tokens, self.config.ttt_steps)[rows] & (rows >= 0)).nonzero().squeeze(1)
        attend_fn = TttAttention(anchors, layout, group)
        hidden = self._fuse_taps(taps)
        passes = []
        for ttt_pass in range(1, self.config.ttt_steps + 1):
            next_embeddings = fetch_next_embeddings(embeddings, tokens, rows, ttt_pass, layout, group)
            query_rows = anchors if ttt_pass == 1 else None
            hidden = self.midlayer(next_embeddings, hidden, positions + (ttt_pass - 1), query_rows, attend_fn)
            if ttt_pass == 1:
                rows, positions = rows[anchors], positions[anchors]
            picked = find_trained_anchors(tokens, ttt_pass)[rows].nonzero().squeeze(1)
            if self.config.norm_output:
                hidden = self.norm(hidden)
                outputs = hidden.index_select(0, picked)
            else:
                outputs = self.norm(hidden.index_select(0, picked))
            passes.append(build_pass_rows(outputs, rows[picked], tokens, ttt_pass, self.config.loss_decay, self.t2d))
        return concat_rows(passes)

    def _fuse_taps(self, taps: Tensor) -> Tensor:
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(taps)


def fetch_next_embeddings(
    embeddings: Tensor,
    tokens: PackedTokens,
    rows: Tensor,
    distance: int,
    layout: PackedLayout,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Fetch what each row reads in pass ``distance``: the embedding of the token that many places ahead.

    Args:
        embeddings: ``[T, D]``, this rank's rows.
        tokens: the packed microbatch, global.
        rows: int64 ``[R]``, global rows, -1 = padding.
        distance: in tokens.
        layout: of the embeddings.
        group: context-parallel group. Collective over it: every rank must call.

    Returns:
        ``[R, D]``. A row whose document ends before that token gets its own embedding, and padding any: it predicts
        nothing in this pass or a later one, so what it reads does not matter.
    """
    own_rows = torch.arange(tokens.num_tokens, device=rows.device)
    next_rows = tokens.shift(own_rows, distance, -1)
    return fetch_rows(embeddings, torch.where(next_rows < 0, own_rows, next_rows)[rows.clamp(min=0)], layout, group)
