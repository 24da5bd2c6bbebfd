"""Regular expressions of strangers: those that match in bounded time are read."""

import pytest

from model.errors import UnsupportedModelError
from model.patterns import compiled

NAME = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r".*self_attn\.(q|k|v|o)_proj$", True),
        (r"model\.layers\.\d+\.self_attn.*", True),
        (r"model.layers.(0|1|2|3|4|5|6|7|8|9|10|11)\..*", True),
        (r"model\.layers\.1[0-9*+?|(]\.", True),
        (r"(?!.*mlp).*", True),
        (r"(?:model\.)?layers", True),
        (r".{0,5}\.layers", True),
        (r".*?mlp", False),
        ("lm_head", False),
    ],
)
def test_patterns_of_checkpoints_are_matched_from_the_start_of_a_name(pattern, matches):
    assert bool(compiled(pattern).match(NAME)) == matches


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+$",
        "(a|a)*b",
        "((m))+x",
        "(?:.*){2,9}x",
        "m?" * 40 + "x",
        "(m|m)" * 40,
        ".*.*.*.*.*x",
        "[a-z.]+" * 5 + "!",
    ],
)
def test_a_pattern_that_could_take_too_many_steps_is_refused(pattern):
    with pytest.raises(UnsupportedModelError, match="may take too many steps"):
        compiled(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "is no regular expression"),
        ("*a", "is no regular"),
        ("a" * 1001, "has 1001 characters; at most 1000"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, message):
    with pytest.raises(UnsupportedModelError, match=message):
        compiled(pattern)
