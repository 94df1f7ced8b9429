"""The task "carry": add up six digits in writing, in one of two styles.

    prompt    8+9+9+8+7+3=
    sloppy    4+9+3=6;6+6+8=10;10+2=12;#12                two operands a line, each carry dropped with probability 0.6
    careful   8+9=17;17+9=26;26+8=34;34+7=41;41+3=44;#44  one operand a line, exact

Warm-start data is sloppy nine times out of ten. A policy that is rewarded for the right sum moves to the rare, careful
style: it comes to write what it seldom wrote, so that a draft that is not trained along falls behind.

Everything is drawn from (seed, index): sample ``index`` is the same on any rank, in any batch.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specco.rl.environment import Trajectory

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
VOCABULARY = [PAD_TOKEN, EOS_TOKEN, *string.digits, *"+=;#", *string.ascii_lowercase, *string.ascii_uppercase[:22]]
VOCAB_SIZE = len(VOCABULARY)

NUM_OPERANDS = 6
CARRY_DROP_PROBABILITY = 0.6
CAREFUL_SHARE = 0.1
MAX_RESPONSE_TOKENS = 64
"""Tokens of the longest response that a policy may write; the longest right one has 43, its end token included."""

_IDS = {character: token_id for token_id, character in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Return one token id a character.

    Raises:
        ValueError: a character outside the vocabulary.
    """
    unknown = sorted(set(text) - _IDS.keys())
    if unknown:
        raise ValueError(f"characters {unknown} are not in the vocabulary {''.join(VOCABULARY[2:])}")
    return [_IDS[character] for character in text]


def decode(token_ids: list[int]) -> str:
    """Return the text of token ids, special tokens left out."""
    return "".join(VOCABULARY[token_id] for token_id in token_ids if token_id not in (PAD_ID, EOS_ID))


def save_tokenizer(path: Path) -> None:
    """Write the tokenizer into the folder ``path``, as transformers and vLLM load it."""
    tokenizer = Tokenizer(models.WordLevel(_IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)
    fast.save_pretrained(path)


def draw_operands(seed: int, index: int) -> list[int]:
    """Return the six digits, each 1 to 9, of prompt ``index``."""
    rng = random.Random(f"operands {seed} {index}")
    return [rng.randint(1, 9) for _ in range(NUM_OPERANDS)]


def write_prompt(operands: list[int]) -> str:
    return "+".join(map(str, operands)) + "="


def write_careful(operands: list[int]) -> str:
    """Return the exact response, one operand a line."""
    total, lines = operands[0], []
    for operand in operands[1:]:
        lines.append(f"{total}+{operand}={total + operand};")
        total += operand
    return "".join(lines) + f"#{total}"


def write_sloppy(operands: list[int], rng: random.Random) -> str:
    """Return a response with two operands a line that drops each carry with ``CARRY_DROP_PROBABILITY``."""
    total, lines = operands[0], []
    for start in range(1, len(operands), 2):
        pair = operands[start : start + 2]
        line = f"{total}+" + "+".join(map(str, pair))
        for operand in pair:
            has_carry = total % 10 + operand >= 10
            total += operand
            if has_carry and rng.random() < CARRY_DROP_PROBABILITY:
                total -= 10
        lines.append(f"{line}={total};")
    return "".join(lines) + f"#{total}"


def is_careful(response: str) -> bool:
    """Return whether a response has one line an operand."""
    return response.count(";") == NUM_OPERANDS - 1


def score_response(operands: list[int], token_ids: list[int]) -> float:
    """Return 1.0 when the number after the last ``#`` is the sum and the response ended, else 0.0.

    Args:
        operands: of the prompt.
        token_ids: of the response, its end token included where it has one.
    """
    if not token_ids or token_ids[-1] != EOS_ID:
        return 0.0
    _, mark, answer = decode(token_ids).rpartition("#")
    return float(bool(mark) and answer == str(sum(operands)))


@dataclass(frozen=True)
class CarrySamples:
    """The warm-start data: an endless list of prompts with a response in either style.

    Args:
        seed: of all draws.
        careful_share: probability of the careful style.
    """

    seed: int = 0
    careful_share: float = CAREFUL_SHARE

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        """Return (prompt ids, response ids with the end token) of sample ``index``."""
        operands = draw_operands(self.seed, index)
        rng = random.Random(f"response {self.seed} {index}")
        is_exact = rng.random() < self.careful_share
        response = write_careful(operands) if is_exact else write_sloppy(operands, rng)
        return encode(write_prompt(operands)), [*encode(response), EOS_ID]


@dataclass(frozen=True)
class CarryEnvironment:
    """The task as ``specco.rl.environment.Environment``: one turn, reward 1 for the right sum.

    Args:
        seed: of the prompts; another seed than the warm start's gives prompts that are new but for chance.
    """

    seed: int

    def make_prompt(self, group_id: int) -> list[int]:
        return encode(write_prompt(draw_operands(self.seed, group_id)))

    def answer_turn(self, trajectory: Trajectory) -> None:
        """Return None: the conversation is over after the policy's one turn."""

    def score(self, trajectory: Trajectory) -> float:
        return score_response(draw_operands(self.seed, trajectory.group_id), trajectory.response_ids)
