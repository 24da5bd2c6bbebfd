"""Random lengths and arrivals are reproducible."""

import numpy as np
import pytest

from server.cli.bench.workload import Lengths, arrivals, share


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_single_length_is_always_that_length():
    assert Lengths.parse("256").sample(5, rng()) == [256] * 5


def test_a_range_has_both_its_ends_and_nothing_outside():
    lengths = Lengths.parse("3-5").sample(500, rng())

    assert set(lengths) == {3, 4, 5}


def test_lengths_are_formatted_as_they_are_parsed():
    assert [str(Lengths.parse(text)) for text in ("256", "100-1024", "7-7")] == [
        "256",
        "100-1024",
        "7",
    ]


@pytest.mark.parametrize("text", ["", "0", "-5", "5-3", "a", "1-b", "1.5"])
def test_invalid_lengths_are_refused(text):
    with pytest.raises(ValueError, match=r"tokens|lengths"):
        Lengths.parse(text)


def test_arrivals_depend_only_on_the_seed():
    first = arrivals(50, 10.0, 1.0, rng(7))

    assert first == arrivals(50, 10.0, 1.0, rng(7))
    assert first != arrivals(50, 10.0, 1.0, rng(8))


def test_arrivals_begin_at_0_in_ascending_order():
    times = arrivals(100, 10.0, 0.5, rng())

    assert times[0] == 0.0
    assert times == sorted(times)


def test_poisson_arrivals_have_exponential_gaps_at_the_rate():
    gaps = np.diff(arrivals(20_001, 50.0, 1.0, rng()))

    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


def test_burstiness_below_1_gives_bursts_at_the_same_rate():
    gaps = np.diff(arrivals(20_001, 50.0, 0.25, rng()))

    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(
        2 / 50, rel=0.1
    )  # the gamma distribution's: mean / sqrt(shape)


def test_shares_differ_by_at_most_one():
    assert share(10, 4) == [3, 3, 2, 2]
    assert share(2, 3) == [1, 1, 0]
