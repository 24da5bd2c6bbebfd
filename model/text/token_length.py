"""Bounds how much text one token can stand for, so that a text can be known to be too long before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import pre_tokenizers

# Canonical composition shortens U+1FBE U+0308 U+0301, seven bytes, to U+0390 with two; no sequence by a larger factor.
_COMPOSITION: Final = 4
_UNICODE_FORMS: Final = ("NFC", "NFD")
_KEEPING: Final = ("ByteLevel", "Metaspace", "Digits")


def longest_token(library: tokenizers.Tokenizer) -> int | None:
    """Return the largest number of UTF-8 bytes of a text that one token can stand for.

    Returns:
        None if there is no bound that is certain: the tokenizer drops or merges text (white space around added tokens,
        runs of unknown characters), or has a step that this function does not know.
    """
    added = library.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    factor = _shortening(_state(library.normalizer))
    steps = _state(library.pre_tokenizer)
    if factor is None or not _keeps_text(steps):
        return None
    vocabulary = library.get_vocab(with_added_tokens=True)
    byte_level = _has_byte_level(steps)
    if byte_level:
        if not _is_bpe(library) or not vocabulary.keys() >= set(
            pre_tokenizers.ByteLevel.alphabet()
        ):
            return None
    elif not _falls_back_to_bytes(library, vocabulary):
        return None
    names = {token.content for token in added}
    # Each character of a byte-level token stands for one byte.
    sizes = (
        len(token) if byte_level and token not in names else len(token.encode())
        for token in vocabulary
    )
    return factor * max(sizes, default=1)


def _state(step: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a class of the library
    """Return a step's part of tokenizer.json; empty for none."""
    return {} if step is None else json.loads(step.__getstate__())


def _shortening(normalizer: Mapping[str, Any]) -> int | None:
    """Return the factor by which a normalizer can shorten text; None if it is not known."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(parts)}:
            product = 1
            for part in parts:
                factor = _shortening(part)
                if factor is None:
                    return None
                product *= factor
            return product
        case {"type": kind} if kind in _UNICODE_FORMS:
            return _COMPOSITION
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
    return None if normalizer else 1


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer is known to drop nothing."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps_text, parts))
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
    return not step or step.get("type") in _KEEPING


def _has_byte_level(step: Mapping[str, Any]) -> bool:
    parts = step.get("pretokenizers", [step])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _is_bpe(library: tokenizers.Tokenizer) -> bool:
    return isinstance(library.model, tokenizers.models.BPE)


def _falls_back_to_bytes(library: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Return whether unknown characters become one token for each of their bytes."""
    if not _is_bpe(library) or not library.model.byte_fallback:
        return False
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
