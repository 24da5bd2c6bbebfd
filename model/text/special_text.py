"""Distinguishes the special tokens that a chat template writes from text that only looks like them.

A template is compiled with each special token's text in its literals replaced by a mark, which nobody outside the
service can guess. A tokenizer in which the marks have taken the place of the special tokens then encodes the result: a
mark becomes the token, and the token's own text, which can only come from a message, becomes ordinary text. What
a template does to texts in between does not matter: a mark that it cuts into pieces is no token.
"""

from __future__ import annotations

import bisect
import json
import secrets
from array import array
from collections.abc import Callable, Iterable

import tokenizers

from model.errors import ChatTemplateError, TokenizerError
from model.text.rendering.marks import alternatives
from model.text.tokenizer import Tokenizer, TokenSpans, read_offsets

# The last plane of private-use characters. No pre-tokenizer or normalizer knows them.
_FIRST_MARK = 0x100000
_NONCE_CHARACTERS = 8
MARK_BYTES = 4 * (_NONCE_CHARACTERS + 1)
"""Length of a mark in UTF-8."""
_NOWHERE = "\U0010fffd"  # a character that no vocabulary has
# Where the text of a special token is tried, to find out whether ordinary text can become that token.
_SURROUNDINGS = ("{}", " {}", "a{}", "a {} b", "\n{}\n")


