"""Conversions of other servers' values."""

import pytest

from server.cli.peers.forms import named_adapters, off, on
from server.cli.peers.values import scaled_number, tessera_value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4k", "4000"), ("4K", "4096"), ("25.6k", "25600"), ("1m", "1000000"), ("1M", "1048576"), ("2g", "2000000000"),
        ("32768", "32768"), ("1.5K", "1.5K"), ("1.0005k", "1.0005k"), ("k", "k"), ("-1", "-1"), ("4kb", "4kb"),
        ("²k", "²k"),
    ],
)  # fmt: skip
def test_numbers_have_units_as_in_vllm_and_other_texts_stay(text, number):
    assert scaled_number(text) == number


@pytest.mark.parametrize("text", [None, "true", "1", "on", "Enabled"])
def test_a_flag_without_a_value_and_several_texts_are_true(text):
    assert (on(text), off(text)) == ("true", "false")


@pytest.mark.parametrize(
    ("text", "adapters"),
    [
        ("org/sql", "org/sql=org/sql"),
        ("sql=org/sql, chat=/adapters/chat/", "sql=org/sql,chat=/adapters/chat/"),
        ("/adapters/chat/ a=b", "chat=/adapters/chat/,a=b"),
        ("", None),
        (None, None),
    ],
)
def test_adapters_without_a_name_get_that_of_their_repository_or_folder(text, adapters):
    assert named_adapters(text) == adapters


def test_a_text_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ValueError, match="true or false"):
        on("maybe")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "BF16", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2", "fp8_e5m2"),
        ("generation_config", "vllm", "none"),
        ("max_model_len", "32K", "32768"),
        ("port", "8k", "8k"),
        ("model", "half", "half"),
        ("model", "org/Name", "org/Name"),
    ],
)
def test_values_are_those_of_the_setting(setting, text, value):
    assert tessera_value(setting, text) == value
