"""What several commands share: the flags of all settings, and an engine in this process."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.output import fail

if TYPE_CHECKING:
    from server.cli.parsing.parser import Parser
    from server.cli.settings import Settings
    from server.engine.core.messages import EngineConfig

_ENVIRONMENT = """\
Each flag of a setting is an environment variable too: --max-model-len is TESSERA_MAX_MODEL_LEN. \
A flag overrides the variable. Flags of true or false may be given without a value, or as --no-..."""


def settings_flags(parser: Parser, *, has_model: bool = True) -> None:
    """Add the flags of all settings; `has_model`: and the model as a positional argument."""
    from server.cli.parsing.setting_flags import add_settings

    parser.epilog = "\n\n".join(filter(None, (parser.epilog, _ENVIRONMENT)))
    add_settings(parser, has_model=has_model)


def local_engine(settings: Settings, command: str) -> EngineConfig:
    """Prepare this process for an engine and return its configuration; exits with status 1 if it cannot start."""
    from model.errors import ModelError
    from server.cli.command_settings import engine_config, find_model
    from server.cli.model_name import with_model_name
    from server.engine.core.start_checks import StartupError
    from server.engine.link.engine_process.process_setup import set_passive_openmp_wait
    from server.log import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    set_passive_openmp_wait()
    try:
        settings = with_model_name(settings)
        folder, _ = find_model(settings)
    except (ModelError, StartupError) as error:
        fail(str(error), command)
    return engine_config(settings, folder)
