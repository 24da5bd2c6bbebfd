from __future__ import annotations

import pytest

from server.engine.core.request import FinishReason
from tests.engine.core.bookkeeping import banned_ids, make_sequence, output_of


def test_a_new_sequence_has_its_prompt_and_no_blocks():
    sequence = make_sequence(3, [5, 6, 7], max_new_tokens=2)

    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.max_num_tokens) == (3, 3, 5)
    assert sequence.num_output_tokens == 0
    assert sequence.block_table == []
    assert sequence.finish_reason is None
    assert repr(sequence) == (
        "Sequence(request_id=3, WAITING, num_tokens=3, num_computed_tokens=0, block_table=[])"
    )


def test_appending_does_not_change_the_request():
    sequence = make_sequence(0, [5, 6])
    prompt = sequence.token_ids.copy()

    sequence.append(9)

    assert sequence.token_ids == [*prompt, 9]
    assert output_of(sequence) == [9]
    assert sequence.num_output_tokens == 1


@pytest.mark.parametrize(
    ("token_id", "max_new_tokens", "reason"),
    [
        pytest.param(8, 4, None, id="an ordinary token"),
        pytest.param(0, 4, FinishReason.EOS, id="the model's end token"),
        pytest.param(1, 4, FinishReason.STOP, id="a stop token of the request"),
        pytest.param(2, 4, FinishReason.EOS, id="a token that is both"),
        pytest.param(8, 1, FinishReason.LENGTH, id="the last token allowed"),
        pytest.param(1, 1, FinishReason.STOP, id="a stop token as the last one allowed"),
        pytest.param(2, 1, FinishReason.EOS, id="an end token as the last one allowed"),
    ],
)
def test_the_finish_reason_is_the_most_specific_one(token_id, max_new_tokens, reason):
    sequence = make_sequence(0, [5], max_new_tokens, eos_token_ids=(0, 2), stop_token_ids=(1, 2))

    assert sequence.append(token_id) is reason


def test_end_tokens_are_banned_below_the_minimum_length_and_do_not_end_the_sequence():
    sequence = make_sequence(0, [5], 9, min_new_tokens=2, eos_token_ids=(0,), stop_token_ids=(1,))

    assert banned_ids(sequence) == (0, 1)
    assert sequence.append(0) is None
    assert banned_ids(sequence) == (0, 1)
    assert sequence.append(1) is None
    assert banned_ids(sequence) == ()
    assert sequence.append(1) is FinishReason.STOP


def test_the_length_limit_ends_a_sequence_even_below_its_minimum():
    sequence = make_sequence(0, [5], 1, min_new_tokens=5, eos_token_ids=(0,))

    assert sequence.append(0) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, True),
        ({"temperature": 0.0, "eos_token_ids": (1,), "prompt_logprobs": True}, True),
        ({"temperature": 0.1}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, False),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0.0, "bad_words": ((3,),)}, False),
        ({"temperature": 0.0, "logprobs": True}, True),
        ({"temperature": 0.0, "top_logprobs": 2}, False),
        ({"temperature": 0.0, "min_new_tokens": 1}, False),
    ],
)
def test_only_the_argmax_of_unmodified_logits_needs_no_sampler(sampling, expected):
    assert make_sequence(0, 3, **sampling).is_argmax is expected


def test_a_greedy_sequence_needs_a_sampler_up_to_its_minimum_of_tokens():
    sequence = make_sequence(0, 3, temperature=0.0, min_new_tokens=2, eos_token_ids=(1,))
    needed = []
    for _ in range(3):
        needed.append(not sequence.is_argmax)
        sequence.num_tokens_in_flight += 1

    assert needed == [True, True, False]
