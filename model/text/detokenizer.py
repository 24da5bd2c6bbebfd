"""Turns token ids into text as they arrive, one stream for each sequence.

A token is not a piece of text: a character may be spread over several tokens, and a tokenizer may drop the very
first space. `TextPieces` says what each token contributes; `IncrementalDetokenizer` puts it together. Knows no
requests and no stop strings.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

    from model.text.tokenizer import Tokenizer

_SPACE = "\u2581"  # SentencePiece writes a space as LOWER ONE EIGHTH BLOCK
_BROKEN = "\ufffd"
# Tokens of a prompt that can hold the beginning of a character whose end is still to come, and some more
# that a decoder without a known rule may look back at.
_PROMPT_TAIL = 8
# Tokens after which text that still looks like half a character is given out all the same.
_MAX_UNDECIDED = 16


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a tokenizer's decoder makes text of tokens, for the decoders whose rules can be applied token by token.

    Attributes:
        byte_level: token texts are bytes in disguise; broken UTF-8 becomes one U+FFFD for each maximal part.
        byte_fallback: <0x00> to <0xFF> are bytes, all other tokens are text; broken UTF-8 becomes one U+FFFD
            for each byte.
        strip_spaces: spaces dropped from the beginning of the text.
        drop_first_marks: the space marks of the first token are dropped instead of becoming spaces.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    strip_spaces: int = 0
    drop_first_marks: bool = False


def recognise(decoder: dict[str, object] | None) -> DecoderRules | None:
    """Return the rules of a decoder as tokenizer.json describes it; None where the library has to be asked.

    Args:
        decoder: the object under "decoder".
    """
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return DecoderRules(byte_level=True)
        case {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": str(scheme)}:
            return DecoderRules(drop_first_marks=scheme != "never")
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        }:
            match rest:
                case []:
                    return DecoderRules(byte_fallback=True)
                case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
                    return DecoderRules(byte_fallback=True, strip_spaces=start)
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for.

    Source: GPT-2's byte encoder: printable bytes stand for themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


class TextPieces:
    """What each token adds to a text. Filled as tokens are met; shared by all streams and threads.

    A piece is a `str` where the token is text by itself, and `bytes` where it may hold a part of a character.
    Tokens that say nothing (special ones that are skipped, ids without a token) are empty bytes.
    """

    def __init__(self, library: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._library = library
        self._skipped = skipped
        self._alphabet = _byte_alphabet()
        # The state that pickle would store: the decoder's part of tokenizer.json.
        state = None if library.decoder is None else library.decoder.__getstate__()
        self.rules = recognise(None if state is None else json.loads(state))
        self.loaded: dict[int, str | bytes] = {}

    def token(self, token_id: int) -> str | None:
        """Return the token's name in the vocabulary; None for skipped ones and for ids without a token.

        Raises:
            TokenizerError: not an id at all.
        """
        try:
            token = self._library.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise TokenizerError(f"{token_id!r} is not a token id") from error
        return None if token_id in self._skipped else token

    def load(self, token_id: int) -> str | bytes:
        """Return a token's piece and remember it."""
        token = self.token(token_id)
        piece = b"" if token is None else self._piece(token)
        self.loaded[token_id] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        assert self.rules is not None
        if not self.rules.byte_level:
            if self.rules.byte_fallback and (byte := _fallback_byte(token)) is not None:
                return bytes([byte])
            return token.replace(_SPACE, " ")
        alphabet = self._alphabet
        try:
            piece = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, written as it is
            return token
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return piece


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


