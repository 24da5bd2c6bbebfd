"""Converts token ids to text incrementally, with one detokenizer per sequence."""

from __future__ import annotations

from collections.abc import Sequence

from model.text.streams import open_stream
from model.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes one growing sequence.

    Invariant: the concatenation of all texts that `push` and `flush` returned equals `tokenizer.decode` of all pushed
    ids; with a prompt, it equals the text that these ids add to the prompt's. No returned text ends within a character.

    Args:
        tokenizer: tokenizer of the model that generates the ids.
        skip_special_tokens: whether special tokens add no text.
        prompt_ids: tokens before the first pushed one. Some tokenizers drop the first space of a text; with the prompt
            given, the first space of the continuation is kept.
    """

    __slots__ = ("_stream",)

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._stream = open_stream(tokenizer.library, tokenizer.pieces(skip_special_tokens))
        if prompt_ids:
            self._stream.skip(prompt_ids)

    @property
    def at_rest(self) -> bool:
        """Whether the text of the next token depends on that token alone, because no bytes are held back.

        If a stream is at rest before and after a token, the token has the same text in every such stream.
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
        """Return the held-back text at the end of the sequence; bytes of an incomplete character become U+FFFD."""
        return self._stream.flush()
