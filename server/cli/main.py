"""Entry point of the `tessera` command. For `tessera serve` it starts the engine process before any slow import."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from server.cli.deferred_signals import deferred_signals
from server.cli.exit_deadline import exit_bounded
from server.cli.init_process import adopt_orphans
from server.cli.output import INTERRUPTED, fail
from server.engine.link.spawn import LinkedProcess, end, ending_signals, spawn, use_safe_path
from server.standard_error import drain, never_wait

if TYPE_CHECKING:
    from collections.abc import Sequence


_STANDARD_ERROR = 2
_LINES_SECONDS = 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tessera` command.

    Args:
        arguments: without the program's name; None means those of the command line.
    """
    began = time.perf_counter()
    _open_standard_streams()
    if arguments is None:
        adopt_orphans()
    use_safe_path()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments):
            _serve(arguments, began)
        else:
            from server.cli import commands  # noqa: PLC0415 - slow

            commands.main(arguments, began)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _open_standard_streams() -> None:
    """Open those that are closed, as by `2>&-`, so that no file or connection gets their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - stays open


def serve_main() -> None:
    """Entry point of the `tessera-server` command: `tessera serve`, under a name that other servers have."""
    sys.argv.insert(1, "serve")
    main()


def _serve(arguments: list[str], began: float) -> None:
    """Start the engine process, which imports PyTorch, and read the settings meanwhile."""
    never_wait()
    engine: LinkedProcess | None = None
    ending = ending_signals()

    def leave(*_: object) -> None:
        # No exception: within the import of an extension module it would become another one, with a traceback. There is
        # nothing to clean up but the engine process.
        # `end` must not run within itself either: it would wait for its own lock.
        with deferred_signals(*ending):
            if engine is not None:
                end(engine)
            drain(_LINES_SECONDS)
            os._exit(0)

    # Until `server.cli.serve` has been imported.
    for number in ending:
        signal.signal(number, leave)
    try:
        with deferred_signals(*ending):
            engine = spawn()
    except OSError as error:
        fail(f"the engine process cannot be started: {error}", "serve")
    with exit_bounded():
        try:
            from server.cli import commands  # noqa: PLC0415 - slow

            commands.main(arguments, began, engine)
        finally:
            with deferred_signals(*ending):
                end(engine)


if __name__ == "__main__":
    main()
