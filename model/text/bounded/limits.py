"""Limits of what a tokenizer.json may hold, and which tokenizers need little time for any text.

The tokenizers library follows a file without limits: one of a few kilobytes can turn each character into 2**40, or hold
a pattern that takes hours for one line. What no tokenizer in use needs is refused. What is only unusual is used, in
another process (`model.text.bounded.processes`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from model.errors import TokenizerError
from model.json_input import shorten
from model.text.bounded.patterns import MAX_SEARCH_STEPS, steps_at_a_place

MAX_VOCABULARY: Final = 2_000_000
"""Tokens, and merges. The largest vocabularies in use have a million tokens."""
MAX_ADDED_TOKENS: Final = 100_000
MAX_ADDED_CHARACTERS: Final = 4_000_000
"""Of all added tokens together; the library takes 0.3 us for each when it reads them."""
MAX_TOKEN_CHARACTERS: Final = 4_096
MAX_STEPS: Final = 64
"""Steps of a normalizer, a pre-tokenizer, a post-processor or a decoder."""
MAX_TEXT_CHARACTERS: Final = 1_000
"""Of a text that a step searches for or inserts, and of a pattern."""
MAX_INSERTED_TOKENS: Final = 1_000
"""Tokens that a post-processor adds to a text."""
MAX_GROWTH: Final = 1_000
"""Factor by which the steps may lengthen a text."""

_LINEAR_GROWTH: Final = 128
_LINEAR_WORD: Final = 1_000
_LINEAR_UNIGRAM_BYTES: Final = 64
"""The Unigram model takes a time proportional to the number of prefixes of a token that are tokens too."""

_GROWTH: Final = {
    # In bytes of UTF-8, of the worst character. Source: Unicode Standard Annex 15, section 9 (maximum expansion).
    "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 5, "ByteLevel": 2, "Metaspace": 3,
    "Nmt": 1, "Strip": 1, "StripAccents": 1, "Whitespace": 1, "WhitespaceSplit": 1, "Punctuation": 1, "Digits": 1,
    "BertPreTokenizer": 1, "UnicodeScripts": 1, "CharDelimiterSplit": 1, "FixedLength": 1, "ByteFallback": 1,
    "Fuse": 1, "BPEDecoder": 1, "WordPiece": 2, "CTC": 1,
}  # fmt: skip
_PARTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of the cost of tokenizing.

    Attributes:
        growth: factor by which the steps can lengthen a text, in bytes.
        is_linear: whether the time for any text is known to be nearly proportional to its length.
    """

    growth: float = 1.0
    is_linear: bool = True


class _Model(msgspec.Struct):
    vocab: dict[str, Any] | list[Any] = {}
    merges: list[Any] = []


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[dict[str, Any]] | None = None


def check_file(text: str, file: Path) -> None:
    """Check the sizes of a tokenizer.json before the library reads it.

    Raises:
        TokenizerError: it is not the JSON of a tokenizer, or is beyond a limit.
    """
    try:
        content = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from None
    vocabulary, added = content.model.vocab, content.added_tokens or ()
    _check(len(vocabulary), MAX_VOCABULARY, f"{file}: tokens of the vocabulary")
    _check(len(content.model.merges), MAX_VOCABULARY, f"{file}: merges")
    names = vocabulary if isinstance(vocabulary, dict) else map(_first, vocabulary)
    longest = max(map(len, names), default=0)
    _check(longest, MAX_TOKEN_CHARACTERS, f"{file}: characters of the longest token")
    check_added([entry.get("content") for entry in added], file)


def check_added(contents: list[object], file: Path) -> None:
    """Check the added tokens of a file.

    Raises:
        TokenizerError: they are beyond a limit.
    """
    sizes = [len(content) for content in contents if isinstance(content, str)]
    _check(len(contents), MAX_ADDED_TOKENS, f"{file}: added tokens")
    _check(max(sizes, default=0), MAX_TEXT_CHARACTERS, f"{file}: characters of an added token")
    _check(sum(sizes), MAX_ADDED_CHARACTERS, f"{file}: characters of all added tokens")


