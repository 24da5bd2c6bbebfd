"""Settings, engine configuration and error messages, shared by all commands that need an engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from server.cli.settings import SECRETS, Settings, environment_variable, flag
from server.engine.core.messages import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path


def read_settings(arguments: list[str], command: str = "serve") -> Settings:
    """Read flags, environment and defaults, in this order; exits with status 2 and a message if a value is wrong."""
    try:
        settings = Settings(_cli_parse_args=arguments, _cli_prog_name=f"tessera {command}")
    except ValidationError as error:
        for problem in error.errors():
            message = problem["msg"]
            if problem["loc"]:
                field = str(problem["loc"][0])
                names = f"{flag(field)} (or {environment_variable(field)})"
                given = "" if field in SECRETS else f" is {problem['input']!r}"
                message = f"{names}{given}: {message}"
            print(f"tessera {command}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None
    if not settings.api_key and any(a.partition("=")[0] == "--api-key" for a in arguments):
        # Empty values of settings are ignored, but the service must not be open by mistake.
        print(f"tessera {command}: error: --api-key is empty", file=sys.stderr)
        raise SystemExit(2)
    return settings


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """Return the engine's part of the settings.

    Args:
        settings: of the service.
        model_path: checkpoint folder on this machine.
    """
    shared = settings.model_dump(include=set(EngineConfig.__struct_fields__))
    return EngineConfig(model_path=str(model_path), model_id=settings.model, **shared)


def fail(message: str, command: str = "serve") -> NoReturn:
    """Print an error and exit with status 1."""
    print(f"tessera {command}: error: {message}", file=sys.stderr)
    raise SystemExit(1)
