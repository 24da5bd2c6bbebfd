"""How many tokens sequences are expected to generate."""

import pytest

from server.engine.core.queue.expected_output import OutputMeans, expected_output

UNLIMITED = 40_000


def ended(*sequences):
    means = OutputMeans()
    for limit, num_tokens in sequences:
        means.add(limit, num_tokens)
    return means.means


@pytest.mark.parametrize("means", [[], ended()])
def test_before_any_has_ended_a_limit_counts_as_a_short_answer(means):
    assert expected_output(8, means) == 8
    assert expected_output(UNLIMITED, means) == 256


def test_sequences_without_a_limit_of_their_own_are_expected_to_stop_as_others_did():
    means = ended(*[(UNLIMITED, 200)] * 100, *[(10, 10)] * 100)

    assert expected_output(UNLIMITED, means) == 200
    assert expected_output(10, means) == 10
    assert expected_output(15, means) == 10, "of one class"


def test_a_class_of_limits_of_which_none_has_ended_has_the_mean_of_all():
    means = ended(*[(100, 60)] * 200)

    assert expected_output(UNLIMITED, means) == 60
    assert expected_output(20, means) == 20


def test_a_mean_follows_the_newest_sequences():
    means = ended(*[(UNLIMITED, 30_000)] * 100, *[(UNLIMITED, 100)] * 100)

    assert expected_output(UNLIMITED, means) == pytest.approx(100 + 29_900 * 0.95**100, abs=1)


def test_at_least_one_token_is_expected():
    assert expected_output(50, ended(*[(50, 0)] * 10)) == 1
