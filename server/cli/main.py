"""The command's first lines: `tessera serve` is on its way before anything is imported. Knows of no other command."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tessera` command.

    Args:
        arguments: without the program's name; None takes the command line's.
    """
    began = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments):
        _serve(arguments[1:], began)
    else:
        from server.cli import commands  # noqa: PLC0415 - takes a while

        commands.main(arguments, began)


def _serve(arguments: list[str], began: float) -> None:
    """Start the process that imports PyTorch, then find out what it is to serve."""
    from server.engine.link.spawn import EngineStartError, end, spawn  # noqa: PLC0415 - `serve` alone

    try:
        engine = spawn()
    except EngineStartError as error:
        print(f"tessera serve: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        from server.cli import serve as serve_command  # noqa: PLC0415 - beside PyTorch

        serve_command.main(arguments, engine, began)
    finally:
        end(engine)


if __name__ == "__main__":
    main()
