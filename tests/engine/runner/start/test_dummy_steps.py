"""Dummy steps stay within all limits and reach each of them."""

import dataclasses

import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.runner.start.dummy_steps import (
    crowds,
    draft,
    few_rows,
    first_steps,
    largest_steps,
    prompts,
    sampling_ways,
    unsampled_token,
)

S = 16


def limits(seqs=8, tokens=64, model_len=256):
    return SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=model_len
    )


def members(output):
    return (*output.decode, *output.prefill)


def assert_sound(output, config, length):
    """Assert that all positions and blocks exist in a cache of any size."""
    for s in members(output):
        assert s.start >= 0
        assert s.num_tokens >= 1
        assert s.start + s.num_tokens <= min(length, s.sequence.num_tokens)
        assert set(s.sequence.block_table) == {0}
        assert len(s.sequence.block_table) * S >= s.start + s.num_tokens
    assert len(members(output)) <= config.max_num_seqs
    assert output.num_tokens <= config.max_num_batched_tokens


@pytest.mark.parametrize("length", [2, 3, 65, 256])
@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_a_prompt_and_a_token_reach_the_given_length(length, tokens):
    config = limits(tokens=tokens)
    prefill, decode = first_steps(length, config, S)

    for output in (prefill, decode):
        assert_sound(output, config, length)
        assert max(s.start + s.num_tokens for s in members(output)) == length
    assert prefill.prefill
    assert not prefill.decode
    assert decode.decode
    assert not decode.prefill


@pytest.mark.parametrize("length", [2, 65, 256])
def test_an_unsampled_token_is_the_last_of_its_sequence(length):
    output = unsampled_token(length, S)

    assert_sound(output, limits(), length)
    assert [(s.start, s.num_tokens, s.num_logits) for s in output.decode] == [(length - 1, 1, 0)]


def test_a_draft_is_in_a_context_of_two_tokens():
    output = draft(S)

    assert_sound(output, limits(tokens=2, model_len=2, seqs=1), 2)
    assert (output.num_tokens, output.decode.num_logits, output.decode.drafts) == (2, 2, [(0,)])


@pytest.mark.parametrize(
    ("seqs", "tokens", "model_len", "decoded", "prompts"),
    [
        (1, 64, 256, [], [2, 4, 64]),
        (2, 64, 256, [2], [4, 64]),
        (48, 64, 256, [2, 4], [64]),
        (64, 64, 256, [2, 4, 64], []),
        (2, 8, 256, [2], [4, 8]),
        (2, 64, 32, [2], [4, 64]),
        (2, 64, 31, [2], [4, 62]),
        (16, 64, 8, [2, 4], [64]),
        (1, 1, 256, [1], []),
    ],
)
def test_steps_of_some_tokens_are_decode_steps_or_few_prompts(
    seqs, tokens, model_len, decoded, prompts
):
    config = limits(seqs, tokens, model_len)
    outputs = list(few_rows((2, 4, 64), config, S))

    for output in outputs:
        assert_sound(output, config, max(2, config.max_model_len))
    assert [len(output.decode) for output in outputs if output.decode] == decoded
    assert [output.num_tokens for output in outputs if output.prefill] == prompts
    assert all(len(members(output)) == output.num_tokens for output in outputs if output.decode)
    for output in outputs:
        assert output.decode or len(output.prefill) == -(-output.num_tokens // model_len)


def test_steps_of_prompts_alone_have_as_many_tokens_as_their_own_limit_allows():
    config = dataclasses.replace(limits(2, 64, 256), max_prefill_tokens=512)
    outputs = list(few_rows((128, 1024), config, S))

    assert [output.num_tokens for output in outputs] == [128, 512]
    assert [len(output.prefill) for output in outputs] == [1, 2]


def test_prompts_have_the_numbers_of_tokens_that_the_limits_allow():
    config = limits(tokens=64, model_len=4)
    outputs = list(prompts((2, 4, 8), config, S))

    for output in outputs:
        assert_sound(output, config, config.max_model_len)
    assert [output.num_tokens for output in outputs] == [2, 4]
    assert all(len(output.prefill) == 1 and not output.decode for output in outputs)


def test_sampling_steps_cover_filters_and_penalties():
    outputs = list(sampling_ways(S))

    for output in outputs:
        assert_sound(output, limits(seqs=1, tokens=1), 2)
    ways = [output.decode[0].sequence.sampling for output in outputs]
    assert all(way.temperature > 0 for way in ways)
    kinds = {(way.top_k > 0, way.repetition_penalty != 1) for way in ways}
    assert len(kinds) == len(ways) == 4


@pytest.mark.parametrize(
    ("seqs", "counts"), [(1, [1]), (2, [1, 2]), (48, [1, 2, 4, 8, 16, 32, 64])]
)
def test_both_phases_are_planned_for_every_power_of_two_up_to_the_limit(seqs, counts):
    outputs = list(crowds(200, limits(seqs=seqs), S))

    assert [len(o.decode) for o in outputs if o.decode] == counts
    assert [len(o.prefill) for o in outputs if o.prefill] == counts
    assert all(max(s.start + s.num_tokens for s in members(o)) == 200 for o in outputs)


@pytest.mark.parametrize(
    ("seqs", "tokens", "length"),
    [(1, 1, 2), (8, 8, 256), (8, 64, 256), (8, 64, 5), (64, 2048, 2048), (3, 1000, 100)],
)
def test_the_largest_step_reaches_the_limits_of_sequences_and_tokens(seqs, tokens, length):
    config = limits(seqs, tokens, max(2, length))
    (output,) = largest_steps(length, config, vocab_size=4096, block_size=S)

    assert_sound(output, config, length)
    assert len(members(output)) == seqs
    assert output.num_tokens == min(tokens, seqs * length)
    assert all(s.num_logits and s.sequence.sampling.top_k == 4096 for s in members(output))
    assert all(s.num_tokens == 1 for s in output.decode)
    assert all(s.num_tokens > 1 for s in output.prefill)
    # PyTorch's attention copies the keys of every decoding sequence.
    assert all(s.start + 1 == config.max_model_len for s in output.decode)


@pytest.mark.parametrize(
    ("seqs", "budget", "length", "prompts"),
    [
        (64, 4096, 2048, [2048, 2048]),
        (64, 4096, 1500, [1500, 1500, 1096]),
        (2, 4096, 1500, [1500, 1500]),
        (8, 257, 256, [256]),
    ],
)
def test_another_largest_step_has_prompts_alone(seqs, budget, length, prompts):
    config = dataclasses.replace(limits(seqs, 128, length), max_prefill_tokens=budget)
    first, second = largest_steps(length, config, vocab_size=4096, block_size=S)

    assert first.decode
    assert first.num_tokens == 128
    assert not second.decode
    assert [s.num_tokens for s in second.prefill] == prompts
    assert second.num_tokens <= budget
