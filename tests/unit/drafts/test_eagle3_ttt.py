"""The unroll of EAGLE-3 against a dense mask, an autoregressive roll-out, and tables made by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.draft_cases import (
    HIDDEN_SIZE,
    Document,
    compute_gradients,
    compute_loss_sums,
    make_config,
    make_document,
    make_draft,
    make_embedding_table,
    pack,
    run_draft,
)
from helpers.eagle3_reference import Eagle3Reference
from torch import Tensor

from specco.drafts.eagle3.loss import sum_pass_weights
from specco.drafts.export import build_config
from specco.drafts.layers import apply_rope
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens

EXACT = 1e-10  # float64, two orders of summation
VARIANTS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"ttt_steps": 1},
    {"ttt_steps": 7},
    {"target_layer_ids": (0, 2)},
]


def make_documents(num_taps: int = 3) -> list[Document]:
    shapes = [(9, 3), (1, 0), (2, 1), (14, 5), (6, 6), (3, 1), (7, 0)]
    return [make_document(length, prompt, seed=i, num_taps=num_taps) for i, (length, prompt) in enumerate(shapes)]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    """Compare to ``tolerance`` of the largest expected entry."""
    assert actual.shape == expected.shape
    if expected.numel():
        assert float((actual - expected).detach().abs().max()) <= tolerance * float(expected.detach().abs().max())


def build_dense_mask(lengths: list[int], ttt_steps: int) -> Tensor:
    """Return bool ``[steps * S, steps * S]``: query (pass, row) by key (pass, row), from the words of the paper."""
    documents = [d for d, length in enumerate(lengths) for _ in range(length)]
    size = len(documents)
    mask = torch.zeros(ttt_steps * size, ttt_steps * size, dtype=torch.bool)
    for query_pass in range(ttt_steps):
        for i in range(size):
            for key_pass in range(query_pass + 1):
                for j in range(size):
                    is_trunk = key_pass == 0 and documents[i] == documents[j] and j <= i
                    mask[query_pass * size + i, key_pass * size + j] = is_trunk or (key_pass > 0 and i == j)
    return mask


def run_dense_oracle(draft, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """Return (loss sums by pass, logits ``[steps, S, V]``) by one dense softmax over the keys of all passes."""
    config = draft.config
    weights = dict(draft.named_parameters())
    steps, lengths = config.ttt_steps, [d.input_ids.numel() for d in documents]
    mask = build_dense_mask(lengths, steps)
    taps = torch.cat([d.taps for d in documents])
    size = taps.shape[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[name + ".weight"]

    if config.norm_before_fc:
        taps = norm(taps, "input_norm")
    if config.fc_norm:
        taps = torch.cat([norm(x, f"fc_norm.{i}") for i, x in enumerate(taps.split(HIDDEN_SIZE, dim=1))], dim=1)
    hidden = taps @ weights["fc.weight"].T
    queries, keys, values, logits = [], [], [], []
    for step in range(steps):
        # embeddings one, two, ... tokens ahead inside each document; zeros past its end
        shifted = [F.pad(d.embeddings[step + 1 :], (0, 0, 0, min(step + 1, len(d.embeddings)))) for d in documents]
        e = norm(torch.cat(shifted), "midlayer.input_layernorm")
        n = norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([e, n], dim=1)
        positions = torch.cat([torch.arange(length) for length in lengths]) + step
        q, k, v = (x @ weights[f"midlayer.self_attn.{p}_proj.weight"].T for p in "qkv")
        queries.append(rotate(q.view(size, -1, config.head_dim), positions, config.rope_theta))
        keys.append(rotate(k.view(size, -1, config.head_dim), positions, config.rope_theta))
        values.append(v.view(size, -1, config.head_dim))
        repeats = config.num_attention_heads // config.num_key_value_heads
        all_k = torch.cat(keys).repeat_interleave(repeats, dim=1)
        all_v = torch.cat(values).repeat_interleave(repeats, dim=1)
        scores = torch.einsum("inh,jnh->nij", queries[step], all_k) * config.head_dim**-0.5
        visible = mask[step * size : (step + 1) * size, : (step + 1) * size]
        p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("nij,jnh->inh", p, all_v).flatten(1)
        residual = (n if config.norm_before_residual else hidden) + attended @ weights[
            "midlayer.self_attn.o_proj.weight"
        ].T
        m = norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (m @ weights[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        hidden = residual + (gate * gate.sigmoid() * up) @ weights["midlayer.mlp.down_proj.weight"].T
        output = norm(hidden, "norm")
        logits.append(output @ weights["lm_head.weight"].T)
        hidden = output if config.norm_output else hidden
    return sum_dense_losses(config.loss_decay, documents, logits), torch.stack(logits)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate by a 2 x 2 matrix a pair."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for j in range(half):
        angle = positions.double() * theta ** (-j / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out[..., j] = x[..., j] * cos - x[..., j + half] * sin
        out[..., j + half] = x[..., j] * sin + x[..., j + half] * cos
    return out


def sum_dense_losses(loss_decay: float, documents: list[Document], logits: list[Tensor]) -> Tensor:
    sums = []
    for step, all_logits in enumerate(logits):
        total, start = torch.zeros((), dtype=torch.float64), 0
        for document in documents:
            length = document.input_ids.numel()
            for i in range(length):
                if i + step + 2 < length and document.loss_mask[i + step + 2]:
                    teacher = document.policy_logits[i + step + 1].softmax(0)
                    total = total - (teacher * all_logits[start + i].log_softmax(0)).sum() * loss_decay**step
            start += length
        sums.append(total)
    return torch.stack(sums)


class TestDenseOracle:
    def test_mask_drawn_by_hand(self):
        """The drawing of ``drafts/eagle3/model.py``: pass 3 of a document of 4 rows; keys of passes 1, 2 and 3."""
        assert build_dense_mask([4], 3)[8:].int().tolist() == [
            [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
            [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0],
            [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0],
            [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1],
        ]

    @pytest.mark.parametrize("changes", VARIANTS, ids=str)
    def test_logits_losses_and_gradients_match(self, changes):
        draft = make_draft(make_config(**changes))
        documents = make_documents(len(draft.target_layer_ids))
        loss_sums, logits = run_dense_oracle(draft, documents)
        loss_sums.sum().backward()
        expected = {name: p.grad.clone() for name, p in draft.named_parameters()}
        assert all(float(g.abs().max()) > 0 for g in expected.values())

        rows = run_draft(draft, documents)
        assert_close(draft.lm_head(rows.hidden), logits[rows.slot_ids, rows.branch_ids])
        assert_close(compute_loss_sums(draft, documents), loss_sums.detach())
        gradients = compute_gradients(draft, [documents])
        for name, gradient in expected.items():
            assert_close(gradients[name], gradient)


class TestRollOut:
    @pytest.mark.parametrize("changes", VARIANTS, ids=str)
    def test_teacher_forced_passes_equal_an_autoregressive_draft(self, changes):
        """Pass d at anchor i gives the logits of step d of a draft that starts at row i and is fed the same tokens."""
        draft = make_draft(make_config(**changes))
        documents = make_documents(len(draft.target_layer_ids))
        rows = run_draft(draft, documents)
        logits = draft.lm_head(rows.hidden).detach()
        weights = {name: p.detach() for name, p in draft.named_parameters()}
        reference = Eagle3Reference(build_config(draft.config, torch.float64), weights, make_embedding_table())
        starts = pack(documents).cu_seqlens.tolist()
        checked = 0
        for start, document in zip(starts, documents, strict=False):
            ids = document.input_ids.tolist()
            for i in range(len(ids) - 2):
                num_steps = min(draft.num_slots, len(ids) - i - 2)
                _, expected = reference.roll_out(document.taps[: i + 1], ids[: i + 2], num_steps, ids[i + 2 :])
                picked = rows.branch_ids == start + i
                assert_close(logits[picked], expected[rows.slot_ids[picked]])
                checked += int(picked.sum())
        assert checked == logits.shape[0] > 0


def table(rows) -> list[tuple[int, ...]]:
    """Return (pass, anchor, teacher row, label) of each row."""
    columns = (rows.slot_ids + 1, rows.branch_ids, rows.teacher_rows, rows.labels)
    return list(zip(*(c.tolist() for c in columns), strict=True))


class TestHandMadeTables:
    def test_one_document_of_six_tokens(self):
        """Tokens 50..55, prompt 50 51 52, response 53 54 55."""
        tokens = PackedTokens(
            torch.arange(50, 56),
            torch.tensor([False, False, False, True, True, True]),
            torch.tensor([0, 6], dtype=torch.int32),
            torch.tensor([0]),
        )
        rows, seen = run_recorded(tokens)
        assert table(rows) == [
            # pass, anchor, teacher row, label
            (1, 1, 2, 53),
            (1, 2, 3, 54),
            (1, 3, 4, 55),
            (2, 0, 2, 53),
            (2, 1, 3, 54),
            (2, 2, 4, 55),
            (3, 0, 3, 54),
            (3, 1, 4, 55),
        ]
        assert rows.weights.tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
        assert sum_pass_weights(tokens, 3, 0.5, None).tolist() == [3, 1.5, 0.5]
        assert seen == {
            # pass: (rows; token read at each, -1 = past the end; rotary position of each). Every row brings a trunk
            # key; from pass 2 on only rows 0 to 3 are left, from which some pass is trained
            1: ([0, 1, 2, 3, 4, 5], [51, 52, 53, 54, 55, -1], [0, 1, 2, 3, 4, 5]),
            2: ([0, 1, 2, 3], [52, 53, 54, 55], [1, 2, 3, 4]),
            3: ([0, 1, 2, 3], [53, 54, 55, -1], [2, 3, 4, 5]),
        }

    def test_two_packed_documents(self):
        """Tokens 50..53 with response 52 53; tokens 60..64 with response 61, tool output 62, response 63 64."""
        tokens = PackedTokens(
            torch.tensor([50, 51, 52, 53, 60, 61, 62, 63, 64]),
            torch.tensor([False, False, True, True, False, True, False, True, True]),
            torch.tensor([0, 4, 9], dtype=torch.int32),
            torch.tensor([0, 1]),
        )
        rows, seen = run_recorded(tokens)
        assert table(rows) == [
            (1, 0, 1, 52),
            (1, 1, 2, 53),
            (1, 5, 6, 63),
            (1, 6, 7, 64),
            (2, 0, 2, 53),
            (2, 4, 6, 63),
            (2, 5, 7, 64),
            (3, 4, 7, 64),
        ]
        assert rows.weights.tolist() == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]
        assert sum_pass_weights(tokens, 3, 0.5, None).tolist() == [4, 1.5, 0.25]
        assert seen == {
            1: ([0, 1, 2, 3, 4, 5, 6, 7, 8], [51, 52, 53, -1, 61, 62, 63, 64, -1], [0, 1, 2, 3, 0, 1, 2, 3, 4]),
            2: ([0, 1, 4, 5, 6], [52, 53, 62, 63, 64], [1, 2, 1, 2, 3]),
            3: ([0, 1, 4, 5, 6], [53, -1, 63, 64, -1], [2, 3, 2, 3, 4]),
        }


def run_recorded(tokens: PackedTokens) -> tuple:
    """Run a draft whose embedding of token t is t everywhere; return its rows, and what each pass read where.

    A read past the end of the document may give anything; it is shown as -1.
    """
    draft = make_draft(make_config())
    seen, rows = {}, torch.arange(tokens.num_tokens)

    def record(module, args):
        nonlocal rows
        embeddings, _, positions, query_rows, _ = args
        ttt_pass = len(seen) + 1
        is_past_end = ~tokens.shift(torch.ones_like(tokens.loss_mask), ttt_pass, False)[rows]
        read = embeddings[:, 0].long().masked_fill(is_past_end, -1)
        seen[ttt_pass] = (rows.tolist(), read.tolist(), positions.tolist())
        rows = rows if query_rows is None else query_rows

    draft.midlayer.register_forward_pre_hook(record)
    embeddings = tokens.input_ids.double()[:, None].expand(-1, HIDDEN_SIZE)
    taps = torch.randn(tokens.num_tokens, 3 * HIDDEN_SIZE, dtype=torch.float64)
    return draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens)), seen


class TestInvariance:
    """Neither packing, nor order, nor the split of the batch changes the loss sums or the gradients."""

    @pytest.mark.parametrize(
        "split",
        [
            [[0], [1], [2], [3], [4], [5], [6]],
            [[6, 5, 4, 3, 2, 1, 0]],
            [[2, 0, 3], [6, 1], [5, 4]],
            [[4], [0, 1, 2, 3, 5, 6]],
        ],
        ids=["unpacked", "permuted", "three", "one_without_targets"],
    )
    def test_same_sums_and_gradients(self, split):
        draft = make_draft(make_config())
        documents = make_documents()
        microbatches = [[documents[i] for i in indices] for indices in split]
        expected = compute_gradients(draft, [documents])
        actual = compute_gradients(draft, microbatches)
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, 1e-9)
        sums = torch.stack([compute_loss_sums(draft, m) for m in microbatches]).sum(0)
        assert_close(sums, compute_loss_sums(draft, documents), 1e-9)
        weights = torch.stack([draft.sum_loss_weights(pack(m)) for m in microbatches]).sum(0)
        assert torch.equal(weights, draft.sum_loss_weights(pack(documents)))

    def test_the_content_of_other_documents_changes_nothing(self):
        draft = make_draft(make_config())
        first, last = make_document(9, 3, seed=0), make_document(8, 2, seed=1)
        before = run_draft(draft, [first, make_document(5, 2, seed=2), last])
        after = run_draft(draft, [first, make_document(5, 2, seed=3), last])
        is_other = (before.branch_ids >= 9) & (before.branch_ids < 14)
        assert torch.equal(before.hidden[~is_other], after.hidden[~is_other])
        assert not torch.equal(before.hidden[is_other], after.hidden[is_other])

    def test_rows_past_the_last_target_are_not_read(self):
        """The last row's taps matter to no prediction: no token after it is known."""
        draft = make_draft(make_config())
        document = make_document(9, 3, seed=0)
        before = compute_loss_sums(draft, [document])
        document.taps[-1] = 1e6
        assert torch.equal(compute_loss_sums(draft, [document]), before)


