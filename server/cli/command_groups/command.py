"""The records of a command: a row of the table, and what a command runs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from server.cli.parsing.parser import Parser
    from server.engine.link.spawn import LinkedProcess


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a command runs with.

    Attributes:
        options: the parsed flags.
        arguments: all arguments after `tessera`.
        began: `time.perf_counter()` at the start of the process.
        engine: an engine process that is starting already; None if there is none.
    """

    options: argparse.Namespace
    arguments: Sequence[str]
    began: float
    engine: LinkedProcess | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table of commands.

    Attributes:
        summary: one line for the list of commands.
        add_flags: completes the command's parser.
        run: runs the command; None for a group of commands.
        description: of its help text; empty for the summary.
        usage: words after the command's name.
        aliases: other names of the command.
    """

    summary: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Invocation], None] | None
    description: str = ""
    usage: str = "[flags]"
    aliases: tuple[str, ...] = ()
