"""The text or bytes that each token adds to a text.

Tokens cannot be decoded one by one into text: a character may span several tokens, and a tokenizer may drop the first
space of a text. `model.text.streams` joins the pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tokenizers

from model.errors import TokenizerError

SPACE = "\u2581"
"""LOWER ONE EIGHTH BLOCK, which SentencePiece writes for a space."""


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a tokenizer's decoder converts tokens to text, for decoders that work token by token.

    Attributes:
        byte_level: each character of a token stands for one byte; invalid UTF-8 becomes one U+FFFD for each maximal
            part.
        byte_fallback: <0x00> to <0xFF> are bytes, all other tokens are text; invalid UTF-8 becomes one U+FFFD for each
            byte.
        strip_spaces: spaces dropped from the beginning of the text.
        drop_first_marks: the space marks of the first token are dropped instead of becoming spaces.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    strip_spaces: int = 0
    drop_first_marks: bool = False


def recognize(decoder: dict[str, object] | None) -> DecoderRules | None:
    """Return the rules of a decoder, or None if only the library can apply it.

    Args:
        decoder: the value of "decoder" in tokenizer.json.
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
    """The piece of text of each token, computed when a token is first used. Shared by all streams and threads.

    A piece is a `str` where the token is text by itself, and `bytes` where it may hold a part of a character. Tokens
    without text (skipped special tokens, ids without a token) are empty bytes.

    Attributes:
        rules: the decoder's rules; None if only the library can apply them.
        loaded: the pieces computed so far, by token id.
    """

    def __init__(self, library: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._library = library
        self._skipped = skipped
        self._alphabet = _byte_alphabet()
        # The pickle state is the decoder's part of tokenizer.json.
        state = None if library.decoder is None else library.decoder.__getstate__()
        self.rules = recognize(None if state is None else json.loads(state))
        self.loaded: dict[int, str | bytes] = {}

    def token(self, token_id: int) -> str | None:
        """Return the token's name in the vocabulary; None for skipped tokens and for ids without a token.

        Raises:
            TokenizerError: not a token id.
        """
        try:
            token = self._library.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise TokenizerError(f"{token_id!r} is not a token id") from error
        return None if token_id in self._skipped else token

    def load(self, token_id: int) -> str | bytes:
        """Compute a token's piece and store it in `loaded`."""
        token = self.token(token_id)
        piece = b"" if token is None else self._piece(token)
        self.loaded[token_id] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        assert self.rules is not None
        if not self.rules.byte_level:
            if self.rules.byte_fallback and (byte := _fallback_byte(token)) is not None:
                return bytes([byte])
            return token.replace(SPACE, " ")
        alphabet = self._alphabet
        try:
            piece = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, whose text is not in the byte alphabet
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
