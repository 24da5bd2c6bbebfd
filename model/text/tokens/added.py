"""Adds to a tokenizer the tokens that other files name, and makes special what they call so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import tokenizers

from model.errors import ModelError, TokenizerError
from model.json_input import read_json_object
from model.text.bounded.limits import check_added
from model.text.tokens.files import ADDED, CONFIG, TokenizerFiles

_MAX_CONFIG_BYTES: Final = 4 << 20


def add_tokens(library: tokenizers.Tokenizer, files: TokenizerFiles, folder: Path) -> None:
    """Add the tokens that tokenizer.json lacks, as transformers does.

    Those with an id are added first. A special token without one, which is no token yet, gets the next id if the model
    has such an id: it may have an embedding that was trained.

    Args:
        library: the tokenizer; changed.
        files: of the checkpoint.
        folder: the checkpoint.

    Raises:
        TokenizerError: a file is damaged, or a token cannot have its id.
    """
    file = folder / CONFIG
    stated = _stated(files, file)
    listed = sorted((i, text) for text, i in files.ids.items())
    check_added([*(token.content for _, token in stated), *files.ids, *files.special], file)
    known = library.get_added_tokens_decoder()
    _add(
        library,
        [(i, token) for i, token in stated if i not in known or known[i].special < token.special],
        file,
    )
    special = set(files.special)
    _add(
        library,
        [(i, _token(text, text in special)) for i, text in listed if library.token_to_id(text) is None],
        folder / ADDED,
    )  # fmt: skip
    known = library.get_added_tokens_decoder()
    ids = ((text, library.token_to_id(text)) for text in files.special if len(text) > 1)
    plain = [
        (text, token_id) for text, token_id in ids if token_id not in known or not known[token_id].special
    ]  # fmt: skip
    if plain:
        next_id, size = library.get_vocab_size(with_added_tokens=True), _vocab_size(folder)
        new = [text for text, token_id in plain if token_id is None][: max(0, size - next_id)]
        library.add_tokens(
            [_token(it, True) for it, token_id in plain if token_id is not None or it in new]
        )


def _token(text: str, is_special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=is_special, normalized=not is_special)


def _stated(files: TokenizerFiles, file: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Return the tokens of `added_tokens_decoder` by their ids."""
    try:
        entries = sorted((int(key), dict(value)) for key, value in files.added.items())
        return [(i, tokenizers.AddedToken(e.pop("content"), **e)) for i, e in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{file}: added_tokens_decoder is damaged: {error!r}") from error


def _add(
    library: tokenizers.Tokenizer, tokens: list[tuple[int, tokenizers.AddedToken]], file: Path
) -> None:
    """Add tokens that must get certain ids."""
    # At once, because the library's time for each call grows with the number of added tokens.
    library.add_tokens([token for _, token in tokens])
    for token_id, token in tokens:
        if (found := library.token_to_id(token.content)) != token_id:
            raise TokenizerError(
                f"{file}: added token {token.content!r} should have id {token_id}, but tokenizer.json gives it {found}"
            )


def _vocab_size(folder: Path) -> int:
    """Return the number of a model's logits that its config.json states; 0 if it states none."""
    try:
        config = read_json_object(folder, "config.json", _MAX_CONFIG_BYTES)
    except ModelError:
        return 0  # which is said where the file is needed
    sizes = (it.get("vocab_size") for it in _objects(config or {}))
    return next((size for size in sizes if type(size) is int), 0)


def _objects(config: dict[str, object]) -> Iterator[dict[str, object]]:
    yield config
    yield from (it for it in config.values() if isinstance(it, dict))
