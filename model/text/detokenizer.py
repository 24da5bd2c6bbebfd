"""Turns token ids into text as they arrive, one detokenizer for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from model.text.streams import open_stream
from model.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing sequence.

    Invariant: the texts that `push` and `flush` returned, joined, are `tokenizer.decode` of all pushed ids; with a
    prompt, what these ids add to the text of the prompt. No returned text ends within a character.

    Args:
        tokenizer: of the model that generates the ids.
        skip_special_tokens: whether special tokens add no text.
        prompt_ids: tokens before the first pushed one. Some tokenizers drop the first space of a text: with the
            prompt given, that of the continuation is kept.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stream = open_stream(tokenizer.library, tokenizer.pieces(skip_special_tokens))
        if prompt_ids:
            self._stream.skip(prompt_ids)

    @property
    def at_rest(self) -> bool:
        """Whether the text of the next token depends on that token alone: nothing is held back.

        A token that leaves the stream at rest has the same text whenever it is pushed at rest.
        """
        return self._stream.at_rest

    def push(self, token_id: int) -> str:
        """Return the text that a token completes; empty while the text ends within a character.

        Raises:
            TokenizerError: not a token id. Ids that the vocabulary lacks add nothing: a model's embedding
                may have more rows than the tokenizer has tokens.
        """
        return self._stream.push(token_id)

    def flush(self) -> str:
        """Return what is held back at the end of the sequence; bytes of an incomplete character become U+FFFD."""
        return self._stream.flush()
