"""The commands that talk to a service: `run`, `ps`, `chat` and `complete`."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.command_groups.shared import settings_flags

if TYPE_CHECKING:
    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser

DEFAULT_TOKENS = 256
"""Most tokens of a continuation; OpenAI's default of 16 ends most texts in a word."""


def run_flags(parser: Parser) -> None:
    """Add the flags of `tessera run`."""
    from server.cli.client import options

    settings_flags(parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="to answer once, - for standard input; without one, a conversation",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    options.add_answer_flags(parser)


def run(call: Invocation) -> None:
    """Run `tessera run`."""
    from server.cli.command_settings import settings_of
    from server.cli.parsing.parser import PEERS
    from server.cli.parsing.setting_flags import MODEL, given_settings

    options = call.options
    of_peers = getattr(options, PEERS, None)  # such as -m
    by_flag = given_settings(options).keys() | (of_peers.given if of_peers is not None else {})
    if options.prompt is None and MODEL in by_flag:
        # `tessera run --model MODEL PROMPT`
        options.prompt, options.model = options.model, None
    settings = settings_of(options, "run")
    from server.cli.run import command

    command.run(options, settings, DEFAULT_TOKENS)


def ps_flags(parser: Parser) -> None:
    """Add the flags of `tessera ps`."""
    from server.cli.client import options

    parser.add_argument("target", nargs="?", metavar="URL", help="the same as --url")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options.add_server_flags(parser)


def ps(call: Invocation) -> None:
    """Run `tessera ps`."""
    from server.cli.client import ps

    ps.main(call.options)


def chat_flags(parser: Parser) -> None:
    """Add the flags of `tessera chat`."""
    from server.cli.client import chat, options

    chat.add_words(parser)
    options.add_flags(parser)


def chat(call: Invocation) -> None:
    """Run `tessera chat`."""
    from server.cli.client import chat

    chat.main(call.options)


def complete_flags(parser: Parser) -> None:
    """Add the flags of `tessera complete`."""
    from server.cli.client import complete, options

    complete.add_words(parser)
    options.add_flags(parser)


def complete(call: Invocation) -> None:
    """Run `tessera complete`."""
    from server.cli.client import complete

    call.options.max_tokens = call.options.max_tokens or DEFAULT_TOKENS
    complete.main(call.options)
