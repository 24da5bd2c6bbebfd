"""Reads the environment variables of peers.

The tables are imported only if there is a variable that may be in one. A variable is less explicit than a flag,
for it may be set for another program. So only those of Text Generation Inference and llama.cpp that stand for a flag
are refused, and only where ignoring them would change answers or security.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from server.cli.peers.unprefixed import UNPREFIXED

if TYPE_CHECKING:
    from server.cli.peers.reading import Reading
    from server.cli.peers.table import Found

PREFIXES: Final = ("VLLM_", "LLAMA_", "SGLANG_", "OLLAMA_")
# For a Service named `vllm`, Kubernetes sets VLLM_PORT and others in every pod of the namespace.
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE: Final = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
_MACHINE: Final = "HOSTNAME"


def read_variables(
    variables: Mapping[str, str], model_is_given: bool, kept: Collection[str] = ()
) -> Reading | None:
    """Read the variables of peers; empty ones count as absent.

    Args:
        variables: of the environment.
        model_is_given: whether a flag, a variable of Tessera or a file names the model, so that one here does not.
        kept: settings whose variables count although they are empty.

    Returns:
        What they say, with one note for each; None if there are none.

    Raises:
        PeerNameError: a variable asks for something that Tessera does not have, or has a value that it does not take.
    """
    present = {
        name: value
        for name, value in variables.items()
        if _may_be_of_peer(name) and (value or _is_of(name, kept))
    }
    present = {
        name: value
        for name, value in present.items()
        if not ((name.endswith("PORT") and _ADDRESS.fullmatch(value)) or _SERVICE.fullmatch(name))
        and not (name == _MACHINE and not _is_address(value))
    }
    if not present:
        return None
    from server.cli.peers.reading import Reading  # noqa: PLC0415 - the tables

    reading = Reading()
    for name, value in sorted(present.items()):
        _read(reading, name, value, present, model_is_given)
    return reading


def _read(
    reading: Reading, name: str, value: str, present: Mapping[str, str], model_is_given: bool
) -> None:
    from server.cli.peers.reading import PeerNameError  # noqa: PLC0415 - the tables
    from server.cli.peers.table import find_variable  # noqa: PLC0415 - the tables

    one = find_variable(name)
    if one is None:
        if name.startswith(PREFIXES):
            reading.notes.append(f"{name} has no effect: Tessera has no such setting")
        return
    row = one.row
    if row.needs and (row.needs not in present or model_is_given):
        reading.notes.append(f"{name} has no effect: it belongs to {row.needs}, which is not used")
        return
    try:
        reading.read(name, [one], value)
    except PeerNameError as error:
        if _stops(one, name):
            raise
        reading.notes.append(f"{name} has no effect: {_reason(str(error))}")


def _stops(one: Found, name: str) -> bool:
    """Whether a variable that cannot be understood ends the start."""
    if one.row.setting:
        return name != "PORT"  # other programs use it too
    return one.peer.variables_are_flags and one.row.subject is not None and one.row.subject.matters


def _is_of(name: str, settings: Collection[str]) -> bool:
    """Whether a variable gives one of some settings."""
    from server.cli.peers.table import find_variable  # noqa: PLC0415 - the tables

    one = find_variable(name)
    return one is not None and one.row.setting in settings


def _reason(message: str) -> str:
    return message.partition(": ")[2]


def _may_be_of_peer(name: str) -> bool:
    return name.startswith(PREFIXES) or name in UNPREFIXED


def _is_address(value: str) -> bool:
    import ipaddress  # noqa: PLC0415 - only where the name of the machine is in the environment

    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True
