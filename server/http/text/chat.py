"""Loads the chat template that the service uses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from model.errors import ChatTemplateError
from model.text.chat_template import ChatTemplate

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
