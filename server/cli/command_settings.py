"""Settings, engine configuration and error messages, shared by all commands that need an engine."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pydantic import ValidationError

from model.checkpoint.config import ModelConfig
from model.hub.names import BUNDLED, well_known
from model.hub.resolve import resolve
from server.cli.nvidia import may_have_gpu
from server.cli.output import fail
from server.cli.parsing.parser import PEERS, SEVERAL, Parser, did_you_mean
from server.cli.parsing.setting_flags import (
    MODEL,
    add_settings,
    allowed_values,
    given_settings,
    in_listed_case,
    takes_several,
)
from server.cli.peers.values import ADVICE, is_number, scaled_number, tessera_value, truth
from server.cli.peers.variables import read_variables
from server.cli.settings import (
    CONFIG,
    ENV_PREFIX,
    Settings,
    environment,
    environment_variable,
    flag,
    listed_settings,
    read_environment,
    restricting,
    setting,
)
from server.engine.core.messages import EngineConfig
from server.engine.core.start_checks import check_start
from server.engine.settings import EngineSettings
from server.log import configure_logging

if TYPE_CHECKING:
    from server.cli.parsing.parser import SeveralWords
    from server.cli.peers.reading import Reading

log = logging.getLogger("tessera")
_IGNORE_PEERS = f" ({environment_variable('peer_env')}=0 ignores variables of other servers)"
# Beginnings of the types of errors that `allowed_values` describes; the others have messages of their own.
_PLAIN_PROBLEMS = ("int_", "float_", "bool_", "literal_", "greater_", "less_", "finite_")


def read_settings(arguments: Sequence[str], command: str = "serve") -> Settings:
    """Read the settings from flags, environment, configuration file and defaults, in this order.

    Exits with status 2 and a message if a value is wrong.
    """
    parser = Parser(prog=f"tessera {command}")
    add_settings(parser)
    return settings_of(parser.parse_args(arguments), command)


def settings_of(options: argparse.Namespace, command: str) -> Settings:
    """Return the settings of parsed flags, with environment, configuration file, variables of peers, and defaults.

    What flags, keys and variables of peers have set, and which of them have no effect, is logged in one line for each
    of these places.

    Exits with status 2 and a message if a value is wrong, or if an environment variable belongs to no setting.
    """
    try:
        sources, unknown = _read_sources(options)
    except ValueError as error:
        fail(str(error), command, status=2)
    values = {
        name: normalized(name, source.values[name])
        for source in reversed(sources)
        for name in source.values
    }
    origins = {
        name: source.origins.get(name, "") for source in reversed(sources) for name in source.values
    }
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        order = list(listed_settings())
        problems = sorted(
            error.errors(include_url=False),
            key=lambda it: order.index(str(it["loc"][0])) if it["loc"] else 0,
        )
        _fail_all((_explain(problem, origins) for problem in problems), command)
    if unknown and not settings.ignore_unknown_env:
        _fail_all(map(_unknown_variable, unknown), command)
    notes = [f"{source.title}: {'; '.join(source.notes)}" for source in sources if source.notes]
    if notes:
        configure_logging(settings.log_level, settings.log_format)
        for note in notes:
            log.info("%s", note)
    return settings


class _Source(NamedTuple):
    """A place with settings.

    Attributes:
        title: of the line in the log.
        values: the texts of settings, by name; a list of texts for a flag that takes several.
        origins: the names under which they were given, where these are not Tessera's own flags and variables.
        notes: what to log.
        reading: of the names of peers in it.
    """

    title: str
    values: dict[str, Any]
    origins: Mapping[str, str] = {}
    notes: Sequence[str] = ()
    reading: Reading | None = None


def _read_sources(options: argparse.Namespace) -> tuple[list[_Source], list[str]]:
    """Read all places with settings.

    Returns:
        The places, those that override others first; and the unknown variables that begin with TESSERA_.

    Raises:
        ValueError: two names set the same setting to different values, or a name cannot be understood.
    """
    flags = _flag_source(options)
    variables, unknown = read_environment()
    variable_path = variables.pop(CONFIG, None)
    path = variable_path if (given_path := getattr(options, CONFIG)) is None else given_path
    names = {name: environment_variable(name) for name in variables if name in restricting()}
    sources = [flags, _Source("variables", variables, names)]
    if path is not None:
        from server.cli.parsing.config_file import settings_of_file  # noqa: PLC0415 - imports YAML

        sources.append(_peer_source(f"names of other servers in {path}", settings_of_file(path)))
    given = {name: source.values[name] for source in reversed(sources) for name in source.values}
    if truth(given.get("peer_env")) is not False:
        try:
            reading = read_variables(environment(), MODEL in given, restricting())
        except ValueError as error:
            raise ValueError(f"{error}{_IGNORE_PEERS}") from None
        if reading is not None:
            sources.append(_peer_source("variables of other servers", reading, given))
    return _with_divided_context(sources), unknown


def _with_divided_context(sources: list[_Source]) -> list[_Source]:
    """Give each sequence its part of a context that llama.cpp divides among a fixed number of slots."""
    owners = []
    for name in ("max_model_len", "max_num_seqs"):
        owner = next((it for it in sources if name in it.values), None)
        if owner is None or owner.reading is None or name not in owner.reading.of_slots:
            return sources
        owners.append((owner, owner.values[name], owner.origins[name]))
    (owner, context, origin), (_, slots, slots_origin) = owners
    shared = any(it.reading is not None and it.reading.slots_share for it in sources)
    tokens, count = scaled_number(context), scaled_number(slots)
    if shared or not (is_number(tokens) and is_number(count)) or not int(count):
        return sources
    part = str(int(tokens) // int(count))
    note = f"{origin} divided by {slots_origin} is --max-model-len {part}"
    divided = owner._replace(
        values=owner.values | {"max_model_len": part}, notes=[*owner.notes, note]
    )
    return [divided if it is owner else it for it in sources]


def _flag_source(options: argparse.Namespace) -> _Source:
    given = given_settings(options)
    model = getattr(options, MODEL)
    peers: Reading | None = getattr(options, PEERS, None)
    origins = {}
    for name, (text, origin) in ({} if peers is None else peers.given).items():
        chosen = normalized(name, given.setdefault(name, text))
        if chosen != normalized(name, text):
            shown = (
                ""
                if setting(Settings.model_fields[name]).secret
                else f", to {given[name]!r} and {text!r}"
            )
            raise ValueError(f"{flag(name)} and {origin} set the same{shown}")
        origins[name] = origin
    if model is not None and given.setdefault(MODEL, model) != model:
        other = origins.get(MODEL, flag(MODEL))
        raise ValueError(f"two models are given: {model!r} and {other} {given[MODEL]!r}")
    notes = [] if peers is None else peers.notes
    if MODEL not in given:
        notes += map(_without_a_model, getattr(options, SEVERAL, ()))
    return _Source("flags of other servers", given, origins, notes, peers)


def _without_a_model(several: SeveralWords) -> str:
    """Return a note about words that follow a flag of a list, where nothing else on the command line is the model.

    Raises:
        ValueError: the last of them may be the model.
    """
    option, words = several.setting, several.words
    field = Settings.model_fields[option[2:].replace("-", "_")]
    if _may_be_model(words[-1], in_a_form=setting(field).form is not None):
        last = "the last word after it" if setting(field).secret else repr(words[-1])
        raise ValueError(
            f"{several.flag}: {last} may be one of its {len(words)} values or the model: put the model in front of "
            "the flags, or commas between the values"
        )
    return f"{several.flag} has {len(words)} values, all words after it, as in vLLM; no model is among them"


def _may_be_model(word: str, *, in_a_form: bool) -> bool:
    """Whether people type a word for a model; values with a form, such as origins, may have a slash."""
    if "/" in word and not in_a_form:
        return True
    return word.casefold() == BUNDLED or well_known(word) is not None or Path(word).is_dir()


def _peer_source(title: str, reading: Reading, above: Collection[str] = ()) -> _Source:
    """Make a source of what peers' names say; notes say which settings have no effect since they are given above."""
    values = {name: text for name, (text, _) in reading.given.items() if name not in above}
    origins = {name: origin for name, (_, origin) in reading.given.items()}
    hidden = {origin: name for name, origin in origins.items() if name in above}
    notes = [
        f"{note.partition(' is ')[0]} has no effect: {flag(name)} is given"
        if (name := hidden.get(note.partition(" is ")[0]))
        else note
        for note in reading.notes
    ]
    return _Source(title, values, origins, notes, reading)


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """Return the engine's part of the settings."""
    values = settings.values_of(EngineSettings) | {"max_loras": settings.num_adapter_slots}
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
    model = ModelConfig.from_folder(folder, settings.model_backend)
    has_gpu = None if may_have_gpu() else False
    check_start(engine_config(settings, folder), model, has_gpu=has_gpu)
    pickle = None if settings.load_format == "dummy" else settings.load_format == "pickle"
    return resolve(settings.model, settings.revision, pickle=pickle), model


