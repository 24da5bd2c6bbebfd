"""The adapters of the service by name: those of its start, of its folder, and those that were loaded while it runs.

An adapter is checked when it gets into the table, by the front end and without PyTorch. The engine reads it when a
request needs it, and identifies it by its digest; so nothing is to be told to an engine that starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.adapters.config import CONFIG
from model.adapters.file import WEIGHTS
from model.errors import ModelError, without_paths
from server.engine.link.protocol import AdapterChange
from server.errors import UnknownModelError, ValidationError
from server.http.adapters.loaded import LoadedAdapter, read_adapter
from server.http.body.validation import quote
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.adapters.adapter import AdapterReader
    from server.engine.core.request import AdapterRef
    from server.engine.link.front_end.client import EngineHandle
    from server.http.config import HTTPConfig

log = logging.getLogger("tessera")

NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_MOST: Final = 65_536
"""Names in the table."""
_LISTED: Final = 16
"""Names in an error."""
_SCANNED: Final = 256
"""Entries of the folder that are looked at for these."""


class AdapterTable:
    """The adapters of the service. Used only on the event loop.

    Args:
        config: of the service.
        client: announces changes to the other front ends.
    """

    def __init__(self, config: HTTPConfig, client: EngineHandle) -> None:
        self._config, self._client = config, client
        self._adapters = {it.ref.name: it for it in config.adapters}
        self._folder = None if config.lora_folder is None else Path(config.lora_folder)
        # Of the files of adapters that were found in the folder, which are read again when they have changed.
        self._signatures: dict[str, tuple[int, ...]] = {}
        self._reading: dict[tuple[str, tuple[int, ...]], asyncio.Task[LoadedAdapter]] = {}
        self._reader: AdapterReader | None = None
        client.on_adapter = self._apply

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters in the table, in the order in which they were loaded."""
        self._forget_removed()
        return list(self._adapters.values())

    def knows(self, name: str) -> bool:
        """Whether a request may choose a name: it is in the table, or in the folder."""
        return self._in_folder(name) is not None or self._get(name) is not None

    def choose(self, name: str) -> None:
        """Let the current request have an adapter.

        Raises:
            UnknownModelError: there is none of this name.
        """
        if not self.knows(name):
            raise self._unknown(name, "does not exist")
        current_request().adapter_name = name

    def listed(self) -> list[str]:
        """Return up to `_LISTED` names that a request may choose, and how many more are in the table, for an error."""
        names = dict.fromkeys(self._adapters)
        more = len(names) - _LISTED
        if more < 0 and self._folder is not None:
            with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
                found = (it.name for it in itertools.islice(entries, _SCANNED))
                names |= dict.fromkeys(sorted(filter(self._in_folder, found)))
        listed = [f"`{it}`" for it in list(names)[:_LISTED]]
        return [*listed, f"{more} more"] if more > 0 else listed

    async def find(self, name: str) -> AdapterRef:
        """Return an adapter for the engine; it is read first if it is new in the folder, or has changed there.

        Raises:
            UnknownModelError: there is none any more.
            ValidationError: it does not fit the model.
        """
        folder = self._in_folder(name)
        if folder is not None and (name not in self._adapters or name in self._signatures):
            await self._update(name, folder)
        if (found := self._get(name)) is None:
            raise self._unknown(name, "does not exist")
        return found.ref

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Read and check an adapter, and offer it under a name.

        Args:
            name: of the adapter.
            path: of its folder, or a repository of the Hub.
            replace: whether it may take the place of another one; requests that run keep that.

        Raises:
            ValidationError: the name is not one, or in use, or the adapter does not fit the model.
        """
        if not NAME.fullmatch(name):
            raise ValidationError(
                "`lora_name` must be letters, digits, '_', '.' and '-', maybe with one '/'. "
                f"Given: {quote('', name)}"
            )
        if name in (self._config.served_model_name or (self._config.model_id,)):
            raise ValidationError(f"`lora_name` {quote('', name)} is a name of the model")
        self._check_free(name, replace=replace)
        self._check_room(name)
        with self._refusal(name, path):
            found = await asyncio.to_thread(self._read_now, name, path)
        # Others may have been loaded meanwhile.
        self._check_free(name, replace=replace)
        self._check_room(name)
        self._client.announce(AdapterChange(name, found.ref, found.rank))

    def unload(self, name: str) -> None:
        """Offer an adapter no more; requests that run keep it.

        Raises:
            UnknownModelError: there is none of this name.
            ValidationError: it is in the folder.
        """
        found = self._get(name)
        if name in self._signatures or (found is None and self._in_folder(name) is not None):
            raise ValidationError(
                f"the adapter {quote('', name)} is in --lora-folder; it is unloaded when its folder is removed there"
            )
        if found is None:
            raise self._unknown(name, "is not loaded")
        self._client.announce(AdapterChange(name))

    def _apply(self, change: AdapterChange) -> None:
        self._signatures.pop(change.name, None)
        self._adapters.pop(change.name, None)
        if change.adapter is not None:
            self._adapters[change.name] = LoadedAdapter(change.adapter, change.rank)

    def _get(self, name: str) -> LoadedAdapter | None:
        """Return the adapter of a name, if it is in the table; one that is no more in its folder is forgotten."""
        if name in self._signatures and self._in_folder(name) is None:
            del self._signatures[name]
            self._adapters.pop(name, None)
        return self._adapters.get(name)

    def _forget_removed(self) -> None:
        for name in list(self._signatures):
            self._get(name)

    def _check_free(self, name: str, *, replace: bool) -> None:
        if not replace and self._get(name) is not None:
            raise ValidationError(
                f"`lora_name` {quote('', name)} is loaded already; `load_inplace` true replaces it"
            )

    def _check_room(self, name: str) -> None:
        if name in self._adapters or len(self._adapters) < _MOST:
            return
        self._forget_removed()
        if len(self._adapters) >= _MOST:
            raise ValidationError(f"the service has {_MOST} adapters already, the most it can")

    async def _update(self, name: str, folder: Path) -> None:
        """Read an adapter of the folder if it is new or has changed, once for all requests that wait for it.

        An adapter that gets the name in another way meanwhile is kept.

        Raises:
            ValidationError: it cannot be read, or does not fit the model.
        """
        signature = await asyncio.to_thread(_signature, folder)
        if name in self._adapters and self._signatures.get(name, signature) == signature:
            return
        self._check_room(name)
        key = name, signature
        task = self._reading.get(key)
        if task is None:
            reading = asyncio.to_thread(self._read_now, name, str(folder))
            task = self._reading[key] = asyncio.create_task(reading)
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        with self._refusal(name, str(folder)):
            try:
                found = await asyncio.shield(task)
            except ModelError:
                if self._in_folder(name) is None:
                    return  # it was removed
                raise
        if name in self._adapters and name not in self._signatures:
            return
        self._check_room(name)
        self._adapters[name], self._signatures[name] = found, signature

    @contextlib.contextmanager
    def _refusal(self, name: str, path: str) -> Iterator[None]:
        """Let a client know why an adapter is refused; paths of this machine only if its key manages adapters.

        Raises:
            ValidationError: the service takes no adapters, or one cannot be read, or does not fit the model.
        """
        if not self._config.max_loras or self._config.lora_base is None:
            raise ValidationError("the service takes no adapters: start it with --max-loras")
        try:
            yield
        except ModelError as error:
            reason = str(error)
            if not current_request().limits.manages_adapters:
                log.warning("the adapter %s cannot be loaded: %s", name, error)
                reason = without_paths(reason, path)
            raise ValidationError(
                f"the adapter {quote('', name)} cannot be loaded: {reason}"
            ) from None

    def _read_now(self, name: str, path: str) -> LoadedAdapter:
        if self._reader is None:
            assert self._config.lora_base is not None
            self._reader = self._config.lora_base.reader()
        return read_adapter(self._reader, name, path)

    def _in_folder(self, name: str) -> Path | None:
        """Return the folder of an adapter in the folder of adapters; None if there is none."""
        if self._folder is None or not NAME.fullmatch(name):
            return None
        folder = self._folder / name
        try:
            is_there = (folder / CONFIG).is_file()
        except OSError:  # reading it says why
            is_there = True
        return folder if is_there else None

    def _unknown(self, name: str, what: str) -> UnknownModelError:
        listed = " and ".join(self.listed()) or "no adapters"
        return UnknownModelError(f"the adapter {quote('', name)} {what}; this server has {listed}")


def _signature(folder: Path) -> tuple[int, ...]:
    """Return what changes with the files of an adapter."""
    found: list[int] = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = (folder / name).stat()
        except OSError:
            found += (0, 0, 0)
        else:
            found += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return tuple(found)