class SpecialText:
    """Marks special tokens in text, and encodes marked text. Immutable, and therefore thread-safe.

    Attributes:
        marks: the mark of each special token that is used.
        breaker: a text that nobody can guess, to be put into texts that should not become a special token.
        end: another one, to find a place in a rendered text again.

    Raises:
        ChatTemplateError: the tokenizer changes a mark before it looks for tokens.
    """

    def __init__(self, tokenizer: Tokenizer, used: Iterable[str]) -> None:
        nonce = "".join(
            chr(_FIRST_MARK + secrets.randbelow(0xFFF0)) for _ in range(_NONCE_CHARACTERS)
        )
        known = special_tokens(tokenizer)
        texts = [text for text in dict.fromkeys(used) if text in known]
        self.breaker = nonce + chr(_FIRST_MARK + len(texts))
        self.end = nonce + chr(_FIRST_MARK + len(texts) + 1)
        self.marks = {text: nonce + chr(_FIRST_MARK + i) for i, text in enumerate(texts)}
        self._texts = {mark: text for text, mark in self.marks.items()}
        self._find = alternatives(self.marks)
        self._find_mark = alternatives(self._texts)
        self._special_ids = frozenset(known.values())
        library, self._ids = self._build(tokenizer.library, tokenizer.library.model)
        self._encoder = tokenizer.encoder_for(library)
        # A vocabulary without bytes has a token for characters that it lacks; it is special, but ordinary text has it.
        (unknown,) = self._encoder.encode_batch_fast([_NOWHERE], add_special_tokens=False)
        self._special_ids -= frozenset(unknown.ids)
        reachable = {
            token
            for place in _SURROUNDINGS
            for encoding in self._encoder.encode_batch_fast(
                [place.format(text) for text in known], add_special_tokens=False
            )
            for token in encoding.ids
            if self._is_forbidden(token)
        }
        if reachable:
            model = _without(tokenizer.library, [t for t, i in known.items() if i in reachable])
            library, self._ids = self._build(tokenizer.library, model)
            self._encoder = tokenizer.encoder_for(library)
        encoded = self._encoder.encode_batch_fast(list(self._texts), add_special_tokens=False)
        for text, encoding in zip(self._texts.values(), encoded, strict=True):
            if [self._ids.get(i) for i in encoding.ids] != [known[text]]:
                raise ChatTemplateError(f"the tokenizer does not keep the special token {text!r}")

    def mark(self, text: str) -> str:
        """Replace the text of every special token by its mark."""
        return self._find.sub(lambda found: self.marks[found[0]], text)

    def unmark(self, text: str) -> str:
        """Replace every mark by the text of its special token."""
        return self._find_mark.sub(lambda found: self._texts[found[0]], text)

    def encode(self, marked: str) -> list[int]:
        """Return the token ids of a marked text. Only marks become special tokens.

        Raises:
            TokenizerError: lone surrogates, or text that this tokenizer can only write as a special token.
        """
        return self._ids_of(self._encode(marked, self._encoder.encode_batch_fast))

    def encode_with_offsets(self, marked: str) -> tuple[str, TokenSpans]:
        """Return the text without marks, and its tokens with their characters; otherwise like `encode`."""
        encoding = self._encode(marked, self._encoder.encode_batch)
        ids = array("I", self._ids_of(encoding))
        place = self._places(marked)
        starts, stops = (array("I", map(place, offsets)) for offsets in read_offsets(encoding))
        text = self.unmark(marked)
        return text, TokenSpans(text, ids, starts, stops)

    def _places(self, marked: str) -> Callable[[int], int]:
        """Return a function from each position of a marked text to that of the text; within a mark, the mark's."""
        begins, ends, places = [], [], []
        shift = 0
        for found in self._find_mark.finditer(marked):
            begins.append(found.start())
            ends.append(found.end())
            places.append(found.start() + shift)
            shift += len(self._texts[found[0]]) - len(found[0])

        def place(position: int) -> int:
            i = bisect.bisect_right(begins, position) - 1
            if i < 0:
                return position
            if position < ends[i]:
                return places[i]
            return places[i] + len(self._texts[marked[begins[i] : ends[i]]]) + position - ends[i]

        return place

    def _build(
        self, library: tokenizers.Tokenizer, model: tokenizers.models.Model
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Return a tokenizer with marks instead of special tokens, and its ids that differ from the library's.

        The model, which holds nearly all of a tokenizer's memory, is shared.
        """
        marked = tokenizers.Tokenizer(model)
        if library.normalizer is not None:
            marked.normalizer = library.normalizer
        if library.pre_tokenizer is not None:
            marked.pre_tokenizer = library.pre_tokenizer
        if library.post_processor is not None:
            marked.post_processor = library.post_processor
        others, specials, ids = [], [], {}
        for token_id, token in library.get_added_tokens_decoder().items():
            if not token.special:
                others.append(token)
                ids[token.content] = token_id
            elif token.content in self.marks:
                mark = self.marks[token.content]
                flags = {
                    name: getattr(token, name)
                    for name in ("single_word", "lstrip", "rstrip", "normalized")
                }
                specials.append(tokenizers.AddedToken(mark, special=True, **flags))
                ids[mark] = token_id
        marked.add_tokens(others)
        marked.add_special_tokens(specials)
        found = {
            own_id: token_id
            for text, token_id in ids.items()
            if (own_id := marked.token_to_id(text)) is not None
        }
        if any(found.get(i, i) != i and model.id_to_token(i) is not None for i in found):
            raise ChatTemplateError("the tokenizer's vocabulary has gaps")
        return marked, found

    def _is_forbidden(self, token_id: int) -> bool:
        """Return whether an id of the marked tokenizer is a special token that no mark stands for."""
        return token_id in self._special_ids and token_id not in self._ids

    def _encode(
        self, text: str, encode: Callable[..., list[tokenizers.Encoding]]
    ) -> tokenizers.Encoding:
        try:
            # A batch of one text releases the interpreter lock.
            (encoding,) = encode([text], add_special_tokens=False)
        except TypeError as error:
            raise TokenizerError("the text has a lone surrogate, which is no character") from error
        return encoding

    def _ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        found: list[int] = encoding.ids
        if any(self._is_forbidden(i) for i in self._special_ids.intersection(found)):
            raise TokenizerError("the tokenizer writes a part of it as a special token")
        ids = self._ids
        return [ids.get(i, i) for i in found]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each special token by its text."""
    added = tokenizer.library.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special and token.content}


def _without(library: tokenizers.Tokenizer, texts: list[str]) -> tokenizers.models.Model:
    """Return a model that cannot produce special tokens from ordinary text.

    Their entries keep their ids under names that no text has, and the merges that lead to them are dropped.
    """
    content = json.loads(library.to_str())
    content["added_tokens"] = []
    content["post_processor"] = None
    model = content["model"]
    renamed = {text: f"{chr(_FIRST_MARK + 0xFFF1)}{secrets.token_hex(8)}" for text in texts}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {renamed.get(piece, piece): i for piece, i in model["vocab"].items()}
    if "merges" in model:
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [
            (left, right)
            for left, right in pairs
            if not {left, right, left + right} & renamed.keys()
        ]
    stripped: tokenizers.models.Model = tokenizers.Tokenizer.from_str(json.dumps(content)).model
    return stripped
