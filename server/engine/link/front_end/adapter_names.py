"""Decides changes of a service's adapters, one after the other, for all of its front ends. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.engine.link.protocol import AdapterChange, AdapterRefusal

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ADAPTERS: Final = 65_536
"""Names of adapters that a service has at most."""


class AdapterNames:
    """Owns the names under which adapters are loaded; only `decide` changes them.

    A service has one such object, in the process that all front ends reach. They make the changes that it accepts, in
    its order, so all of them have the same adapters. Adapters that a front end finds in a folder are not among them.

    Args:
        names: of the adapters that each front end has at its start.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._at_start = tuple(names)
        # In the order in which they were loaded; None for an adapter of the start.
        self._loaded: dict[str, AdapterChange | None] = dict.fromkeys(self._at_start)

    def decide(self, change: AdapterChange, *, replaces: bool) -> AdapterRefusal | None:
        """Accept a change, or return why it is not made.

        Args:
            change: an adapter that shall be loaded or unloaded.
            replaces: whether it may be loaded in place of another one of its name.
        """
        is_loaded = change.name in self._loaded
        if change.adapter is None:
            if not is_loaded:
                return AdapterRefusal.UNKNOWN
            del self._loaded[change.name]
            return None
        if is_loaded and not replaces:
            return AdapterRefusal.TAKEN
        if not is_loaded and len(self._loaded) >= MAX_ADAPTERS:
            return AdapterRefusal.FULL
        self._loaded.pop(change.name, None)
        self._loaded[change.name] = change
        return None

    def changes(self) -> list[AdapterChange]:
        """Return the changes after which a front end that starts now has the adapters of the others."""
        unloaded = [AdapterChange(name) for name in self._at_start if name not in self._loaded]
        return unloaded + [it for it in self._loaded.values() if it is not None]