class _Stream(Protocol):
    @property
    def at_rest(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def skip(self, token_ids: Sequence[int]) -> None: ...


class _PieceStream:
    """Joins pieces. Holds back bytes, at most three, that may still become a character."""

    __slots__ = ("_at_start", "_loaded", "_pending", "_pieces", "_rules", "_spaces")

    def __init__(self, pieces: TextPieces, rules: DecoderRules) -> None:
        self._pieces = pieces
        self._loaded = pieces.loaded
        self._rules = rules
        self._pending = b""
        self._spaces = rules.strip_spaces
        # Whether the rules for the beginning of a text are still to be applied.
        self._at_start = bool(rules.strip_spaces) or rules.drop_first_marks

    @property
    def at_rest(self) -> bool:
        return not self._pending and not self._at_start

    def push(self, token_id: int) -> str:
        piece = self._loaded.get(token_id)
        if piece is None:
            piece = self._pieces.load(token_id)
        if piece.__class__ is str and not self._pending and not self._at_start:
            return piece
        return self._join(token_id, piece)

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        if self._rules.byte_level:
            return pending.decode("utf-8", "replace")
        return self._strip(_BROKEN * len(pending))

    def skip(self, token_ids: Sequence[int]) -> None:
        tail = max(len(token_ids) - _PROMPT_TAIL, 0)
        for token_id in token_ids[:tail]:
            if not self._at_start:
                break
            self.push(token_id)
        for token_id in token_ids[tail:]:
            self.push(token_id)

    def _join(self, token_id: int, piece: str | bytes) -> str:
        if self._rules.byte_level:
            data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            return text
        if isinstance(piece, bytes):
            return self._strip(self._take_bytes(piece))
        if self._rules.drop_first_marks and self._at_start:
            self._at_start = False
            return (self._pieces.token(token_id) or "").replace(_SPACE, "")
        return self._strip(self._give_up_pending() + piece)

    def _give_up_pending(self) -> str:
        pending, self._pending = self._pending, b""
        return _BROKEN * len(pending)

    def _take_bytes(self, piece: bytes) -> str:
        data, text = self._pending + piece, ""
        while True:
            try:
                decoded, used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                text += data[: error.start].decode() + _BROKEN * (error.end - error.start)
                data = data[error.end :]
            else:
                self._pending = data[used:]
                return text + decoded

    def _strip(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        stripped = text.lstrip(" ")
        dropped = min(len(text) - len(stripped), self._spaces)
        self._spaces -= dropped
        self._at_start = not stripped and self._spaces > 0
        return text[dropped:]


class _WindowStream:
    """Asks the library for the text of the last tokens, with and without the new ones.

    For decoders without known rules. Correct where a token's text depends on a bounded number of tokens before it.
    """

    __slots__ = ("_given", "_library", "_pieces", "_window")

    def __init__(self, pieces: TextPieces, library: tokenizers.Tokenizer) -> None:
        self._pieces = pieces
        self._library = library
        self._window: list[int] = []
        self._given = 0  # tokens of the window whose text was given out

    @property
    def at_rest(self) -> bool:
        return False

    def push(self, token_id: int) -> str:
        if self._pieces.token(token_id) is None:
            return ""
        self._window.append(token_id)
        return self._advance(final=len(self._window) - self._given >= _MAX_UNDECIDED)

    def flush(self) -> str:
        return self._advance(final=True)

    def skip(self, token_ids: Sequence[int]) -> None:
        spoken = [t for t in token_ids[-4 * _PROMPT_TAIL :] if self._pieces.token(t) is not None]
        self._window = spoken[-_PROMPT_TAIL:]
        self._given = len(self._window)

    def _advance(self, *, final: bool) -> str:
        before = self._library.decode(self._window[: self._given], skip_special_tokens=False)
        text = self._library.decode(self._window, skip_special_tokens=False)
        if not final and (len(text) <= len(before) or text.endswith(_BROKEN)):
            return ""
        if len(text) > len(before):
            self._window = self._window[-_PROMPT_TAIL:]
        self._given = len(self._window)
        return text[len(before) :]


class IncrementalDetokenizer:
    """The text of one growing sequence.

    Invariant: all that `push` and `flush` returned, joined, is `tokenizer.decode` of all pushed ids; with a
    prompt, it is what these ids add to the text of the prompt. No piece ends within a character.

    Args:
        tokenizer: of the model that makes the ids.
        skip_special_tokens: whether special tokens add no text.
        prompt_ids: tokens before the first pushed one. A text's first space is dropped by some tokenizers: with
            the prompt given, that of the continuation is kept.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stream = stream(tokenizer.library, tokenizer.pieces(skip_special_tokens))
        if prompt_ids:
            self._stream.skip(prompt_ids)

    @property
    def at_rest(self) -> bool:
        """Whether nothing that was pushed has a say in the text of the next token: nothing is held back.

        A token whose text leaves it so has the same text, and leaves it so, each time it is pushed in this state.
        """
        return self._stream.at_rest

    def push(self, token_id: int) -> str:
        """Return the text that a token completes; empty while it ends within a character.

        Raises:
            TokenizerError: not a token id. Ids that the vocabulary lacks add nothing: a model's embedding
                may have more rows than the tokenizer has tokens.
        """
        return self._stream.push(token_id)

    def flush(self) -> str:
        """Return what is held back at the end of the sequence, the bytes of half a character as U+FFFD."""
        return self._stream.flush()


def stream(library: tokenizers.Tokenizer, pieces: TextPieces) -> _Stream:
    """Return the cheapest correct way to decode token by token."""
    if pieces.rules is None:
        return _WindowStream(pieces, library)
    return _PieceStream(pieces, pieces.rules)


def decode(pieces: TextPieces, rules: DecoderRules, token_ids: Iterable[int]) -> str:
    """Return the text of all tokens, by the same rules as a stream's."""
    whole = _PieceStream(pieces, rules)
    return "".join([whole.push(token_id) for token_id in token_ids]) + whole.flush()
