"""Which tokens end a generation: those that the files of a checkpoint name, and the one that ends a turn of its chats.

docs/models.md has the rules, and decision 70 the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tokens.end_token import EndToken
from model.text.tokens.turn import Turn

TEMPLATE: Final = "chat template"


def find_end_tokens(
    stated: Iterable[EndToken], tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> tuple[tuple[EndToken, ...], list[str]]:
    """Return all end tokens, those of the model's configuration first, and sentences about tokens that end nothing.

    Tokens that the configuration does not name are no ends if the chat template writes them inside of the assistant's
    turns, or if the model has no such id.

    Args:
        stated: those of the model's configuration.
        tokenizer: of the checkpoint.
        template: its chat template; None if there is none.
        vocab_size: number of the model's logits.
    """
    sources = {token.id: token.sources for token in stated}
    turn = Turn() if template is None else template.turn
    found = dict(tokenizer.ends)
    end = None if turn.end is None else tokenizer.token_id(turn.end)
    if end is not None:
        found[end] = (*found.get(end, ()), TEMPLATE)
    problems = []
    for token_id, files in found.items():
        name = tokenizer.token_name(token_id)
        says = f"{name} is the end-of-sequence token of {' and '.join(files)}, but"
        if token_id in sources or (token_id < vocab_size and name not in turn.inside):
            sources[token_id] = (*sources.get(token_id, ()), *files)
        elif token_id >= vocab_size:
            problems.append(f"{says} the model has no token {token_id}: it cannot occur")
        else:
            problems.append(
                f"{says} the chat template writes it inside of the assistant's turns: it ends no generation"
            )
    if tokenizer.eos_token is not None and tokenizer.eos_token_id is None:
        problems.append(
            f"the end-of-sequence token {tokenizer.eos_token!r} that the files name is no token of the tokenizer"
        )
    ends = (EndToken(i, tokenizer.token_name(i), files) for i, files in sources.items())
    return tuple(ends), problems
