"""Replaces flags of peers on a command line by those of Tessera, before the command line is parsed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from server.cli.peers.reading import Reading
from server.cli.peers.table import find_flag
from server.cli.peers.values import is_flag, truth

if TYPE_CHECKING:
    from server.cli.peers.table import Found


def known_name(name: str, known: Collection[str]) -> str:
    """Return the flag of Tessera that a name with underscores is; the name itself if there is none."""
    hyphens = name.replace("_", "-")
    return hyphens if name not in known and hyphens in known else name


def find_foreign(words: Sequence[str], known: Collection[str]) -> str | None:
    """Return the first flag of a peer that is none of the command's own; None if there is none."""
    for word in words:
        name = known_name(word.partition("=")[0], known)
        if word == "--":
            return None
        if is_flag(word) and name not in known and find_flag(name):
            return name
    return None


def take_out(words: Sequence[str], known: Collection[str]) -> tuple[list[str], Reading]:
    """Take the flags of peers out of a command line, with their values.

    Args:
        words: of the command line.
        known: all flags of the command; underscores in their names become hyphens.

    Returns:
        The other words, and what those that were taken out say.

    Raises:
        PeerNameError: a flag asks for something that Tessera does not have, or that has another name.
    """
    left, taken = _divide(words, known)
    reading = Reading()
    for _, found, _ in taken:
        reading.narrow(found)
    for name, found, text in taken:
        reading.read(name, found, text)
    return left, reading


def _divide(
    words: Sequence[str], known: Collection[str]
) -> tuple[list[str], list[tuple[str, list[Found], str | None]]]:
    left: list[str] = []
    taken: list[tuple[str, list[Found], str | None]] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            left += words[index - 1 :]
            break
        name, has_value, value = word.partition("=")
        name = known_name(name, known)
        if not is_flag(word) or name in known or not (found := find_flag(name)):
            left.append(name + has_value + value if is_flag(word) else word)
            continue
        text = value if has_value else None
        if text is None and index < len(words) and _has_value(found, words[index]):
            text = words[index]
            index += 1
        taken.append((name, found, text))
    return left, taken


def _has_value(found: Sequence[Found], following: str) -> bool:
    """Whether the following word is the value of a flag."""
    if is_flag(following):
        return False
    takes = {it.row.takes for it in found}
    if "value" in takes and not any(it.negated for it in found):
        return True
    # As a flag of Tessera of true or false; so a model may follow `--enable-auto-tool-choice`.
    return truth(following) is not None or ("optional" in takes and following == "auto")
