"""DFlash and DSpark against a dense mask, a roll-out row by row, and tables made by hand."""

from __future__ import annotations

import pytest
import torch
from helpers.block_reference import BlockReference
from helpers.draft_cases import (
    HIDDEN_SIZE,
    Document,
    compute_gradients,
    compute_loss_sums,
    embed_mask,
    make_dflash_config,
    make_document,
    make_draft,
    make_dspark_config,
    make_embedding_table,
    make_policy_head,
    pack,
    run_draft,
)
from torch import Tensor

from specco.drafts.anchors import sample_anchors
from specco.drafts.block import BlockConfig, BlockDraft
from specco.drafts.export import build_config
from specco.ops.layout import PackedLayout
from specco.packing import PackedTokens
from specco.testing.tolerances import OP_FLOAT64, STEP_FLOAT64, relative_error

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
VARIANTS = {
    "dflash": make_dflash_config(),
    "dflash_every_anchor": make_dflash_config(num_anchors=100),
    "dflash_of_two": make_dflash_config(block_size=2),
    "dflash_sliding": make_dflash_config(**SLIDING, num_anchors=100),
    "dspark": make_dspark_config(),
    "dspark_of_one": make_dspark_config(block_size=1),
    "dspark_sliding": make_dspark_config(**SLIDING, num_anchors=100),
    "dspark_no_confidence": make_dspark_config(confidence_weight=0.0),
    "dspark_plain_confidence": make_dspark_config(confidence_head_with_markov=False, confidence_weight=0.5),
}


def make_documents() -> list[Document]:
    """Documents with more candidates than anchors, fewer, one and none; one with a tool's output between two turns."""
    shapes = [(12, 3), (1, 0), (2, 1), (17, 5), (6, 6), (3, 1), (7, 0), (2, 0)]
    documents = [make_document(length, prompt, seed=i) for i, (length, prompt) in enumerate(shapes)]
    documents[3].loss_mask[9:11] = False
    return documents


def list_blocks(config: BlockConfig, documents: list[Document]) -> list[tuple[int, int, int]]:
    """Return (document, position of the anchor, valid predictions) of each block, counted by hand."""
    tokens = pack(documents)
    starts, blocks = tokens.cu_seqlens.tolist(), []
    for row in sample_anchors(tokens, config.num_anchors).tolist():
        index = max(i for i in range(len(documents)) if starts[i] <= row)
        position, mask = row - starts[index], documents[index].loss_mask.tolist()
        num_valid = 0
        while num_valid < config.num_predictions and all(mask[position + 1 : position + 2 + num_valid]):
            if position + 1 + num_valid >= len(mask):
                break
            num_valid += 1
        blocks.append((index, position, num_valid))
    return blocks


def is_visible(config: BlockConfig, layer: int, query: tuple[int, int, int], key: tuple[int, int, int | None]) -> bool:
    """Say whether a query (document, anchor, offset) sees a key: a block's, or a trunk's (document, position, None)."""
    window = config.get_window(layer)
    if key[2] is not None:
        return query[:2] == key[:2] and (window is None or key[2] <= query[2])
    is_before = query[0] == key[0] and key[1] < query[1]
    return is_before and (window is None or key[1] > query[1] + query[2] - window)


