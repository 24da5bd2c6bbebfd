"""The flags of the settings: adds them to a parser in groups, and describes the values that each takes."""

from __future__ import annotations

import argparse
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from server.cli.parsing.parser import BOOLEAN
from server.cli.settings import Settings, flag
from server.engine.core.messages import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

    from server.cli.parsing.parser import Parser

MODEL = "model"
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "model", "revision", "dtype", "quantization", "load_format", "max_model_len", "served_model_name",
        "chat_template", "tool_call_format",
    ),
    "engine": ("data_parallel",),
    "memory": (
        "block_size", "kv_cache_dtype", "kv_cache_tokens", "kv_cache_gib", "enable_prefix_caching",
    ),
    "HTTP": (
        "host", "port", "frontends", "max_concurrent_requests", "max_queue_seconds", "max_queued_tokens",
        "max_body_bytes", "max_buffered_body_bytes",
    ),
    "process": ("engine_hang_seconds", "log_level", "log_format", "otlp_endpoint", "ignore_unknown_env"),
}  # fmt: skip
"""Groups of the help text; a setting in none of them is in "engine" if `EngineConfig` has it, else in "HTTP"."""
_ORDER = ("model", "HTTP", "engine", "memory", "process")
_DEST = "setting "


def group_of(field: str) -> str:
    """Return the group of a setting in the help text."""
    for group, fields in _GROUPS.items():
        if field in fields:
            return group
    return "engine" if field in EngineConfig.__struct_fields__ else "HTTP"


def add_settings(parser: Parser) -> None:
    """Add a flag for every setting, and the model as a positional argument."""
    parser.add_argument(MODEL, nargs="?", metavar="MODEL", help="the same as --model")
    groups = {name: parser.add_argument_group(name) for name in _ORDER}
    for name, field in Settings.model_fields.items():
        _add(parser, groups[group_of(name)], name, field)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the texts of the flags that were given, by setting; a list of texts for a flag that takes several."""
    return {
        name.removeprefix(_DEST): value
        for name, value in vars(options).items()
        if name.startswith(_DEST)
    }


def takes_several(field: FieldInfo) -> bool:
    """Whether a setting is a list."""
    return typing.get_origin(_plain_type(field)) in (list, tuple, set, frozenset)


def allowed_values(field: FieldInfo) -> str:
    """Describe the values that a setting takes; empty if any text is one."""
    kind = _plain_type(field)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if kind is bool:
        return "true or false"
    if kind not in (int, float):
        return ""
    limits: dict[str, Any] = {}
    for item in field.metadata:
        for name in ("ge", "gt", "le", "lt"):
            limits |= {name: getattr(item, name)} if hasattr(item, name) else {}
    text = "a whole number" if kind is int else "a finite number"
    if {"ge", "le"} <= limits.keys():
        return f"{text} from {limits['ge']} to {limits['le']}"
    words = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}
    return f"{text} " + " and ".join(f"{words[name]} {limit}" for name, limit in limits.items())


def _add(parser: Parser, group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    kind = _plain_type(field)
    text = field.description or ""
    if field.default is not None and field.default != "" and not takes_several(field):
        text += f" (default: {str(field.default).lower() if kind is bool else field.default})"
    options: dict[str, Any] = {"dest": _DEST + name, "default": argparse.SUPPRESS}
    options["help"] = text.replace("%", "%%")
    if kind is bool:
        parser.add_listed(flag(name), BOOLEAN, group, **options)
        return
    if typing.get_origin(kind) is Literal:
        parser.add_listed(flag(name), list(map(str, typing.get_args(kind))), group, **options)
        return
    options["metavar"] = {int: "N", float: "X"}.get(kind, name.rpartition("_")[2].upper())
    if takes_several(field):
        options["action"] = "append"
    group.add_argument(flag(name), **options)


def _plain_type(field: FieldInfo) -> Any:  # noqa: ANN401 - a type
    """Return the type of a setting without None."""
    kind: Any = field.annotation
    if isinstance(kind, types.UnionType):
        (kind,) = [it for it in typing.get_args(kind) if it is not type(None)]
    return kind
