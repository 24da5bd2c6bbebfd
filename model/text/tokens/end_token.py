"""The record of a token that ends a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class EndToken(msgspec.Struct, frozen=True):
    """A token that ends a generation.

    Attributes:
        id: token id.
        text: its name in the vocabulary; empty for an id without a token.
        sources: the files that name it, and `chat template` if it ends the assistant's turns.
    """

    id: int
    text: str
    sources: tuple[str, ...]


def stated_ends(ids_by_file: Mapping[str, Iterable[int]]) -> tuple[EndToken, ...]:
    """Return the end tokens that a model's configuration states, in order.

    Args:
        ids_by_file: token ids by the name of the file.
    """
    sources: dict[int, tuple[str, ...]] = {}
    for file, ids in ids_by_file.items():
        for token_id in dict.fromkeys(ids):
            sources[token_id] = (*sources.get(token_id, ()), file)
    return tuple(EndToken(token_id, "", files) for token_id, files in sources.items())
