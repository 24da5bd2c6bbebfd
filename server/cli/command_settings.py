"""Settings, engine configuration and error messages, shared by all commands that need an engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from model.checkpoint.config import ModelConfig
from model.checkpoint.hub import resolve
from server.cli.nvidia import may_have_gpu
from server.cli.parsing.parser import Parser, did_you_mean
from server.cli.parsing.setting_flags import (
    MODEL,
    add_settings,
    allowed_values,
    given_settings,
    takes_several,
)
from server.cli.settings import (
    ENV_PREFIX,
    Settings,
    environment_variable,
    flag,
    listed_settings,
    read_environment,
    setting,
)
from server.engine.core.messages import EngineConfig
from server.engine.core.start_checks import check_start
from server.engine.settings import EngineSettings

# Beginnings of the types of errors that `allowed_values` describes; the others have messages of their own.
_PLAIN_PROBLEMS = ("int_", "float_", "bool_", "literal_", "greater_", "less_", "finite_")


def read_settings(arguments: Sequence[str], command: str = "serve") -> Settings:
    """Read the settings from flags, environment and defaults, in this order.

    Exits with status 2 and a message if a value is wrong.
    """
    parser = Parser(prog=f"tessera {command}")
    add_settings(parser)
    return settings_of(parser.parse_args(arguments), command)


def settings_of(options: argparse.Namespace, command: str) -> Settings:
    """Return the settings of parsed flags, with environment and defaults.

    Exits with status 2 and a message if a value is wrong, or if an environment variable belongs to no setting.
    """
    given = given_settings(options)
    model = getattr(options, MODEL)
    if model is not None and given.setdefault(MODEL, model) != model:
        fail(f"two models are given: {model!r} and --model {given[MODEL]!r}", command, status=2)
    environment, unknown = read_environment()
    values = {name: _several(name, value) for name, value in (environment | given).items()}
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        order = list(listed_settings())
        problems = sorted(
            error.errors(include_url=False),
            key=lambda it: order.index(str(it["loc"][0])) if it["loc"] else 0,
        )
        _fail_all(map(_explain, problems), command)
    if unknown and not settings.ignore_unknown_env:
        _fail_all(map(_unknown_variable, unknown), command)
    return settings


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """Return the engine's part of the settings."""
    values = settings.values_of(EngineSettings)
    return EngineConfig(model_path=str(model_path), model_id=settings.model, **values)


def find_model(settings: Settings) -> tuple[Path, ModelConfig]:
    """Find or download the model; check the settings first, before weights are downloaded and PyTorch is imported.

    Returns:
        The folder of the checkpoint, and its configuration.

    Raises:
        ModelError: the model is not found or not supported.
        StartupError: an engine with these settings cannot start on this machine.
    """
    folder = resolve(settings.model, settings.revision, config_only=True)
    model = ModelConfig.from_folder(folder)
    has_gpu = None if may_have_gpu() else False
    check_start(engine_config(settings, folder), model, has_gpu=has_gpu)
    return resolve(settings.model, settings.revision), model


def fail(message: str, command: str = "serve", status: int = 1) -> NoReturn:
    """Print an error and exit."""
    print(f"tessera {command}: error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _fail_all(messages: Iterable[str], command: str) -> NoReturn:
    fail(f"\ntessera {command}: error: ".join(messages), command, status=2)


def _several(name: str, value: Any) -> Any:  # noqa: ANN401 - text, or a list of texts
    """Split the text of a setting that is a list at its commas. Empty parts stay, for its validator to refuse."""
    if not takes_several(Settings.model_fields[name]):
        return value
    texts = [value] if isinstance(value, str) else value
    return [part.strip() for text in texts for part in text.split(",")]


def _explain(problem: Mapping[str, Any]) -> str:
    """Describe a wrong value: the names of the setting, the value unless it is secret, and what is allowed."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name, value = str(problem["loc"][0]), problem["input"]
    field = Settings.model_fields[name]
    where = f"{flag(name)} (or {environment_variable(name)})"
    where += "" if setting(field).secret else f" is {value!r}"
    allowed = allowed_values(field)
    if allowed and problem["type"].startswith(_PLAIN_PROBLEMS):
        return f"{where}; it must be {allowed}{_kubernetes_hint(value)}"
    return f"{where}: {message}"


def _kubernetes_hint(value: object) -> str:
    if not str(value).startswith(("tcp://", "udp://")):
        return ""
    return (
        ". Kubernetes sets it for a Service named 'tessera': set enableServiceLinks to false in the pod, "
        "or give the flag"
    )


def _unknown_variable(name: str) -> str:
    hint = did_you_mean(
        name.upper().removeprefix(ENV_PREFIX), map(str.upper, Settings.model_fields)
    )
    hint = hint.replace("mean ", f"mean {ENV_PREFIX}")
    return (
        f"no setting has the environment variable {name}{hint or '; unset it'} "
        f"({environment_variable('ignore_unknown_env')}=1 ignores it)"
    )