def check_library(library: tokenizers.Tokenizer, file: Path) -> Bounds:
    """Check the steps of a tokenizer that was read.

    The library's own form of them is checked, since it reads forms of older versions too.

    Raises:
        TokenizerError: a step is beyond a limit.
    """
    model, growth, is_linear, searches = library.model, 1.0, True, 0.0
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(library, name)
        steps = [] if part is None else list(_flatten(json.loads(part.__getstate__())))
        _check(len(steps), MAX_STEPS, f"{file}: steps of {name}")
        if name == "post_processor":
            _check_inserted(steps, file)
            continue
        product = 1.0
        for step in steps:
            factor = _growth(step, f"{file}: {name}")
            product *= factor or 1.0
            is_linear = is_linear and factor is not None
            searches += _search_steps(step)
            _check(product, MAX_GROWTH, f"{file}: growth of a text by {name}")
        growth = growth if name == "decoder" else growth * product
    if isinstance(model, tokenizers.models.WordPiece):
        is_linear = is_linear and model.max_input_chars_per_word <= _LINEAR_WORD
    elif isinstance(model, tokenizers.models.Unigram):
        sizes = (len(name.encode()) for name in library.get_vocab(with_added_tokens=False))
        is_linear = is_linear and max(sizes, default=0) <= _LINEAR_UNIGRAM_BYTES
    is_linear = is_linear and searches <= MAX_SEARCH_STEPS
    return Bounds(growth, is_linear and growth <= _LINEAR_GROWTH)


def _check(value: float, limit: int, what: str) -> None:
    if value > limit:
        raise TokenizerError(f"{what}: {value:.0f}; at most {limit} are supported")


def _first(entry: object) -> str:
    """Return the token of an entry of a vocabulary that is a list; an empty text for what the library will refuse."""
    return entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], str) else ""


def _flatten(step: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a sequence, however it is nested; at most a few more than the limit."""
    pending, found = [step], 0
    while pending and found <= MAX_STEPS:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        parts = next((step[key] for key in _PARTS if key in step), None)
        if parts is None:
            found += 1
            yield step
        else:
            pending += reversed(parts)
            found += not parts


def _growth(step: Mapping[str, Any], place: str) -> float | None:
    """Return the factor by which a step can lengthen a text; None if it may take long.

    Raises:
        TokenizerError: the step is beyond a limit.
    """
    kind = step.get("type")
    inserted = [step.get(key) for key in ("content", "prepend", "suffix", "prefix")]
    size = max((len(it.encode()) for it in inserted if isinstance(it, str)), default=0)
    _check(size, MAX_TEXT_CHARACTERS, f"{place}: bytes of a text that {kind} inserts")
    match step:
        case {"type": "Replace" | "Split", "pattern": {"String": str(old)}}:
            _check(len(old), MAX_TEXT_CHARACTERS, f"{place}: characters of the text of {kind}")
            return max(1.0, size / len(old.encode())) if old else 1.0 + size
        case {"type": "Replace" | "Split", "pattern": {"Regex": str(pattern)}}:
            _check(len(pattern), MAX_TEXT_CHARACTERS, f"{place}: characters of a pattern")
            if steps_at_a_place(pattern) <= MAX_SEARCH_STEPS:
                return 1.0 + size  # it may match between characters
            if place.endswith("decoder"):
                raise TokenizerError(
                    f"{place}: the pattern {shorten(pattern)} may take long for some texts, which a decoder must not"
                )
            return None
        case {"type": "Prepend" | "Strip"}:
            return 1.0
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_replacement(table)
    factor = _GROWTH.get(str(kind))
    return None if factor is None else float(factor)


def _search_steps(step: Mapping[str, Any]) -> float:
    """Return the steps of a search for a pattern at each place of a text."""
    pattern = step.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, dict) else None
    return steps_at_a_place(found) if isinstance(found, str) else 0.0


def _longest_replacement(table: str) -> float:
    """Return the size of the longest text that a compiled table of SentencePiece has for a character.

    Source: sentencepiece's normalizer.cc: the size of a trie, the trie, and the texts, each ended by a zero byte.
    """
    content = base64.b64decode(table)
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, texts)))


def _check_inserted(steps: list[Mapping[str, Any]], file: Path) -> None:
    for step in steps:
        if step.get("type") != "TemplateProcessing":
            continue
        single = step.get("single") or ()
        names = [it["SpecialToken"]["id"] for it in single if "SpecialToken" in it]
        special = step.get("special_tokens") or {}
        inserted = sum(len(special.get(name, {}).get("ids", ())) for name in names)
        _check(inserted, MAX_INSERTED_TOKENS, f"{file}: tokens that post_processor adds")
        _check(len(single) - len(names), 1, f"{file}: times that post_processor repeats a text")
