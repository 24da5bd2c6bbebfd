"""Conversions of the texts of peers to those of Tessera's settings.

Each takes the text, or None for a flag without a value, and returns the text of the setting; None leaves the setting's
default. A text that cannot be converted raises ValueError with a message that completes "--flag TEXT: ".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, TypeAlias

from server.cli.peers.values import is_number, scaled_number, truth

Form: TypeAlias = Callable[[str | None], str | None]

_ALL_LAYERS: Final = 99
_is_repository = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII).fullmatch


def same(text: str | None) -> str | None:
    """Take the text as it is."""
    return text


def on(text: str | None) -> str:
    """Make true of a flag, or of a text that says so."""
    if (value := truth(text)) is None:
        raise ValueError("it must be true or false")
    return "true" if value else "false"


def off(text: str | None) -> str:
    """Make false of a flag, or of a text that says true: the flag switches the setting off."""
    return "false" if on(text) == "true" else "true"


def json_format(text: str | None) -> str:
    """Make the format of log lines of a flag that asks for JSON."""
    return "json" if on(text) == "true" else "text"


def debug_level(text: str | None) -> str | None:
    """Make the level of log messages of a flag that asks for all."""
    return "debug" if on(text) == "true" else None


def lower(text: str | None) -> str | None:
    """Take the text in lower case."""
    return text and text.lower()


def zero_is_default(text: str | None) -> str | None:
    """Take a number; 0 and -1 stand for the default."""
    return None if text in ("0", "-1") else text


def json_list(text: str | None) -> str | None:
    """Make texts with commas between them of a list in JSON; any other text stays."""
    if not (text or "").lstrip().startswith("["):
        return text
    try:
        values = json.loads(text or "")
    except ValueError:
        raise ValueError("it is not valid JSON") from None
    if not all(isinstance(value, str) for value in values):
        raise ValueError("it must be a list of texts")
    return ",".join(values)


def named_adapters(text: str | None) -> str | None:
    """Make name=path of adapters; one without a name gets that of its repository or folder."""
    named = []
    for adapter in filter(None, re.split(r"[,\s]+", text or "")):
        name = adapter if _is_repository(adapter) else adapter.rstrip("/").rpartition("/")[2]
        named.append(adapter if "=" in adapter else f"{name}={adapter}")
    return ",".join(named) or None


def gib_of_bytes(text: str | None) -> str:
    """Make GiB of bytes."""
    plain = scaled_number(text or "")
    if not is_number(plain):
        raise ValueError("it must be a number of bytes")
    return repr(int(plain) / (1 << 30))


def gpu_layers(text: str | None) -> str | None:
    """Make a device of a number of layers that a GPU computes; None for all."""
    if text in ("all", "auto", "-1", "-2") or (
        text and is_number(text) and int(text) >= _ALL_LAYERS
    ):
        return None
    if text == "0":
        return "cpu"
    raise ValueError(
        "Tessera computes all layers on one device: leave it out for the GPU, or give --device cpu"
    )


def no_device(text: str | None) -> str | None:
    """Make a device of the names of those that layers are offloaded to, of which `none` is the CPU."""
    return "cpu" if text == "none" else text


def sharded(text: str | None) -> str | None:
    """Make a number of GPUs of a text that says whether there are several; None if there are."""
    return None if on(text) == "true" else "1"


def graphs(text: str | None) -> str:
    """Make true or false of the sizes of CUDA graphs, of which 0 is none."""
    if text == "0":
        return "false"
    raise ValueError("the sizes of CUDA graphs cannot be chosen; --cuda-graphs is true or false")


def port_number(text: str | None) -> str | None:
    """Take a port; other programs use a variable of this name for something else."""
    if not (text and is_number(text) and 0 < int(text) < 1 << 16):
        raise ValueError("it is not the number of a port")
    return text
