"""The reduced vocabulary: which tokens, what is masked, and that it stays what it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.draft_cases import (
    VOCAB_SIZE,
    change_config,
    change_weights,
    compute_gradients,
    compute_loss_sums,
    make_config,
    make_document,
    make_draft,
    pack,
    run_draft,
)
from safetensors.torch import load_file

from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import iterate_weights, save_draft
from specco.drafts.load import load_draft, load_weights
from specco.drafts.vocab import build_vocabulary_maps, compute_target_ids, select_target_ids
from specco.testing.tolerances import OP_FLOAT64, STEP_FLOAT64, relative_error

TARGET_IDS = torch.tensor([0, 2, 3, 5, 8, 10])


def make_reduced_draft(seed: int = 0, **changes) -> Eagle3Draft:
    draft = make_draft(make_config(draft_vocab_size=6, **changes), seed=seed)
    draft.set_vocabulary(TARGET_IDS)
    return draft


def make_documents() -> list:
    return [make_document(length, prompt, seed=i) for i, (length, prompt) in enumerate([(14, 4), (9, 2), (3, 2)])]


class TestChoice:
    def test_most_frequent_tokens_in_ascending_order(self):
        counts = torch.tensor([4, 0, 9, 4, 1, 4])
        assert select_target_ids(counts, 3).tolist() == [0, 2, 3]
        assert select_target_ids(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(ValueError, match="draft vocabulary of 7 tokens"):
            select_target_ids(counts, 7)

    def test_maps_are_offsets(self):
        d2t, t2d = build_vocabulary_maps(torch.tensor([1, 2, 5, 9]), 10)
        assert d2t.tolist() == [1, 1, 3, 6]
        assert t2d.nonzero().flatten().tolist() == compute_target_ids(d2t).tolist() == [1, 2, 5, 9]

    def test_one_that_was_never_chosen_is_refused(self):
        draft = make_draft(make_config(draft_vocab_size=6))
        draft.init_weights()
        with pytest.raises(ValueError, match="never chosen"):
            run_draft(draft, make_documents())


class TestTraining:
    def test_loss_and_gradients_of_a_dense_oracle(self):
        """Rows whose label is outside count for nothing; the teacher is the policy inside of the vocabulary."""
        draft, documents = make_reduced_draft(), make_documents()
        rows = run_draft(draft, documents)
        policy_logits = torch.cat([d.policy_logits for d in documents])
        expected, num_masked = torch.zeros(3, dtype=torch.float64), 0
        for i in range(rows.hidden.shape[0]):
            teacher = policy_logits[rows.teacher_rows[i]][TARGET_IDS].softmax(0)
            logits = draft.lm_head.weight @ rows.hidden[i]
            if rows.labels[i] in TARGET_IDS:
                slot = rows.slot_ids[i : i + 1]
                loss = -(teacher * logits.log_softmax(0)).sum() * 0.5 ** float(slot)
                expected = expected.index_add(0, slot, loss[None])
            else:
                num_masked += 1
        assert 0 < num_masked < rows.hidden.shape[0]
        assert relative_error(compute_loss_sums(draft, documents).detach(), expected.detach()) < OP_FLOAT64
        draft.zero_grad()
        expected.sum().backward()
        expected_gradients = {name: p.grad.clone() for name, p in draft.named_parameters()}
        for name, gradient in compute_gradients(draft, [documents]).items():
            assert relative_error(gradient, expected_gradients[name]) < OP_FLOAT64, name

    @pytest.mark.parametrize(
        "split", [[[0], [1], [2]], [[2, 1, 0]], [[1], [2, 0]]], ids=["unpacked", "permuted", "two"]
    )
    def test_packing_order_and_split_change_nothing(self, split):
        draft, documents = make_reduced_draft(), make_documents()
        microbatches = [[documents[i] for i in indices] for indices in split]
        expected = compute_gradients(draft, [documents])
        for name, gradient in compute_gradients(draft, microbatches).items():
            assert relative_error(gradient, expected[name]) < STEP_FLOAT64, name
        weights = torch.stack([draft.sum_loss_weights(pack(m)) for m in microbatches]).sum(0)
        assert torch.equal(weights, draft.sum_loss_weights(pack(documents)))

    def test_sum_loss_weights_equals_the_emitted_weights(self):
        draft, documents = make_reduced_draft(), make_documents()
        rows = run_draft(draft, documents)
        emitted = torch.zeros(3, dtype=torch.float64).index_add_(0, rows.slot_ids, rows.weights)
        assert relative_error(draft.sum_loss_weights(pack(documents)), emitted) < 1e-14
        assert bool((emitted < compute_weights_of_all(documents)).all())

    def test_no_target_inside_trains_nothing(self):
        draft, document = make_reduced_draft(), make_document(9, 2, seed=0)
        document.input_ids[:] = 4
        assert run_draft(draft, [document]).hidden.shape[0] > 0
        assert not draft.sum_loss_weights(pack([document])).any()
        assert all(not g.any() for g in compute_gradients(draft, [[document]]).values())


def compute_weights_of_all(documents: list) -> torch.Tensor:
    return make_draft(make_config()).sum_loss_weights(pack(documents))


class TestKept:
    def test_exported_and_loaded_in_any_dtype(self, tmp_path):
        draft = make_reduced_draft()
        save_draft(draft, tmp_path, dtype=torch.bfloat16)
        weights = load_file(tmp_path / "model.safetensors")
        assert torch.equal(compute_target_ids(weights["d2t"]), TARGET_IDS)
        assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
        assert weights["lm_head.weight"].shape[0] == 6
        loaded = load_draft(tmp_path, dtype=torch.float64)
        assert loaded.config == draft.config
        assert torch.equal(loaded.d2t, draft.d2t) and torch.equal(loaded.t2d, draft.t2d)
        assert {"d2t", "t2d"} < dict(iterate_weights(draft)).keys()

    def test_checkpoint(self, tmp_path):
        """What the learner saves, by name, comes back over a draft that was initialised anew."""
        draft, other = make_reduced_draft(), make_draft(make_config(draft_vocab_size=6), seed=1)
        other.init_weights()
        dcp.save({"model": draft.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        other.load_state_dict(state["model"])
        assert torch.equal(compute_target_ids(other.d2t), TARGET_IDS)
        document = make_document(9, 2, seed=0)
        assert torch.equal(run_draft(draft, [document]).hidden, run_draft(other, [document]).hidden)

    def test_a_file_without_t2d(self, tmp_path):
        draft = make_reduced_draft()
        save_draft(draft, tmp_path)
        change_weights(tmp_path, lambda w: w.pop("t2d"))
        assert torch.equal(load_draft(tmp_path).t2d, draft.t2d)

    @pytest.mark.parametrize(
        ("change_fn", "message"),
        [
            (lambda w: w.pop("d2t"), r"missing weights \['d2t'\]"),
            (lambda w: w.update(d2t=torch.zeros(5, dtype=torch.int64)), r"d2t has shape \(5,\)"),
            # ids in place of offsets
            (lambda w: w.update(d2t=TARGET_IDS.clone()), "target ids 0 to 15"),
            (lambda w: w.update(d2t=torch.tensor([0, 0, 0, 0, 0, -3])), "d2t holds offsets"),
            (lambda w: w["t2d"].logical_not_(), "t2d does not name"),
            (lambda w: w.update({"lm_head.weight": torch.ones(11, 12)}), r"lm_head.weight has shape \(11, 12\)"),
        ],
        ids=["missing", "short", "ids", "twice", "contradiction", "head"],
    )
    def test_bad_maps_are_refused(self, tmp_path, change_fn, message):
        save_draft(make_reduced_draft(), tmp_path)
        change_weights(tmp_path, change_fn)
        draft = make_reduced_draft(seed=1)
        before = draft.fc.weight.clone()
        with pytest.raises(ValueError, match=message):
            load_weights(draft, tmp_path)
        assert torch.equal(draft.fc.weight, before)

    def test_a_map_in_the_file_of_a_whole_vocabulary(self, tmp_path):
        save_draft(make_reduced_draft(), tmp_path)
        change_config(tmp_path, draft_vocab_size=VOCAB_SIZE)
        with pytest.raises(ValueError, match="d2t maps to a reduced vocabulary"):
            load_draft(tmp_path)


@pytest.mark.parametrize("size", [0, VOCAB_SIZE, VOCAB_SIZE + 1])
def test_sizes_that_are_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}"):
        make_config(draft_vocab_size=size)
