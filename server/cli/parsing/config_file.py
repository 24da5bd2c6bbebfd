"""The file of `--config`: YAML whose keys are names of flags, with or without the hyphens in front.

Values are texts, as those of flags: `port: 8000` is `--port 8000`. So YAML's own types do not matter, of which
`revision: 1e3` would be a number and `host: no` false.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import yaml

from server.cli.parsing.parser import did_you_mean
from server.cli.parsing.setting_flags import takes_several
from server.cli.peers.reading import Given, PeerNameError, Reading
from server.cli.peers.table import Found, find_flag
from server.cli.peers.values import truth
from server.cli.settings import Settings, flag

_MOST_BYTES: Final = 1 << 20
_NULL: Final = "tag:yaml.org,2002:null"
_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ["str", "int", "float", "bool", "timestamp", "null", "seq", "value", "merge"]
)
"""Of values that are the texts they seem to be; `!env KEY` and `!!binary aGVsbG8=` are not."""


class ConfigError(ValueError):
    """The file cannot be used; the message names it, and the line if there is one."""


class Entry(NamedTuple):
    """A key of the file.

    Attributes:
        key: as it is written, without hyphens in front and with hyphens between its words.
        texts: the value; several for a list; None for a nested one.
        where: the file and the line, for messages.
    """

    key: str
    texts: list[str] | None
    where: str


def settings_of_file(path: str) -> Reading:
    """Return the settings in a configuration file; names of other servers are answered as their flags are.

    Raises:
        ConfigError: the file cannot be read, or a key or its value is wrong.
    """
    reading = Reading()
    entries = read_config(path)
    foreign: dict[str, list[Found]] = {}
    for entry in entries:
        if _setting_name(entry.key) is None and (found := find_flag(_flag(entry.key))):
            foreign[entry.key] = found
            reading.narrow(found)
    for entry in entries:
        try:
            if entry.key in foreign:
                found = foreign[entry.key]
                is_absent = all(it.row.near or it.row.subject for it in found)
                text = "" if entry.texts is None and is_absent else _text(entry)
                reading.read(f"{entry.where}: {entry.key}", found, text)
            else:
                _add_setting(reading, entry)
        except PeerNameError as error:
            message = str(error)
            raise ConfigError(
                message if message.startswith(path) else f"{entry.where}: {message}"
            ) from None
    reading.notes = [note.removeprefix(f"{path}, ") for note in reading.notes]
    return reading


def _add_setting(reading: Reading, entry: Entry) -> None:
    name = _setting_name(entry.key)
    if name is None:
        hint = did_you_mean(entry.key, [flag(it)[2:] for it in Settings.model_fields])
        raise ConfigError(f"{entry.where}: no setting is called {entry.key}{hint}")
    text = _text(entry)
    field = Settings.model_fields[name]
    if len(entry.texts or []) != 1 and not takes_several(field):
        raise ConfigError(f"{entry.where}: {entry.key} takes one value, not a list")
    if entry.key != flag(name)[2:]:
        if (value := truth(text)) is None:
            raise ConfigError(f"{entry.where}: {entry.key} is {text!r}; it must be true or false")
        text = "false" if value else "true"
    reading.add(name, Given(text, f"{entry.where}: {entry.key}"))


def _setting_name(key: str) -> str | None:
    """Return the setting that a key names, or switches off; None if there is none."""
    name = key.replace("-", "_")
    if name in Settings.model_fields:
        return name
    name = name.removeprefix("no_")
    field = Settings.model_fields.get(name)
    return name if field is not None and field.annotation is bool else None


def _text(entry: Entry) -> str:
    if entry.texts is None:
        raise ConfigError(
            f"{entry.where}: the value of {entry.key} is nested; it must be a text or a list of texts"
        )
    return ",".join(entry.texts)


def _flag(key: str) -> str:
    """Return the flag of a key; short ones have one hyphen, as in `tp: 2` for `-tp 2`."""
    return f"--{key}" if find_flag(f"--{key}") else f"-{key}"


def read_config(path: str) -> list[Entry]:
    """Read a configuration file.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key twice or without a value.
    """
    node = _parse(path)
    if node is None or node.tag == _NULL:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_place(path, node)}: it must have lines of the form `key: value`")
    entries: dict[str, Entry] = {}
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{_place(path, key_node)}: a key must be the name of a flag")
        entry = _entry(path, key_node, value)
        if (other := entries.setdefault(entry.key, entry)) is not entry:
            raise ConfigError(f"{entry.where}: {entry.key} is also in {other.where}")
    return list(entries.values())


def _parse(path: str) -> yaml.Node | None:
    if not path:
        raise ConfigError("the name of the configuration file is empty")
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: it has more than {_MOST_BYTES} bytes")
    try:
        return yaml.compose(content, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: it is not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: it is not valid YAML: {str(error).splitlines()[0]}") from None


def _entry(path: str, key_node: yaml.ScalarNode, value: yaml.Node) -> Entry:
    where = _place(path, key_node)
    key = str(key_node.value).lstrip("-").replace("_", "-")
    if not key or not key.isprintable():
        raise ConfigError(f"{where}: {key!r} is not the name of a setting")
    for node in (value, *(value.value if isinstance(value, yaml.SequenceNode) else ())):
        if not isinstance(node, yaml.MappingNode) and node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(
                f"{where}: the value of {key} has the tag {tag}, which has no meaning here"
            )
    if isinstance(value, yaml.ScalarNode):
        if value.tag == _NULL:
            raise ConfigError(f"{where}: {key} has no value")
        return Entry(key, [str(value.value)], where)
    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if all(isinstance(it, yaml.ScalarNode) and it.tag != _NULL for it in items):
        return Entry(key, [str(it.value) for it in items], where)
    return Entry(key, None, where)


def _place(path: str, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"
