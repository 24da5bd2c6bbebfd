"""The flags of the settings: adds them to a parser in groups, and describes the values that each takes."""

from __future__ import annotations

import argparse
import functools
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Final, Literal

from server.cli.parsing.parser import BOOLEAN, Parser
from server.cli.settings import CONFIG, flag, group_of, listed_settings, meanings, setting
from server.setting import Group

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MODEL: Final = "model"
_DEST: Final = "setting "


def add_settings(parser: Parser, *, has_model: bool = True) -> None:
    """Add a flag for every setting, and the model as a positional argument unless other words stand there."""
    parser.takes_settings = True
    if has_model:
        parser.add_argument(MODEL, nargs="?", metavar="MODEL", help="the same as --model")
    else:
        parser.set_defaults(**{MODEL: None})
    groups = {name: parser.add_argument_group(name) for name in typing.get_args(Group)}
    groups["process"].add_argument(
        f"--{CONFIG}",
        metavar="FILE",
        help="YAML file with settings, which flags and variables override",
    )
    for name, field in listed_settings().items():
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


def has_form(field: FieldInfo, text: str) -> bool:
    """Whether a text has the form of a value of a setting, or of one value of a list."""
    form = setting(field).form
    return form is None or re.fullmatch(form.pattern, text) is not None


def in_listed_case(field: FieldInfo, text: str) -> str:
    """Return the text of a setting in lower case if that is one of the values that are listed for it, as INFO is."""
    kind = _plain_type(field)
    listed = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return text.lower() if text.lower() in listed else text


def allowed_values(field: FieldInfo) -> str:
    """Describe the values that a setting takes; empty if any text is one."""
    kind = _plain_type(field)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if kind is bool:
        return "true or false"
    if kind not in (int, float):
        return ""
    limits = setting(field).limits
    text = "a whole number" if kind is int else "a finite number"
    if {"ge", "le"} <= limits.keys():
        return f"{text} from {limits['ge']} to {limits['le']}"
    words = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}
    return f"{text} " + " and ".join(f"{words[name]} {limit}" for name, limit in limits.items())


def _add(parser: Parser, group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    kind = _plain_type(field)
    text = meanings().get(name, "")
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
        parser.add_list(flag(name), functools.partial(has_form, field), group, **options)
        return
    group.add_argument(flag(name), **options)


def _plain_type(field: FieldInfo) -> Any:  # noqa: ANN401 - a type
    """Return the type of a setting without None."""
    kind: Any = field.annotation
    if isinstance(kind, types.UnionType):
        (kind,) = [it for it in typing.get_args(kind) if it is not type(None)]
    return kind
