"""The task "carry": its two styles, its reward, and that everything follows from (seed, index)."""

import random
import statistics

import pytest

from recipes.carry import (
    EOS_ID,
    MAX_RESPONSE_TOKENS,
    VOCAB_SIZE,
    CarrySamples,
    decode,
    draw_operands,
    encode,
    is_careful,
    score_response,
    write_careful,
    write_prompt,
    write_sloppy,
)


class Dropping(random.Random):
    """Drops the carries whose turn (from 0) is in ``turns``, keeps the others."""

    def __init__(self, turns):
        super().__init__(0)
        self.turns, self.turn = turns, -1

    def random(self):
        self.turn += 1
        return 0.0 if self.turn in self.turns else 1.0


def test_styles_are_as_written_down():
    assert write_prompt([8, 9, 9, 8, 7, 3]) == "8+9+9+8+7+3="
    assert write_careful([8, 9, 9, 8, 7, 3]) == "8+9=17;17+9=26;26+8=34;34+7=41;41+3=44;#44"
    # 4+9 carries (dropped: 3), 3+3 does not; 6+6 carries (dropped: 2), 2+8 carries (kept: 10); 10+2 does not
    assert write_sloppy([4, 9, 3, 6, 8, 2], Dropping({0, 1})) == "4+9+3=6;6+6+8=10;10+2=12;#12"
    assert write_sloppy([8, 9, 9, 8, 7, 3], Dropping(set())) == "8+9+9=26;26+8+7=41;41+3=44;#44"


def test_a_sloppy_response_is_right_when_no_carry_was_dropped():
    operands = [8, 9, 9, 8, 7, 3]
    assert score_response(operands, [*encode(write_sloppy(operands, Dropping(set()))), EOS_ID]) == 1.0
    assert score_response(operands, [*encode(write_sloppy(operands, Dropping({0}))), EOS_ID]) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("#44", 1.0),
        ("8+9=17;#44", 1.0),
        ("#4#44", 1.0),
        ("#44#4", 0.0),
        ("44", 0.0),
        ("#", 0.0),
        ("#44;", 0.0),
        ("#044", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_the_number_after_the_last_mark(response, reward):
    operands = [8, 9, 9, 8, 7, 3]
    assert score_response(operands, [*encode(response), EOS_ID]) == reward
    assert score_response(operands, encode(response)) == 0.0, "a response that did not end earns nothing"


def test_samples_follow_from_seed_and_index():
    assert [CarrySamples(seed=3)[i] for i in (5, 2, 5)] == [CarrySamples(seed=3)[i] for i in (5, 2, 5)]
    assert draw_operands(0, 1) != draw_operands(1, 1)
    assert draw_operands(0, 0) != draw_operands(0, 1)


def test_warm_start_data_holds_both_styles_as_stated():
    num_samples = 4000
    careful, sloppy_rewards = [], []
    for index in range(num_samples):
        prompt, response = CarrySamples()[index]
        operands = draw_operands(0, index)
        assert decode(prompt) == write_prompt(operands)
        assert response[-1] == EOS_ID
        assert len(response) <= MAX_RESPONSE_TOKENS
        assert max(prompt + response) < VOCAB_SIZE
        careful.append(is_careful(decode(response)))
        reward = score_response(operands, response)
        if careful[-1]:
            assert reward == 1.0
        else:
            sloppy_rewards.append(reward)
    # five standard errors of a share of 0.1
    assert abs(statistics.mean(careful) - 0.1) < 5 * (0.09 / num_samples) ** 0.5
    assert 0.08 < statistics.mean(sloppy_rewards) < 0.16


def test_unknown_characters_are_refused():
    with pytest.raises(ValueError, match=r"\['€'\] are not in the vocabulary"):
        encode("1+€")
    assert VOCAB_SIZE == 64