def _fail_all(messages: Iterable[str], command: str) -> NoReturn:
    fail(f"\ntessera {command}: error: ".join(messages), command, status=2)


def normalized(name: str, value: Any) -> Any:  # noqa: ANN401 - text, or a list of texts
    """Return a value as the setting takes it, with Tessera's spelling.

    The text of a setting that is a list is split at its commas. Empty parts stay, for its validator to refuse.
    """
    if not takes_several(Settings.model_fields[name]):
        return in_listed_case(Settings.model_fields[name], tessera_value(name, value))
    texts = [value] if isinstance(value, str) else value
    return [part.strip() for text in texts for part in text.split(",")]


def _explain(problem: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Describe a wrong value: the names of the setting, the value unless it is secret, and what is allowed."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        shown = {name: it for name, it in origins.items() if it and f"{flag(name)} " in message}
        given = [f"{flag(name)} is given as {it}" for name, it in shown.items() if it != flag(name)]
        hint = _IGNORE_PEERS if any(map(_is_of_peer, shown.values())) else ""
        return f"{'; '.join([message, *given])}{hint}"
    name, value = str(problem["loc"][0]), problem["input"]
    field = Settings.model_fields[name]
    where = f"{flag(name)} (or {environment_variable(name)})"
    if origin := origins.get(name):
        where = origin if origin.endswith(flag(name)[2:]) else f"{origin} ({flag(name)})"
    hint = _IGNORE_PEERS if _is_of_peer(origins.get(name, "")) else ""
    where += "" if setting(field).secret else f" is {value!r}"
    allowed = allowed_values(field)
    if allowed and problem["type"].startswith(_PLAIN_PROBLEMS):
        advice = f" ({ADVICE[name]})" if name in ADVICE else ""
        return f"{where}; it must be {allowed}{advice}{_kubernetes_hint(value)}{hint}"
    return f"{where}: {message}{hint}"


def _is_of_peer(origin: str) -> bool:
    """Whether a setting was given by a variable of another server."""
    return origin.isupper() and not origin.startswith(ENV_PREFIX)


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
