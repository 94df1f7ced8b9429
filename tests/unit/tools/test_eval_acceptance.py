"""The prompts file, and the figures that the evaluation of a draft is made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from eval_acceptance import read_prompts, summarize_acceptance, summarize_estimates


class TestPrompts:
    def test_ids_and_texts(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"token_ids": [3, 1]}\n\n{"text": "ab"}\n')
        assert read_prompts(path, lambda text: [ord(c) for c in text]) == [[3, 1], [97, 98]]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("[1, 2]", "line 2 has list"),
            ('{"token_ids": [1], "text": "a"}', r"line 2 has \['text', 'token_ids'\]"),
            ('{"prompt": "a"}', r"line 2 has \['prompt'\]"),
            ('{"token_ids": []}', r"line 2: the prompt is \[\]"),
            ('{"token_ids": [1.5]}', r"line 2: the prompt is \[1.5\]"),
            ('{"token_ids": [1', "line 2: "),
        ],
    )
    def test_other_lines_are_refused_by_number(self, tmp_path: Path, line: str, message: str) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"token_ids": [3, 1]}\n' + line)
        with pytest.raises(ValueError, match=message):
            read_prompts(path, lambda text: [1])

    def test_no_prompt_and_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ValueError, match="holds no prompt"):
            read_prompts(tmp_path / "empty.jsonl", lambda text: [1])
        with pytest.raises(ValueError, match="is not there"):
            read_prompts(tmp_path / "nothing.jsonl", lambda text: [1])


def test_acceptance_of_all_rounds() -> None:
    rounds = [
        {"num_drafts": 10, "num_accepted_tokens_per_pos": [8, 4]},
        {"num_drafts": 30, "num_accepted_tokens_per_pos": [20, 10]},
    ]
    figures = summarize_acceptance(rounds)
    assert figures == {
        "acceptance_length": pytest.approx(1 + 42 / 40),
        "acceptance_rates": [pytest.approx(0.7), pytest.approx(0.35)],
        "num_verifications": 40,
    }


def test_estimates_are_named() -> None:
    pairs = {
        "biased_low": torch.tensor([[3.0, 4.0], [2.0, 4.0]]),
        "by_label": torch.tensor([[3.0, 4.0], [3.0, 4.0]]),
        "one_minus_tv": torch.tensor([[4.0, 5.0], [3.0, 4.0]]),
    }
    figures = summarize_estimates(pairs)
    assert figures["acceptance_length_biased_low"] == 2.25
    assert figures["acceptance_length_by_label"] == 2.5
    assert figures["one_minus_tv"] == [pytest.approx(0.8), 0.75]
    assert figures["num_branches"] == 4
