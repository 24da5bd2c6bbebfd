"""Converts text to token ids and back, with a checkpoint's `tokenizer.json`.

The front end calls it from worker threads. This module does not import PyTorch.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import tokenizers

from model.checkpoint_files import read_text
from model.errors import TokenizerError
from model.json_input import read_json_object
from model.text.bounded.limits import Bounds, check_added, check_file, check_library
from model.text.bounded.processes import EncoderProcesses, PlainEncoding
from model.text.library_errors import library_error
from model.text.pieces import TextPieces
from model.text.streams import decode

# The largest tokenizers in use (256 thousand tokens, with merges) take 33 MiB.
_MAX_FILE_BYTES = 128 << 20
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
_PROBE = "def f(x):\n    return 'é' # 1"


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token of a text.

    Attributes:
        id: token id.
        text: the characters that the token stands for; empty for tokens that the tokenizer adds. A character that
            several tokens share is in the text of each.
        start: number of characters of the text before it.
        stop: number of characters of the text up to its end.
    """

    id: int
    text: str
    start: int
    stop: int


class TokenSpans(Sequence[TokenSpan]):
    """The tokens of a text, twelve bytes each; `TokenSpan` objects are made when they are read.

    Args:
        text: the text.
        ids: token ids.
        starts: for each token, the number of characters of the text before it.
        stops: for each token, the number of characters of the text up to its end.
    """

    __slots__ = ("_ids", "_starts", "_stops", "_text")

    def __init__(self, text: str, ids: array[int], starts: array[int], stops: array[int]) -> None:
        self._text = text
        self._ids = ids
        self._starts = starts
        self._stops = stops

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> TokenSpan: ...

    @overload
    def __getitem__(self, index: slice) -> TokenSpans: ...

    def __getitem__(self, index: int | slice) -> TokenSpan | TokenSpans:
        if isinstance(index, slice):
            return TokenSpans(self._text, self._ids[index], self._starts[index], self._stops[index])
        start, stop = self._starts[index], self._stops[index]
        return TokenSpan(self._ids[index], self._text[start:stop], start, stop)


def read_offsets(encoding: tokenizers.Encoding | PlainEncoding) -> tuple[array[int], array[int]]:
    """Return where the characters of each token of an encoding begin and end.

    The library's own list of pairs takes ten times the memory, and the interpreter lock while it is made.
    """
    starts, stops = array("I"), array("I")
    find = encoding.token_to_chars
    for i in range(len(encoding)):
        start, stop = find(i) or (0, 0)
        starts.append(start)
        stops.append(stop)
    return starts, stops


