"""What a service consists of, from its settings; shared by `tessera serve` and `server.embedding`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from model.checkpoint.generation_config import SamplingDefaults, read_sampling_defaults
from model.checkpoint.hub import BUNDLED, resolve
from model.text.template_files import read_template
from server.http.config import HTTPConfig

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
    return HTTPConfig(
        model_id=settings.model,
        served_model_names=settings.served_model_name,
        strict_fields=settings.strict_fields,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=read_sampling_defaults(folder) if from_file else SamplingDefaults(),
        chat_template=settings.chat_template and read_template(settings.chat_template),
        tool_call_format=settings.tool_call_format,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_queue_seconds=settings.max_queue_seconds,
        max_queued_tokens=settings.max_queued_tokens,
        max_body_bytes=settings.max_body_bytes,
        max_buffered_body_bytes=settings.max_buffered_body_bytes,
        restart_wait_seconds=settings.restart_wait,
        drain_delay_seconds=settings.drain_delay,
        drain_timeout_seconds=settings.drain_timeout,
        api_keys=keys,
        prefix_cache_sharing=settings.prefix_cache_sharing,
        cors_allow_origins=settings.cors_allow_origin,
        allowed_hosts=allowed_hosts,
        max_connections=settings.max_connections,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_seconds=settings.header_timeout,
        keep_alive_timeout_seconds=settings.keep_alive_timeout,
        access_log=settings.access_log,
        otlp_endpoint=settings.otlp_endpoint,
    )


def tokenizer_path(settings: Settings, model_path: Path) -> Path:
    """Return the model's folder. A model with random weights may have no tokenizer and uses the bundled model's."""
    if settings.load_format == "dummy" and not (model_path / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json; using the bundled model's", model_path)
        return resolve(BUNDLED)
    return model_path
