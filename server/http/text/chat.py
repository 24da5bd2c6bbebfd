"""Loads the chat template that the service uses, and finds the tokens that end its generations."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from model.errors import ChatTemplateError
from model.text.chat_template import ChatTemplate
from model.text.tokens.end_tokens import find_end_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from model.text.tokenizer import Tokenizer
    from server.http.config import HTTPConfig

log = logging.getLogger("tessera")


def load_chat_template(
    folder: Path, tokenizer: Tokenizer, config: HTTPConfig
) -> ChatTemplate | None:
    """Load the configured chat template, or the checkpoint's.

    Returns:
        None if there is no template, or the checkpoint's cannot be used, which is logged: everything except chat works.

    Raises:
        ChatTemplateError: the configured template cannot be used.
    """
    try:
        return ChatTemplate.from_folder(folder, tokenizer, config.chat_template)
    except ChatTemplateError as error:
        if config.chat_template is not None:
            raise
        log.warning("chat is not available: %s", error)
        return None


def with_end_tokens(
    config: HTTPConfig,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    logs: bool = True,
) -> HTTPConfig:
    """Return the configuration with the end tokens that the tokenizer and the chat template name too.

    Args:
        config: with those of the model's configuration.
        tokenizer: of the checkpoint.
        chat_template: of the service.
        logs: whether to log the tokens, and what is wrong with others: one process of a service does.
    """
    ends, problems = find_end_tokens(config.end_tokens, tokenizer, chat_template, config.vocab_size)
    if logs:
        for problem in problems:
            log.warning("%s", problem)
        listed = ", ".join(
            f"{it.text or 'no token'} ({it.id}, {' and '.join(it.sources)})" for it in ends
        )
        log.info("generations end with %s", listed or "no token, only at their limit")
    return dataclasses.replace(
        config, end_tokens=ends, eos_token_ids=tuple(token.id for token in ends)
    )