class Tokenizer:
    """A checkpoint's tokenizer. Immutable once built, and therefore thread-safe.

    Args:
        library: the tokenizer that tokenizer.json describes. Truncation and padding are switched off.
        bounds: what is known of the cost of tokenizing.
        in_process: whether texts are tokenized in this process although that may take any time.
        bos_token: the text of the token that begins a sequence; tokenizer.json decides whether `encode` adds it.
        eos_token: the text of the token that ends one.
        folder: the checkpoint that it was read from; None for another source.

    Attributes:
        library: the tokenizer of the library, for `model.text.streams`; must not be changed, nor tokenize.
        is_linear: whether tokenizing takes a time that is nearly proportional to a text's length. If not, other
            processes tokenize.
        growth: factor by which the tokenizer can lengthen a text before it is divided into tokens.
        bos_token, eos_token, bos_token_id, eos_token_id: None if the checkpoint names none.
        vocab_size: number of tokens, including added ones; a model's logits may be wider.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        bos_token: str | None = None,
        eos_token: str | None = None,
        folder: Path | None = None,
        bounds: Bounds | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        self.folder = folder
        bounds = bounds or Bounds()
        self.is_linear, self.growth = bounds.is_linear, bounds.growth
        library.no_truncation()
        library.no_padding()
        self.library = library
        self._processes = None if bounds.is_linear or in_process else EncoderProcesses(library)
        self._encoder = library if self._processes is None else self._processes
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = None if bos_token is None else library.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else library.token_to_id(eos_token)
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = (TextPieces(library, frozenset()), TextPieces(library, self._special_ids))

    @classmethod
    def from_folder(cls, path: Path | str, *, in_process: bool = False) -> Tokenizer:
        """Read tokenizer.json and, if it exists, tokenizer_config.json.

        Args:
            path: the checkpoint.
            in_process: as for the class.

        Raises:
            TokenizerError: a file is missing, beyond a limit, damaged, or contradicts the other.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        text = read_text(folder, file.name, _MAX_FILE_BYTES, TokenizerError)
        if text is None:
            hint = ""
            if any(folder.glob("*.model")) or (folder / "vocab.json").is_file():
                hint = "; only this format is read: save the tokenizer once with transformers to convert it"
            raise TokenizerError(f"{file} does not exist{hint}")
        check_file(text, file)
        _check_prefixes(text, file)
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:
            raise library_error(error, f"{file} is not a tokenizer") from error
        config_file = folder / "tokenizer_config.json"
        config = read_json_object(folder, config_file.name, _MAX_FILE_BYTES, TokenizerError) or {}
        _add_tokens(library, config.get("added_tokens_decoder") or {}, config_file)
        bos_token = _token_text(config, "bos_token", config_file)
        eos_token, bounds = (
            _token_text(config, "eos_token", config_file),
            check_library(library, file),
        )
        tokenizer = cls(library, bos_token, eos_token, folder, bounds, in_process=in_process)
        _probe(tokenizer, file)
        return tokenizer

    def close(self) -> None:
        """End the processes that tokenize, if there are any; what is being tokenized is an error."""
        if self._processes is not None:
            self._processes.close()

    def encoder_for(self, library: tokenizers.Tokenizer) -> Any:  # noqa: ANN401 - of two classes
        """Return what tokenizes with another tokenizer that has the same steps, by `encode_batch` of the library."""
        return library if self._processes is None else self._processes.like(library)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Names of special tokens in the text become these tokens.

        It releases the interpreter lock, so that a long text encoded in a worker thread does not block the event loop.

        Args:
            text: text without lone surrogates, which UTF-8 cannot encode.
            add_special_tokens: whether to add the tokens that tokenizer.json adds to every text, such as a BOS token.

        Raises:
            TokenizerError: not a text, or with a lone surrogate.
        """
        ids: list[int] = self._encode(text, add_special_tokens, offsets=False).ids
        return ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> TokenSpans:
        """Return the tokens of a text and the characters that each stands for; otherwise like `encode`."""
        encoding = self._encode(text, add_special_tokens, offsets=True)
        return TokenSpans(text, array("I", encoding.ids), *read_offsets(encoding))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids without a token add nothing.

        For byte-fallback vocabularies (Llama 2's) it differs from the library in one case: if adjacent bytes are partly
        invalid UTF-8, their valid characters are kept. The library replaces these too, which a stream that has already
        returned them cannot do.

        Raises:
            TokenizerError: something in `ids` is not a token id.
        """
        pieces = self.pieces(skip_special_tokens)
        if pieces.rules is not None:
            return decode(pieces, pieces.rules, ids)
        with_text = [token_id for token_id in ids if pieces.token(token_id) is not None]
        text: str = self.library.decode(with_text, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special or not, including a leading space.

        A part of a character becomes U+FFFD; an id without a token has no text.

        Raises:
            TokenizerError: not a token id.
        """
        piece = self.token_piece(token_id)
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token by itself, special or not, as UTF-8; may be a part of a character.

        Raises:
            TokenizerError: not a token id.
        """
        piece = self.token_piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def token_piece(self, token_id: int) -> str | bytes:
        """Return the text of one token by itself, special or not; bytes if it may be a part of a character.

        Raises:
            TokenizerError: not a token id.
        """
        pieces = self.pieces(skip_special_tokens=False)
        if pieces.rules is None:
            return self.decode([token_id], skip_special_tokens=False)
        piece = pieces.loaded.get(token_id)
        return pieces.load(token_id) if piece is None else piece

    def token_name(self, token_id: int) -> str:
        """Return the name of a token in the vocabulary; an id without a token has none."""
        return self.library.id_to_token(token_id) or ""

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name in the vocabulary; None if there is none."""
        return self.library.token_to_id(name)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special: a marker for the model rather than text."""
        return token_id in self._special_ids

    def pieces(self, skip_special_tokens: bool) -> TextPieces:
        """Return the pieces of text that tokens add to a text."""
        return self._pieces[skip_special_tokens]

    def _encode(
        self, text: str, add_special_tokens: bool, *, offsets: bool
    ) -> tokenizers.Encoding | PlainEncoding:
        if not isinstance(text, str):  # the library would take a pair for two texts
            raise TokenizerError(f"expected a text, got {type(text).__name__}")
        # A batch of one text, because `encode` holds the interpreter lock (1.4 s for 1.1 MB of text).
        encode = self._encoder.encode_batch if offsets else self._encoder.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        except TokenizerError:
            raise
        except TypeError as error:
            raise TokenizerError("the text has a lone surrogate, which is no character") from error
        except BaseException as error:
            raise library_error(error, "the tokenizer cannot encode this text") from error
        return encoding


def _check_prefixes(text: str, file: Path) -> None:
    """Check that every merge fits the prefix of continuing tokens, which the library cuts off without looking.

    If the prefix is not there, the library ends the process (tokenizers 0.23.3). Only old BPE checkpoints have one.

    Raises:
        TokenizerError: a merge does not fit.
    """
    if not _PREFIX.search(text) or '"merges"' not in text:
        return
    try:
        model = json.loads(text)["model"]
        prefix = model["continuing_subword_prefix"] or ""
        merges = [m if isinstance(m, list) else m.split(" ") for m in model.get("merges") or ()]
        wrong = next((m for m in merges if not m[1].startswith(prefix)), None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{file} is not a tokenizer: {error!r}") from None
    if wrong is not None:
        raise TokenizerError(
            f"{file}: the merge {wrong!r} does not continue with continuing_subword_prefix = {prefix!r}"
        )


def _probe(tokenizer: Tokenizer, file: Path) -> None:
    """Encode and decode a short text: some mistakes in a file show only then.

    Raises:
        TokenizerError: it does not work.
    """
    try:
        tokenizer.decode(tokenizer.encode(_PROBE))
    except BaseException as error:
        raise library_error(error, f"{file} cannot be used") from error


def _token_text(config: dict[str, Any], name: str, file: Path) -> str | None:
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None or isinstance(token, str):
        return token
    raise TokenizerError(f"{file}: {name} is {token!r}, not a text")


def _add_tokens(library: tokenizers.Tokenizer, added: object, file: Path) -> None:
    """Add the tokens that tokenizer_config.json names and tokenizer.json lacks."""
    if not isinstance(added, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is not an object")
    try:
        entries = sorted((int(key), dict(value)) for key, value in added.items())
        check_added([entry["content"] for _, entry in entries], file)
        tokens = [
            (i, bool(e.setdefault("special", False)), tokenizers.AddedToken(e.pop("content"), **e))
            for i, e in entries
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{file}: added_tokens_decoder is damaged: {error!r}") from error
    known = library.get_added_tokens_decoder()
    lacking = [
        (token_id, token)
        for token_id, special, token in tokens
        if token_id not in known or known[token_id].special < special
    ]
    # At once, because the library's time for each call grows with the number of added tokens.
    library.add_tokens([token for _, token in lacking])
    for token_id, token in lacking:
        if library.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"{file}: added token {token.content!r} should have id {token_id}, but tokenizer.json"
                f" gives it {library.token_to_id(token.content)}"
            )
