"""`tessera complete`: continues a text with a running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from server.cli.client.options import looks_like_url, split_target, target
from server.cli.client.session import Session, listed_name, write_answer
from server.cli.client.streams import Completions, GenerateStream, ServerError
from server.cli.output import INTERRUPTED, discard_output, fail
from server.client.address import DEFAULT_URL


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments."""
    parser.add_argument("target", nargs="?", metavar="URL|MODEL", help="of a running server")
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text; - or none reads standard input"
    )


def main(options: argparse.Namespace) -> None:
    """Write the continuation of a text to standard output; exits with status 1 if the server does not give one."""
    words = [word for word in (options.target, options.prompt) if word is not None]
    try:
        # One word is the prompt, unless it is a URL.
        if len(words) == 2 or (words and looks_like_url(words[0])):
            words = split_target(words, options)
    except ValueError as error:
        fail(str(error), "complete", status=2)
    prompt = words[0] if words and words[0] != "-" else _read_input()
    if not prompt:
        fail("the prompt is empty", "complete", status=2)
    try:
        asyncio.run(continue_text(prompt, options))
    except ServerError as error:
        fail(str(error), "complete")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # `tessera complete | head`
        discard_output()


async def continue_text(prompt: str, options: argparse.Namespace) -> None:
    """Write the continuation of a text to standard output as it arrives.

    Raises:
        ServerError: there is none.
    """
    session = Session(target(options), options.url or DEFAULT_URL)
    with contextlib.closing(session):
        models = await session.models()
        if models is None:
            route = GenerateStream()
            if options.model is not None:
                raise ServerError(
                    "the server has no /v1/completions, so that no model can be chosen"
                )
            parts = session.stream(route, route.body(prompt, options))
        else:
            completions = Completions()
            model = options.model and (listed_name(options.model, models) or options.model)
            model = model or next(iter(models), None)
            parts = session.stream(completions, completions.body(prompt, model, options))
        async with contextlib.aclosing(parts):
            await write_answer(parts, [])


def _read_input() -> str:
    if sys.stdin.isatty():
        print("the prompt, until Ctrl-D:", file=sys.stderr)
    return sys.stdin.read()
