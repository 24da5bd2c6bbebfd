"""Which tokens end a generation: those that the files of a checkpoint name, and the one that ends a turn of its chats.

docs/models.md has the rules, and decision 70 the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tokens.end_token import EndToken

TEMPLATE: Final = "chat template"

_logger = logging.getLogger(__name__)


def find_end_tokens(
    stated: Iterable[EndToken], tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> tuple[EndToken, ...]:
    """Return all end tokens, those of the model's configuration first.

    Tokens that the configuration does not name are no ends if the chat template writes them inside of the assistant's
    turns, or if the model has no such id, which is logged.

    Args:
        stated: those of the model's configuration.
        tokenizer: of the checkpoint.
        template: its chat template; None if there is none.
        vocab_size: number of the model's logits.
    """
    sources = {token.id: token.sources for token in stated}
    found = dict(tokenizer.ends)
    inside = frozenset() if template is None else template.turn.inside
    if template is not None and template.turn.end is not None:
        end = tokenizer.token_id(template.turn.end)
        if end is not None:
            found[end] = (*found.get(end, ()), TEMPLATE)
    for token_id, files in found.items():
        if token_id not in sources:
            text, places = tokenizer.token_name(token_id), " and ".join(files)
            if token_id >= vocab_size:
                _logger.warning(
                    "%s is the end-of-sequence token of %s, but the model has no token %d: it cannot occur",
                    text,
                    places,
                    token_id,
                )
                continue
            if text in inside:
                _logger.warning(
                    "%s is the end-of-sequence token of %s, but ends no generation: the chat template writes it inside"
                    " of the assistant's turns",
                    text,
                    places,
                )
                continue
        sources[token_id] = (*sources.get(token_id, ()), *files)
    if tokenizer.eos_token is not None and tokenizer.eos_token_id is None:
        _logger.warning(
            "the end-of-sequence token %r that the files name is no token of tokenizer.json",
            tokenizer.eos_token,
        )
    return tuple(
        EndToken(token_id, tokenizer.token_name(token_id), files)
        for token_id, files in sources.items()
    )
