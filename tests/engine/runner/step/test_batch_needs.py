"""What the decode rows of a step need, read once while it cannot change."""

from server.engine.core.step import DecodeRows, ScheduledSequence
from server.engine.runner.step.batch_needs import BatchNeeds, DecodeNeeds, needs_of_prompts
from tests.engine.core.bookkeeping import make_sequence


def rows(*sequences):
    return DecodeRows.of([ScheduledSequence(s, s.num_tokens - 1, 1, 1) for s in sequences])


def later(decode):
    for sequence in decode.batch.sequences:
        sequence.append(5)
    return DecodeRows(decode.batch, [start + 1 for start in decode.starts], decode.num_sampling)


def test_a_minimum_length_needs_the_sampler_until_it_is_reached():
    needs = DecodeNeeds()
    plain = make_sequence(1, 3, temperature=0.0)
    decode = rows(plain, make_sequence(2, 3, temperature=0.0, min_new_tokens=2))

    found = []
    for _ in range(4):
        found.append(needs.of(decode).all_argmax)
        decode = later(decode)

    assert found == [False, False, True, True]


def test_a_prompt_is_scored_before_its_first_token_only():
    needs = DecodeNeeds()
    decode = rows(make_sequence(1, 3, temperature=0.0, prompt_logprobs=True))

    assert needs.of(decode) == BatchNeeds(all_argmax=True, any_scored=True, logprobs=False)
    assert not needs.of(later(decode)).any_scored


def test_another_batch_is_read_again():
    needs = DecodeNeeds()
    greedy = rows(make_sequence(1, 3, temperature=0.0))

    assert needs.of(greedy).all_argmax
    assert not needs.of(rows(make_sequence(1, 3, temperature=1.0))).all_argmax
    assert needs.of(greedy).all_argmax


def test_two_parts_of_a_step_need_what_either_does():
    greedy, sampled = (make_sequence(i, 3, temperature=float(i)) for i in (0, 1))
    reporting = make_sequence(2, 3, temperature=0.0, logprobs=True)

    def of(sequence, num_logits=1):
        return needs_of_prompts([ScheduledSequence(sequence, 0, 3, num_logits)])

    assert (of(greedy) | of(reporting)) == BatchNeeds(
        all_argmax=True, any_scored=False, logprobs=True
    )
    assert not (of(greedy) | of(sampled)).all_argmax
    assert of(sampled, num_logits=0).all_argmax  # nothing is sampled yet
