"""`tessera completion`: scripts that complete the command line in a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import shtab

if TYPE_CHECKING:
    from server.cli.parsing.parser import Parser

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = frozenset({"MODEL", "FOLDER"})
_FILES = frozenset({"PATH", "FILE"})


def completion_script(parser: Parser, shell: str) -> str:
    """Return the script that completes a parser's commands, flags, values and paths.

    Args:
        parser: of the whole command line. Words for values say which of them are paths.
        shell: one of `SHELLS`.
    """
    for action in parser.walk():
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # shtab's own attribute
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # likewise
    return shtab.complete(parser, shell)
