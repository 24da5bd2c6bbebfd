"""Types of flags' values."""

import argparse

import pytest

from server.cli.parsing import values


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (values.natural, "0", 0),
        (values.count, "7", 7),
        (values.positive, "0.5", 0.5),
        (values.whole, "-3", -3),
        (values.between(0, 2), "2", 2.0),
        (values.between(0, 2), "0", 0.0),
    ],
)
def test_a_value_within_its_limits_is_read(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (values.natural, "-1", "'-1' is not a whole number"),
        (values.count, "0", "at least 1"),
        (values.positive, "inf", "more than 0"),
        (values.positive, "x", "'x' is not a number"),
        (values.whole, "1.5", "'1.5' is not a whole number"),
        (values.between(0, 2), "2.1", "from 0 to 2"),
        (values.between(0, 2), "nan", "from 0 to 2"),
    ],
)
def test_another_value_is_refused_with_the_limits(read, text, words):
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        read(text)