def run_dense_oracle(draft: BlockDraft, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """Return (loss sums by prediction, logits of the valid predictions) by one dense softmax over all keys."""
    config, weights = draft.config, dict(draft.named_parameters())
    blocks = list_blocks(config, documents)
    queries = [(d, p, offset) for d, p, _ in blocks for offset in range(config.block_size)]
    trunk = [(d, p, None) for d, document in enumerate(documents) for p in range(len(document.input_ids))]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[name + ".weight"]

    def rotate(x: Tensor, positions: list[int]) -> Tensor:
        out, half = torch.empty_like(x), x.shape[-1] // 2
        for j in range(half):
            angle = torch.tensor(positions).double() * config.rope_theta ** (-j / half)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            out[..., j] = x[..., j] * cos - x[..., j + half] * sin
            out[..., j + half] = x[..., j] * sin + x[..., j + half] * cos
        return out

    context = norm(torch.cat([d.taps for d in documents]) @ weights["fc.weight"].T, "hidden_norm")
    mask_row = make_embedding_table()[config.mask_token_id]
    x = torch.stack([documents[d].embeddings[p] if offset == 0 else mask_row for d, p, offset in queries])
    query_positions = [p + offset for _, p, offset in queries]
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        mask = torch.tensor([[is_visible(config, layer, q, k) for k in [*trunk, *queries]] for q in queries])
        normed = norm(x, name + "input_layernorm")
        rows = torch.cat([context, normed])
        q, k, v = (
            (source @ weights[f"{name}self_attn.{p}_proj.weight"].T).view(len(source), -1, config.head_dim)
            for source, p in ((normed, "q"), (rows, "k"), (rows, "v"))
        )
        q = rotate(norm(q, name + "self_attn.q_norm"), query_positions)
        k = rotate(norm(k, name + "self_attn.k_norm"), [p for _, p, _ in trunk] + query_positions)
        repeats = config.num_attention_heads // config.num_key_value_heads
        scores = torch.einsum("inh,jnh->nij", q, k.repeat_interleave(repeats, dim=1)) * config.head_dim**-0.5
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("nij,jnh->inh", p, v.repeat_interleave(repeats, dim=1)).flatten(1)
        x = x + attended @ weights[name + "self_attn.o_proj.weight"].T
        m = norm(x, name + "post_attention_layernorm")
        gate, up = (m @ weights[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[name + "mlp.down_proj.weight"].T
    hidden = norm(x, "norm").unflatten(0, (len(blocks), config.block_size))
    return sum_dense_losses(draft, documents, blocks, hidden)


def sum_dense_losses(
    draft: BlockDraft, documents: list[Document], blocks: list[tuple[int, int, int]], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    config, weights = draft.config, dict(draft.named_parameters())
    is_dspark, terms = config.method == "dspark", config.loss_terms
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(config.num_predictions)]
    all_logits = []
    for (index, position, num_valid), rows in zip(blocks, hidden, strict=True):
        ids = documents[index].input_ids
        for k in range(num_valid):
            row = rows[k if is_dspark else k + 1]
            logits = make_policy_head() @ row
            if is_dspark:
                embedded = weights["markov_head.markov_w1.weight"][ids[position + k]]
                logits = logits + weights["markov_head.markov_w2.weight"] @ embedded
            all_logits.append(logits)
            p, q = documents[index].policy_logits[position + k].softmax(0), logits.softmax(0)
            distance = (p - q).abs().sum()
            loss = -terms.soft_cross_entropy * (p * q.log()).sum() + terms.l1 * distance
            loss = loss - terms.label_cross_entropy * q[ids[position + k + 1]].log()
            if is_dspark and config.confidence_weight:
                x = torch.cat([row, embedded]) if config.confidence_head_with_markov else row
                c = (weights["confidence_head.proj.weight"][0] @ x + weights["confidence_head.proj.bias"][0]).sigmoid()
                target = (1 - distance / 2).detach()
                loss = loss - config.confidence_weight * (target * c.log() + (1 - target) * (1 - c).log())
            sums[k] = sums[k] + loss * torch.exp(torch.tensor(-k / config.loss_decay_gamma, dtype=torch.float64))
    return torch.stack(sums), torch.stack(all_logits)


class TestDenseOracle:
    @pytest.mark.parametrize("name", list(VARIANTS))
    def test_logits_losses_and_gradients_match(self, name):
        draft, documents = make_draft(VARIANTS[name]), make_documents()
        loss_sums, logits = run_dense_oracle(draft, documents)
        loss_sums.sum().backward()
        expected = {name: p.grad.clone() for name, p in draft.named_parameters()}
        assert all(float(g.abs().max()) > 0 for g in expected.values())

        rows = run_draft(draft, documents)
        assert relative_error(draft.compute_logits(rows, make_policy_head()), logits.detach()) < OP_FLOAT64
        assert relative_error(compute_loss_sums(draft, documents), loss_sums.detach()) < OP_FLOAT64
        for parameter, gradient in compute_gradients(draft, [documents]).items():
            assert relative_error(gradient, expected[parameter]) < OP_FLOAT64, parameter


class TestRollOut:
    @pytest.mark.parametrize("name", list(VARIANTS))
    def test_blocks_equal_those_of_a_served_draft(self, name):
        draft, documents = make_draft(VARIANTS[name]), make_documents()
        rows = run_draft(draft, documents)
        logits = draft.compute_logits(rows, make_policy_head()).detach()
        weights = {name: p.detach() for name, p in draft.named_parameters()}
        keys = build_config(draft.config, torch.float64)
        reference = BlockReference(keys, weights, make_embedding_table(), make_policy_head())
        starts = pack(documents).cu_seqlens.tolist()
        num_checked = 0
        for index, position, num_valid in list_blocks(draft.config, documents):
            ids = documents[index].input_ids.tolist()
            _, expected = reference.roll_out(documents[index].taps[:position], ids[position], ids[position + 1 :])
            picked = rows.branch_ids == starts[index] + position
            assert rows.slot_ids[picked].tolist() == list(range(num_valid))
            assert relative_error(logits[picked], expected[:num_valid]) < OP_FLOAT64
            num_checked += num_valid
        assert num_checked == logits.shape[0] > 0


def make_tokens() -> PackedTokens:
    """Two documents: 50..58 with turns 52..55 and 57 58; 60..62 with response 61 62."""
    mask = torch.tensor([False, False, True, True, True, True, False, True, True, False, True, True])
    ids = torch.tensor([*range(50, 59), 60, 61, 62]) % 64
    return PackedTokens(ids, mask, torch.tensor([0, 9, 12], dtype=torch.int32), torch.tensor([4, 7]))


class TestHandMadeTables:
    @pytest.mark.parametrize("make_config", [make_dflash_config, make_dspark_config])
    def test_rows_and_what_each_block_reads(self, make_config):
        """Blocks of 3 predictions; the embedding of token t is t everywhere, that of the mask is -1."""
        is_dflash = make_config is make_dflash_config
        config = make_config(block_size=4 if is_dflash else 3, vocab_size=64, loss_decay_gamma=2.0, num_anchors=9)
        draft, tokens, seen = make_draft(config), make_tokens(), {}
        draft.layers[0].register_forward_pre_hook(lambda _, args: seen.update(x=args[0], places=args[2]))
        embeddings = tokens.input_ids.double()[:, None].expand(-1, HIDDEN_SIZE)
        taps = torch.randn(tokens.num_tokens, 3 * HIDDEN_SIZE, dtype=torch.float64)
        mask = torch.full((HIDDEN_SIZE,), -1.0, dtype=torch.float64)
        rows = draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens), None, mask)
        columns = (rows.branch_ids, rows.slot_ids, rows.teacher_rows, rows.previous_ids, rows.labels)
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == [
            # anchor, prediction, teacher row, token before, label
            (2, 0, 2, 52, 53),
            (2, 1, 3, 53, 54),
            (2, 2, 4, 54, 55),
            (3, 0, 3, 53, 54),
            (3, 1, 4, 54, 55),
            (4, 0, 4, 54, 55),
            (7, 0, 7, 57, 58),
            (10, 0, 10, 61, 62),
        ]
        decay = torch.tensor([1.0, 0.6065306597126334, 0.36787944117144233], dtype=torch.float64)
        assert relative_error(rows.weights, decay[rows.slot_ids]) < 1e-14
        assert relative_error(draft.sum_loss_weights(tokens), torch.tensor([5.0, 2.0, 1.0]) * decay) < 1e-14
        width = config.block_size
        read, positions = (
            seen["x"][:, 0].unflatten(0, (5, width)),
            seen["places"].block_positions.unflatten(0, (5, width)),
        )
        assert read[:, 0].tolist() == [52, 53, 54, 57, 61]
        assert bool((read[:, 1:] == -1).all())
        assert positions[:, 0].tolist() == [2, 3, 4, 7, 1]
        assert bool((positions.diff(dim=1) == 1).all())

    @pytest.mark.parametrize("make_config", [make_dflash_config, make_dspark_config])
    @pytest.mark.parametrize("is_sliding", [False, True])
    def test_masks_drawn_by_hand(self, make_config, is_sliding):
        """What the drawing in ``drafts/block.py`` says, seen through the gradients of the queries' outputs."""
        sliding = {"layer_types": ("sliding_attention",), "sliding_window": 3} if is_sliding else {}
        draft = make_draft(make_config(block_size=3, num_hidden_layers=1, num_anchors=9, **sliding))
        document = make_document(6, 0, seed=0)
        document.loss_mask[:] = torch.tensor([False, False, True, True, True, True])
        tokens, seen = pack([document]), {}
        taps = document.taps.clone().requires_grad_()

        def keep(_, args, out):
            args[0].retain_grad()
            seen.update(x=args[0], out=out)

        draft.layers[0].register_forward_hook(keep)
        embeddings = document.embeddings.clone().requires_grad_()
        draft(taps, embeddings, tokens, PackedLayout.build(tokens.cu_seqlens), None, embed_mask(draft))
        expected = {
            # (anchor, query): (trunk, block at 2, block at 3, block at 4)
            (2, 0): ([1, 1, 0, 0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]),
            (2, 2): ([1, 1, 0, 0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]),
            (4, 1): ([1, 1, 1, 1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]),
        }
        if is_sliding:
            # a query at anchor + offset sees two tokens before itself; its block causally
            expected = {
                (2, 0): ([1, 1, 0, 0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]),
                (2, 1): ([0, 1, 0, 0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]),
                (4, 0): ([0, 0, 1, 1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]),
                (4, 2): ([0, 0, 0, 0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]),
            }
        for (anchor, query), (trunk, *blocks) in expected.items():
            taps.grad = seen["x"].grad = None
            seen["out"][(anchor - 2) * 3 + query].square().sum().backward(retain_graph=True)
            assert (taps.grad.abs().sum(1) > 0).int().tolist() == trunk
            assert (seen["x"].grad.abs().sum(1) > 0).int().unflatten(0, (3, 3)).tolist() == blocks


class TestInvariance:
    """Neither packing, nor order, nor the split of the batch changes the anchors, the loss sums or the gradients."""

    @pytest.mark.parametrize(
        "split",
        [
            [[i] for i in range(8)],
            [[7, 6, 5, 4, 3, 2, 1, 0]],
            [[2, 0, 3], [7, 6, 1], [5, 4]],
            [[4], [0, 1, 2, 3, 5, 6, 7]],
        ],
        ids=["unpacked", "permuted", "three", "one_without_targets"],
    )
    @pytest.mark.parametrize("name", ["dflash", "dspark"])
    def test_same_sums_and_gradients(self, name, split):
        draft, documents = make_draft(VARIANTS[name]), make_documents()
        microbatches = [[documents[i] for i in indices] for indices in split]
        expected = compute_gradients(draft, [documents])
        for parameter, gradient in compute_gradients(draft, microbatches).items():
            assert relative_error(gradient, expected[parameter]) < STEP_FLOAT64, parameter
        sums = torch.stack([compute_loss_sums(draft, m) for m in microbatches]).sum(0)
        assert relative_error(sums, compute_loss_sums(draft, documents).detach()) < STEP_FLOAT64
        weights = torch.stack([draft.sum_loss_weights(pack(m)) for m in microbatches]).sum(0)
        assert relative_error(weights, draft.sum_loss_weights(pack(documents))) < 1e-14

    def test_sum_loss_weights_equals_the_emitted_weights(self):
        draft, documents = make_draft(VARIANTS["dspark"]), make_documents()
        rows = run_draft(draft, documents)
        emitted = torch.zeros(draft.num_slots, dtype=torch.float64).index_add_(0, rows.slot_ids, rows.weights)
        assert relative_error(draft.sum_loss_weights(pack(documents)), emitted) < 1e-14

    @pytest.mark.parametrize("name", ["dflash", "dspark", "dspark_sliding"])
    def test_nothing_to_train_gives_zero_gradients(self, name):
        draft = make_draft(VARIANTS[name])
        documents = [make_document(1, 0, seed=0), make_document(5, 5, seed=1), make_document(3, 2, seed=2)]
        assert run_draft(draft, documents).hidden.shape == (0, HIDDEN_SIZE)
        assert not draft.sum_loss_weights(pack(documents)).any()
        assert all(not g.any() for g in compute_gradients(draft, [documents]).values())


class TestInit:
    def test_a_fresh_dspark_draft_has_no_bias(self):
        draft = make_draft(make_dspark_config())
        draft.init_weights()
        assert not draft.markov_head.markov_w2.weight.any()
        assert not draft.confidence_head.proj.bias.any()
        assert draft.confidence_head.proj.weight.any()
        gradients = compute_gradients(draft, [make_documents()])
        assert gradients["markov_head.markov_w2.weight"].any(), "the bias could never leave zero"


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_size": 1}, "block_size is 1"),
            ({"mask_token_id": 11}, "mask_token_id is 11; allowed are 0 to 10"),
            ({"num_anchors": 0}, "num_anchors is 0"),
            ({"layer_types": ("full_attention",)}, "layer_types is .*num_hidden_layers=2"),
            ({"layer_types": ("full_attention", "chunked")}, "layer_types is .*chunked"),
            ({"sliding_window": 8}, "sliding_window is 8"),
            ({"layer_types": ("sliding_attention",) * 2}, "sliding_window is None"),
            ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 3}, "sliding_window is 3.*block_size=4"),
        ],
        ids=str,
    )
    def test_config(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make_dflash_config(**changes)

    def test_dspark_config(self):
        with pytest.raises(ValueError, match="block_size is 0"):
            make_dspark_config(block_size=0)
        with pytest.raises(ValueError, match="markov_rank is 0"):
            make_dspark_config(markov_rank=0)
        with pytest.raises(ValueError, match=r"confidence_weight is -1"):
            make_dspark_config(confidence_weight=-1.0)
