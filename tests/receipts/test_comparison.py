import pytest

from server.engine.core.request import FinishReason
from server.receipts.comparison import Computed, compare
from server.receipts.record import logprob_digest
from tests.receipts.make import make_output

ROWS = [(-0.5, ()), (-0.25, ())]


def computed(tokens, reason=FinishReason.LENGTH, **options):
    return Computed(token_ids=tokens, finish_reason=reason, **options)


@pytest.mark.parametrize(
    ("output", "found", "words"),
    [
        (make_output(), computed([4, 5]), None),
        (make_output(), computed([4, 6]), "differs at token 1: 6 instead of 5"),
        (make_output(), computed([3, 6]), "differs at token 0: 3 instead of 4"),
        (make_output(), computed([4], FinishReason.EOS), "differs at token 1: the end (eos) instead of 5"),
        (make_output(), computed([4, 5, 6], None), "differs at token 2: 6 instead of the end (length)"),
        (make_output(), computed([4, 5], FinishReason.EOS), "differs after the last token: the end (eos)"),
        (make_output(finish_reason="eos"), computed([4, 5], FinishReason.EOS), None),
        (make_output(finish_reason="stop"), computed([4, 5], FinishReason.STOP), None),
        (make_output(finish_reason="eos"), computed([4, 5]), "the end (length) instead of the end (eos)"),
        (make_output(), computed([], None, error="too long"), "cannot be computed: too long"),
        (make_output(), computed([4, 7], None, error="late"), "differs at token 1: 7 instead of 5"),
        # What ends an output from outside may end it at any token.
        (make_output(finish_reason="stop_string"), computed([4, 5], None), None),
        (make_output(finish_reason="stop_string"), computed([4, 5, 6], None), None),
        (make_output(finish_reason="timeout"), computed([4, 5], FinishReason.EOS), None),
        (make_output(finish_reason="timeout"), computed([4, 6], None), "differs at token 1: 6 instead of 5"),
        (make_output(finish_reason="timeout"), computed([4], FinishReason.EOS), "token 1: the end (eos)"),
    ],
)  # fmt: skip
def test_the_first_difference_is_found(output, found, words):
    difference = compare(output, found)

    assert (difference is None) == (words is None)
    assert words is None or words in difference


def test_log_probabilities_are_compared_bit_by_bit_where_the_receipt_has_them():
    output = make_output(logprobs=logprob_digest(ROWS))

    assert compare(output, computed([4, 5], logprobs=ROWS)) is None
    assert compare(make_output(), computed([4, 5], logprobs=[])) is None
    wrong = computed([4, 5], logprobs=[ROWS[0], (-0.25000000000000006, ())])
    assert compare(output, wrong) == "differs in its log-probabilities; its tokens are equal"


def test_those_after_a_stop_string_do_not_count():
    output = make_output(finish_reason="stop_string", logprobs=logprob_digest(ROWS))
    found = computed([4, 5, 6], None, logprobs=[*ROWS, (-1.0, ())])

    assert compare(output, found) is None


def test_log_probabilities_of_the_prompt_are_compared_too():
    output = make_output(prompt_logprobs=logprob_digest(ROWS))

    assert compare(output, computed([4, 5], prompt_logprobs=ROWS)) is None
    assert "of its prompt" in compare(output, computed([4, 5], prompt_logprobs=ROWS[:1]))
    assert "of its prompt" in compare(output, computed([4, 5]))


def test_tokens_suffice_once_the_end_is_certain():
    assert not computed([4, 5]).suffices_for(make_output())
    assert computed([4, 5, 6]).suffices_for(make_output())
    assert computed([4, 5]).suffices_for(make_output(finish_reason="stop_string"))
