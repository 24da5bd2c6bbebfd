"""What the commands that need an engine share: settings, the engine's configuration out of them, and how they fail."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from server.cli.settings import Settings, environment_variable, flag
from server.engine.link.protocol import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path


def read_settings(arguments: list[str], command: str = "serve") -> Settings:
    """Flags over environment over defaults; exits with status 2 and the limit where a value is wrong."""
    try:
        return Settings(_cli_parse_args=arguments, _cli_prog_name=f"tessera {command}")
    except ValidationError as error:
        for problem in error.errors():
            message = problem["msg"]
            if problem["loc"]:
                field = str(problem["loc"][0])
                names = f"{flag(field)} (or {environment_variable(field)})"
                message = f"{names} is {problem['input']!r}: {message}"
            print(f"tessera {command}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """Choose from the settings what the engine needs to know.

    Args:
        settings: of the service.
        model_path: checkpoint folder on this machine.
    """
    return EngineConfig(
        model_path=str(model_path),
        model_id=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        cuda_graphs=settings.cuda_graphs,
        overlap=settings.overlap,
        enable_prefix_caching=settings.enable_prefix_caching,
        cpu_threads=settings.cpu_threads,
        log_level=settings.log_level,
    )


def fail(message: str, command: str = "serve") -> NoReturn:
    """End with status 1 and a line that says why."""
    print(f"tessera {command}: error: {message}", file=sys.stderr)
    raise SystemExit(1)
