"""The server and the model that the command line names."""

from argparse import Namespace

import pytest

from server.cli.client.options import looks_like_url, split_target
from server.client.address import read_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1", "http://a:1"),
        ("https://a/", "https://a"),
        ("http://a:1/v1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1"),
        ("http://a/prefix/v1", "http://a/prefix"),
        ("a:9000", "http://a:9000"),
        (":9000", "http://127.0.0.1:9000"),
        ("localhost", "http://localhost"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_may_lack_its_scheme_and_end_in_the_path_of_the_api(text, url):
    assert looks_like_url(text)
    assert read_url(text) == url


@pytest.mark.parametrize("word", ["gpt2", "Qwen/Qwen3-0.6B", "def f():", "a: 1", "12:30 is", ""])
def test_unknown_commands_are_no_urls(word):
    assert not looks_like_url(word)


def test_an_address_of_another_protocol_is_refused():
    with pytest.raises(ValueError, match="'ftp://a' is not an address"):
        read_url("ftp://a")


@pytest.mark.parametrize(
    ("words", "rest", "url", "model"),
    [
        ([], [], None, None),
        (["a:1"], [], "http://a:1", None),
        (["m"], [], None, "m"),
        (["a:1", "text"], ["text"], "http://a:1", None),
    ],
)
def test_the_first_word_is_a_url_or_a_model(words, rest, url, model):
    options = Namespace(url=None, model=None)

    assert split_target(words, options) == rest
    assert (options.url, options.model) == (url, model)


def test_a_second_model_is_refused():
    with pytest.raises(ValueError, match="m and --model n"):
        split_target(["m"], Namespace(url=None, model="n"))
