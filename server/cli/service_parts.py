"""What a service consists of, from its settings; shared by `tessera serve` and `server.embedding`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from model.checkpoint.generation_config import read_sampling_defaults
from model.checkpoint.hub import BUNDLED, resolve
from model.sampling.parameters import SamplingDefaults
from model.text.template_files import read_template
from server.http.config import HTTPConfig, HTTPSettings

if TYPE_CHECKING:
    from pathlib import Path

    from model.checkpoint.config import ModelConfig
    from server.cli.settings import Settings

log = logging.getLogger("tessera")


def http_config(
    settings: Settings,
    folder: Path,
    model: ModelConfig,
    keys: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
) -> HTTPConfig:
    """Return the HTTP layer's part of the settings.

    Args:
        settings: of the service.
        folder: of the checkpoint.
        model: configuration of the checkpoint.
        keys: the API keys; none if the service has none.
        allowed_hosts: hosts that requests may name; none for any.

    Raises:
        ModelError: the chat template or the checkpoint's sampling defaults cannot be read.
    """
    from_file = settings.generation_config == "auto"
    resolved = {
        "chat_template": settings.chat_template and read_template(settings.chat_template),
        "api_key": keys,
        "allowed_hosts": allowed_hosts,
    }
    return HTTPConfig(
        model_id=settings.model,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=read_sampling_defaults(folder) if from_file else SamplingDefaults(),
        **settings.values_of(HTTPSettings) | resolved,
    )


def tokenizer_path(settings: Settings, model_path: Path) -> Path:
    """Return the model's folder. A model with random weights may have no tokenizer and uses the bundled model's."""
    if settings.load_format == "dummy" and not (model_path / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json; using the bundled model's", model_path)
        return resolve(BUNDLED)
    return model_path
