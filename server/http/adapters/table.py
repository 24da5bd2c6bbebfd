"""The adapters of the service by name: those of its start, of its folder, and those that were loaded while it runs.

An adapter is checked when it gets into the table, by the front end and without PyTorch. The engine reads it when a
request needs it, and identifies it by its digest; so nothing is to be told to an engine that starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from model.device.niceness import give_way
from model.errors import ModelError, without_paths
from server.engine.link.front_end.adapter_names import MAX_ADAPTERS
from server.engine.link.protocol import AdapterChange, AdapterRefusal
from server.errors import UnknownModelError, ValidationError
from server.http.adapters.folder import AdapterFolder
from server.http.adapters.loaded import LoadedAdapter, read_adapter
from server.http.adapters.names import NAME, name_problem
from server.http.adapters.recent import Recent
from server.http.body.validation import quote
from server.http.config import served_names
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.adapters.adapter import AdapterReader
    from server.engine.core.request import AdapterRef
    from server.engine.link.front_end.client import EngineHandle
    from server.http.config import HTTPConfig

log = logging.getLogger("tessera")

_LISTED: Final = 16
"""Names in an error."""
_THREADS: Final = 2


class AdapterTable:
    """The adapters of the service. Used only on the event loop.

    Those of the start and those that requests load are the same in all front ends, because they are changed by what
    `EngineHandle.share_adapters` announces alone. One of these hides one of the folder with its name.

    Args:
        config: of the service.
        client: decides changes for all front ends.
    """

    def __init__(self, config: HTTPConfig, client: EngineHandle) -> None:
        self._config, self._client = config, client
        self._served = served_names(config)
        self._adapters = {it.ref.name: it for it in config.adapters}
        path = None if config.lora_folder is None else Path(config.lora_folder)
        self._folder = AdapterFolder(path, self._served, self._read)
        # Downloads take long; neither reads of the folder nor anything else waits for them.
        self._threads = ThreadPoolExecutor(_THREADS, "adapter-loads", give_way)
        self._failed_downloads: Recent[ModelError] = Recent()
        self._reader: AdapterReader | None = None
        client.share_adapters(self._adapters, self._apply)

    def close(self) -> None:
        """End the threads; no request may follow."""
        self._folder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters that were read, in the order of loading, then those of the folder."""
        hidden = self._adapters
        return [
            *self._adapters.values(),
            *(it for it in self._folder.loaded if it.ref.name not in hidden),
        ]

    async def look(self, body: object) -> None:
        """Look for the adapters in the folder that a decoded JSON body names, so that `knows` knows them."""
        if not isinstance(body, dict):
            return
        parameters = body.get("parameters")
        given = (
            body.get("model"),
            parameters.get("adapter_id") if isinstance(parameters, dict) else None,
        )
        for name in given:
            if isinstance(name, str):
                await self.look_for(name)

    async def look_for(self, name: str) -> None:
        """Look for an adapter in the folder, so that `knows` knows it."""
        if name not in self._served and name not in self._adapters:
            await self._folder.look(name)

    async def look_for_all(self) -> None:
        """Look for the adapters of the folder that were read, so that `loaded` has none that was removed."""
        await self._folder.look_for_all()

    def knows(self, name: str) -> bool:
        """Whether a request may choose a name: it is in the table, or was found in the folder."""
        return name in self._adapters or name in self._folder

    def choose(self, name: str) -> None:
        """Let the current request have an adapter; a name of the model chooses none.

        Raises:
            UnknownModelError: there is none of this name.
        """
        if name in self._served:
            return
        if not self.knows(name):
            raise self._unknown(name, "does not exist")
        current_request().adapter_name = name

    def listed(self) -> list[str]:
        """Return up to `_LISTED` names that a request may choose, and how many more are known, for an error."""
        names = dict.fromkeys([*self._adapters, *self._folder.names()])
        more = len(names) - _LISTED
        listed = [f"`{it}`" for it in list(names)[:_LISTED]]
        return [*listed, f"{more} more"] if more > 0 else listed

    async def find(self, name: str) -> AdapterRef:
        """Return an adapter for the engine; it is read first if it is new in the folder, or has changed there.

        Raises:
            UnknownModelError: there is none any more.
            ValidationError: it does not fit the model.
            OverloadedError: too many others are being read.
        """
        found = self._adapters.get(name)
        if found is None:
            with self._refusal(name, str(Path(self._config.lora_folder or "") / name)):
                in_folder = await self._folder.find(name)
            found = self._adapters.get(name, in_folder)  # it may have been loaded meanwhile
        if found is None:
            raise self._unknown(name, "does not exist")
        if current_request().limits.manages_adapters:
            return msgspec.structs.replace(found.ref, shows_paths=True)
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
        if (problem := name_problem(name, self._served)) is not None:
            raise ValidationError(f"`lora_name` {quote('', name)} {problem}")
        if not replace:
            await self.look_for(name)
            if self.knows(name):
                raise self._refused(AdapterRefusal.TAKEN, name)
        is_here = _exists(path)
        with self._refusal(name, path):
            failed = None if is_here else self._failed_downloads.get(path)
            if failed is not None:
                raise type(failed)(*failed.args)
            loop = asyncio.get_running_loop()
            try:
                found = await loop.run_in_executor(self._threads, self._read, name, path)
            except ModelError as error:
                if not is_here:
                    self._failed_downloads.put(path, error)
                raise
        change = AdapterChange(name, found.ref, found.rank)
        refusal = await self._client.change_adapters(change, replaces=replace)
        if refusal is not None:
            raise self._refused(refusal, name)

    async def unload(self, name: str) -> None:
        """Offer an adapter no more; requests that run keep it.

        Raises:
            UnknownModelError: there is none of this name.
            ValidationError: it is in the folder.
        """
        await self.look_for(name)
        if name not in self._adapters and name in self._folder:
            raise ValidationError(
                f"the adapter {quote('', name)} is in --lora-folder; it is unloaded when its folder is removed there"
            )
        refusal = await self._client.change_adapters(AdapterChange(name))
        if refusal is not None:
            raise self._refused(refusal, name)

    def _apply(self, change: AdapterChange) -> None:
        self._adapters.pop(change.name, None)
        if change.adapter is not None:
            self._adapters[change.name] = LoadedAdapter(change.adapter, change.rank)

    def _refused(self, refusal: AdapterRefusal, name: str) -> ValidationError | UnknownModelError:
        """Return the error for a change that is not made."""
        if refusal is AdapterRefusal.UNKNOWN:
            return self._unknown(name, "is not loaded")
        if refusal is AdapterRefusal.FULL:
            return ValidationError(
                f"the service has {MAX_ADAPTERS} adapters already, the most it can"
            )
        place = "loaded" if name in self._adapters else "in --lora-folder"
        return ValidationError(
            f"`lora_name` {quote('', name)} is {place} already; `load_inplace` true replaces it"
        )

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

    def _read(self, name: str, path: str) -> LoadedAdapter:
        if self._reader is None:
            assert self._config.lora_base is not None
            self._reader = self._config.lora_base.reader()
        return read_adapter(self._reader, name, path)

    def _unknown(self, name: str, what: str) -> UnknownModelError:
        listed = " and ".join(self.listed()) or "no adapters"
        return UnknownModelError(f"the adapter {quote('', name)} {what}; this server has {listed}")


def _exists(path: str) -> bool:
    """Return whether a path is one of this machine, or none at all, rather than a repository of the Hub."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return True