class TestWeights:
    def test_sum_loss_weights_equals_the_emitted_weights(self):
        for changes in ({}, {"loss_decay": 1.0}, {"ttt_steps": 5, "loss_decay": 0.8}):
            draft = make_draft(make_config(**changes))
            documents = make_documents()
            rows = run_draft(draft, documents)
            emitted = torch.zeros(draft.num_slots, dtype=torch.float64).index_add_(0, rows.slot_ids, rows.weights)
            assert_close(draft.sum_loss_weights(pack(documents)), emitted, 1e-14)

    def test_no_target_gives_an_empty_graph_and_zero_gradients(self):
        draft = make_draft(make_config())
        documents = [make_document(1, 0, seed=0), make_document(5, 5, seed=1)]
        rows = run_draft(draft, documents)
        assert rows.hidden.shape == (0, HIDDEN_SIZE)
        assert draft.sum_loss_weights(pack(documents)).tolist() == [0, 0, 0]
        assert all(not g.any() for g in compute_gradients(draft, [documents]).values())


class TestRotaryEmbedding:
    def test_bfloat16_rotates_by_float32_angles(self):
        x = torch.randn(3, 2, 6)
        positions = torch.tensor([0, 1000, 30000])
        expected = apply_rope(x.bfloat16().float(), positions, 10000.0)
        actual = apply_rope(x.bfloat16(), positions, 10000.0)
        assert torch.equal(actual, expected.bfloat16())
        assert_close(expected, apply_rope(x.bfloat16().double(), positions, 10000.0).float(), 4e-3)
