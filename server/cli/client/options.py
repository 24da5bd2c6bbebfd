"""The flags that the commands share which talk to a server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from server.cli.client.http_client import Target
from server.cli.parsing.values import between, checked, count, whole
from server.cli.settings import client_api_key
from server.client.address import DEFAULT_URL, read_url

if TYPE_CHECKING:
    import argparse

    from server.cli.parsing.parser import Parser

_HOST_AND_PORT = re.compile(r"(localhost|[\w.-]*:\d+|\[[\da-fA-F:]+\]:\d+)(/.*)?")


def add_flags(parser: Parser) -> None:
    """Add the flags of a request to a running server."""
    add_server_flags(parser)
    parser.add_argument(
        "--model", metavar="NAME", help="to ask the server for (default: the first that it lists)"
    )
    add_answer_flags(parser)


def add_server_flags(parser: Parser) -> None:
    """Add the flags that name a running server."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        type=checked(read_url),
        metavar="URL",
        help=f"of the server (default: {DEFAULT_URL})",
    )
    server.add_argument(
        "--api-key",
        type=checked(_key),
        metavar="KEY",
        help="of the server (default: TESSERA_API_KEY)",
    )


def add_answer_flags(parser: Parser) -> None:
    """Add the flags of what is asked for, without those that name the server."""
    answer = parser.add_argument_group("answer")
    answer.add_argument("--max-tokens", type=count, metavar="N", help="most tokens to generate")
    answer.add_argument(
        "--temperature",
        type=between(0, 100),
        metavar="X",
        help="0 takes the most likely token, more varies the text (default: the server's)",
    )
    answer.add_argument("--seed", type=whole, metavar="N", help="makes the answer repeatable")
    answer.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends the answer where the model writes it; may be repeated",
    )


def split_target(words: list[str], options: argparse.Namespace) -> list[str]:
    """Take the server's URL, or else the name of a model, from the beginning of the words.

    Args:
        words: positional arguments.
        options: parsed flags; gets `url` and `model`.

    Returns:
        The other words.

    Raises:
        ValueError: the URL or the model is also given as another flag.
    """
    if not words:
        return words
    word = words[0]
    name, value = ("url", read_url(word)) if looks_like_url(word) else ("model", word)
    if getattr(options, name) not in (None, value):
        raise ValueError(f"two are given: {word} and --{name} {getattr(options, name)}")
    setattr(options, name, value)
    return words[1:]


def looks_like_url(word: str) -> bool:
    """Whether a word is a URL, a host and a port, or a colon and a port of this machine."""
    return "://" in word or _HOST_AND_PORT.fullmatch(word) is not None


def target(options: argparse.Namespace) -> Target:
    """Return the server that the flags name, with the headers of its requests."""
    return target_of(options.url or DEFAULT_URL, options.api_key or client_api_key())


def target_of(url: str, key: str | None) -> Target:
    """Return a server, with the headers of its requests; `key`: its API key, None for none."""
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    return Target.from_url(url, headers)


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text.strip()):
        raise ValueError("a key has printable ASCII characters only")
    return text.strip()
