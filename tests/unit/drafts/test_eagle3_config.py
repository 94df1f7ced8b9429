"""Bad configurations are refused by name; a draft is built, materialised and initialised in any way."""

from __future__ import annotations

import pytest
import torch
from helpers.draft_cases import make_config, make_document, pack, run_draft

from specco.drafts.eagle3.model import Eagle3Draft
from specco.ops.layout import PackedLayout


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"target_layer_ids": (3, 1, 6)}, r"target_layer_ids is \(3, 1, 6\)"),
            ({"target_layer_ids": (1, 1, 6)}, r"target_layer_ids is \(1, 1, 6\)"),
            ({"target_layer_ids": (-1, 1)}, r"target_layer_ids is \(-1, 1\)"),
            ({"target_layer_ids": ()}, r"target_layer_ids is \(\)"),
            ({"num_key_value_heads": 3}, "num_attention_heads is 4.*num_key_value_heads=3"),
            ({"head_dim": 5}, "head_dim is 5"),
            ({"ttt_steps": 0}, "ttt_steps is 0"),
            ({"loss_decay": 0.0}, "loss_decay is 0.0"),
            ({"loss_decay": 1.5}, "loss_decay is 1.5"),
            ({"hidden_size": -8}, "hidden_size is -8"),
            ({"rope_theta": float("nan")}, "rope_theta is nan"),
            ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ],
    )
    def test_bad_value(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make_config(**changes)

    def test_document_beyond_the_last_position(self):
        draft = Eagle3Draft(make_config(max_position_embeddings=8)).double()
        run_draft(draft, [make_document(8, 2, seed=0)])
        with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings=8"):
            run_draft(draft, [make_document(9, 2, seed=0), make_document(3, 1, seed=1)])

    def test_layout_of_other_tokens(self):
        draft = Eagle3Draft(make_config())
        tokens = pack([make_document(9, 2, seed=0)])
        with pytest.raises(ValueError, match=r"\[0, 4, 9\].*\[0, 9\]"):
            draft(torch.zeros(9, 36), torch.zeros(9, 12), tokens, PackedLayout.build([0, 4, 9]))


class TestInitWeights:
    def test_from_the_meta_device(self):
        with torch.device("meta"):
            draft = Eagle3Draft(make_config(fc_norm=True))
        assert all(p.is_meta for p in draft.parameters())
        assert not list(draft.buffers()), "a buffer would need care after to_empty and under a cast"
        draft.to_empty(device="cpu")
        for parameter in draft.parameters():
            parameter.data.fill_(torch.nan)
        torch.manual_seed(0)
        draft.init_weights()
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 1:
                assert bool((parameter == 1).all()), name
            else:
                scaled = parameter.detach() * parameter.shape[1] ** 0.5
                assert float(scaled.std()) == pytest.approx(1, abs=0.2), name

    def test_repeats_by_seed(self):
        drafts = []
        for _ in range(2):
            torch.manual_seed(3)
            drafts.append(Eagle3Draft(make_config()))
            torch.manual_seed(4)
            drafts[-1].init_weights()
        assert all(torch.equal(a, b) for a, b in zip(drafts[0].parameters(), drafts[1].parameters(), strict=True))


class TestDtypes:
    def test_bfloat16_runs_and_weights_the_loss_in_float32(self):
        draft = Eagle3Draft(make_config()).bfloat16()
        rows = run_draft(draft, [make_document(9, 2, seed=0)])
        assert rows.hidden.dtype == torch.bfloat16
        assert rows.weights.dtype == torch.float32

    def test_interface(self):
        draft = Eagle3Draft(make_config(ttt_steps=2))
        assert draft.target_layer_ids == (1, 3, 6)
        assert draft.num_slots == 2
        assert draft.lm_head.weight.shape == (11, 12)
