"""Decodes tokens one by one, with the same result as decoding all of them at once."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

import tokenizers

from model.text.pieces import SPACE, DecoderRules, TextPieces

_BROKEN = "\ufffd"
# Last tokens of a prompt that are decoded: they may hold the first bytes of a character that the output completes, and
# decoders without known rules may depend on a few tokens more.
_PROMPT_TAIL = 8
# Number of tokens after which text that still ends in an incomplete character is returned.
_MAX_UNDECIDED = 16


class _PieceStream:
    """Joins pieces. Holds back at most three bytes, which later bytes may complete to a character."""

    __slots__ = ("_at_start", "_loaded", "_pending", "_pieces", "_rules", "_spaces")

    def __init__(self, pieces: TextPieces, rules: DecoderRules) -> None:
        self._pieces = pieces
        self._loaded = pieces.loaded
        self._rules = rules
        self._pending = b""
        self._spaces = rules.strip_spaces
        # Whether the rules for the beginning of a text still apply.
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
            return (self._pieces.token(token_id) or "").replace(SPACE, "")
        return self._strip(self._replace_pending() + piece)

    def _replace_pending(self) -> str:
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
    """Decodes the last tokens with the library, with and without the new ones, and returns the difference.

    It is for decoders without known rules, and correct if a token's text depends on a bounded number of earlier tokens.
    """

    __slots__ = ("_library", "_pieces", "_returned", "_window")

    def __init__(self, pieces: TextPieces, library: tokenizers.Tokenizer) -> None:
        self._pieces = pieces
        self._library = library
        self._window: list[int] = []
        self._returned = 0  # tokens of the window whose text was returned

    @property
    def at_rest(self) -> bool:
        return False

    def push(self, token_id: int) -> str:
        if self._pieces.token(token_id) is None:
            return ""
        self._window.append(token_id)
        return self._advance(final=len(self._window) - self._returned >= _MAX_UNDECIDED)

    def flush(self) -> str:
        return self._advance(final=True)

    def skip(self, token_ids: Sequence[int]) -> None:
        with_text = [t for t in token_ids[-4 * _PROMPT_TAIL :] if self._pieces.token(t) is not None]
        self._window = with_text[-_PROMPT_TAIL:]
        self._returned = len(self._window)

    def _advance(self, *, final: bool) -> str:
        before = self._library.decode(self._window[: self._returned], skip_special_tokens=False)
        text = self._library.decode(self._window, skip_special_tokens=False)
        if not final and (len(text) <= len(before) or text.endswith(_BROKEN)):
            return ""
        if len(text) > len(before):
            self._window = self._window[-_PROMPT_TAIL:]
        self._returned = len(self._window)
        return text[len(before) :]


def open_stream(library: tokenizers.Tokenizer, pieces: TextPieces) -> _PieceStream | _WindowStream:
    """Return a stream of the cheapest kind that is correct for the tokenizer."""
    if pieces.rules is None:
        return _WindowStream(pieces, library)
    return _PieceStream(pieces, pieces.rules)


def decode(pieces: TextPieces, rules: DecoderRules, token_ids: Iterable[int]) -> str:
    """Return the text of all tokens, equal to that of a stream."""
    whole = _PieceStream(pieces, rules)
    return "".join([whole.push(token_id) for token_id in token_ids]) + whole.flush()
