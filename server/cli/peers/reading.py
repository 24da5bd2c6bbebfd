"""Reads what is given under names of peers: settings of Tessera, notes about the others, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from server.cli.peers.forms import gpu_layers, sharded, zero_is_default
from server.cli.peers.llama_cpp import LLAMA_CPP
from server.cli.peers.values import truth

if TYPE_CHECKING:
    from server.cli.peers.forms import Form
    from server.cli.peers.table import Found

_DEFAULTS: Final[Mapping[Form, str]] = {
    zero_is_default: "0 and -1 stand for the default",
    gpu_layers: "all layers are computed on one device",
    sharded: "--tensor-parallel gives the number of GPUs, as --num-shard and NUM_SHARD do",
}
_SECRET: Final = frozenset({"api_key"})


class PeerNameError(ValueError):
    """A name of a peer that cannot be understood; the message begins with the name."""


class Given(NamedTuple):
    """The text of a setting.

    Attributes:
        text: as the setting takes it.
        origin: the name it was given under, for messages.
    """

    text: str
    origin: str


@dataclass(slots=True)
class Reading:
    """What the names of peers in one place, such as a command line, say.

    Attributes:
        given: the texts of settings, by name.
        notes: one text for each name that was understood or has no effect.
        peers: those that have all the names read so far; None if none was read.
        of_slots: the settings that a name of llama.cpp has set.
        slots_share: whether its slots share the context, instead of having a part each.
    """

    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peers: set[str] | None = None
    of_slots: set[str] = field(default_factory=set)
    slots_share: bool = False

    def narrow(self, found: Iterable[Found]) -> None:
        """Note that a name was given, before any is read: other names tell which peer an ambiguous one is of."""
        names = {it.peer.name for it in found}
        common = names if self.peers is None else self.peers & names
        self.peers = common or self.peers

    def read(self, name: str, found: Sequence[Found], text: str | None) -> None:
        """Read one name.

        Args:
            name: as it was given.
            found: its rows; not empty.
            text: its value; None for a flag without one.

        Raises:
            PeerNameError: it asks for something that Tessera does not have, or that has another name.
        """
        one = self._choose(name, found, text)
        row = one.row
        if row.takes == "value" and text is None and (row.setting or row.always):
            raise PeerNameError(f"{name} needs a value")
        text = _opposite(text) if one.negated else text
        asks_for_nothing = row.takes == "nothing" and truth(text) is False
        if row.setting:
            self._understand(name, one, text)
        elif row.always:
            if asks_for_nothing and not row.either:
                raise PeerNameError(f"{name}: {row.always}; this cannot be switched off")
            if row.only and not asks_for_nothing and (text or "on") not in row.only.split():
                raise PeerNameError(
                    f"{name} {text}: Tessera has no such choice ({row.always}); without effect are only "
                    f"{', '.join(row.only.split())}"
                )
            self.notes.append(f"{name} has no effect: {row.always}")
            self.slots_share |= "--kv-unified" in row.flags.split()
        elif asks_for_nothing or (row.takes == "optional" and text and truth(text) is False):
            self.notes.append(f"{name} has no effect: it switches off what Tessera does not have")
        elif row.near:
            raise PeerNameError(f"{name} ({one.peer.name}): {row.near}")
        elif row.subject is not None:
            raise PeerNameError(f"{name} ({one.peer.name}): {absence(one)}")

    def add(self, setting: str, given: Given, row_text: str | None = None) -> None:
        """Add the text of a setting.

        Raises:
            PeerNameError: another name has given another text.
        """
        other = self.given.setdefault(setting, given)
        if other.text != given.text:
            shown = "other values" if setting in _SECRET else f"{other.text!r} and {given.text!r}"
            raise PeerNameError(
                f"{other.origin} and {given.origin} both set {_flag(setting)}, to {shown}"
            )
        if row_text is not None:
            self.notes.append(row_text)

    def _choose(self, name: str, found: Sequence[Found], text: str | None) -> Found:
        fitting = [it for it in found if self.peers is None or it.peer.name in self.peers] or found
        if all(it.row.means(fitting[0].row) for it in fitting):
            return fitting[0]
        if not any(it.row.setting or it.row.always for it in fitting):
            return fitting[0]
        if all(it.row.only for it in fitting):  # no peer is meant that has not this value
            return next((it for it in fitting if text in it.row.only.split()), fitting[0])
        meanings = ", ".join(f"{_meaning(it)} in {it.peer.name}" for it in fitting)
        raise PeerNameError(f"{name} has several meanings, {meanings}: give the one that is meant")

    def _understand(self, name: str, one: Found, text: str | None) -> None:
        setting = one.row.setting
        try:
            value = one.row.form(text)
        except ValueError as error:
            shown = name if text is None or setting in _SECRET else f"{name} {text}"
            raise PeerNameError(f"{shown}: {error}") from None
        if value is None:
            reason = _DEFAULTS.get(one.row.form, "it is the default")
            self.notes.append(f"{name} {text or ''}".rstrip() + f" has no effect: {reason}")
            return
        shown = "" if setting in _SECRET else f" {value if value.isprintable() else repr(value)}"
        if one.peer is LLAMA_CPP:
            self.of_slots.add(setting)
        self.add(setting, Given(value, name), f"{name} is {_flag(setting)}{shown}")


def absence(found: Found) -> str:
    """Say that Tessera does not have what a name asks for."""
    subject = found.row.subject
    if subject is None:
        return ""
    return f"Tessera has no {subject.text}" + (f"; {subject.advice}" if subject.advice else "")


def _meaning(found: Found) -> str:
    row = found.row
    if row.setting:
        return _flag(row.setting)
    return row.near or row.always or absence(found)


def _opposite(text: str | None) -> str:
    return "false" if truth(text) is not False else "true"


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")
