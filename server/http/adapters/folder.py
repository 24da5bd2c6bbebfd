"""The adapters of `--lora-folder`: found when a request chooses them, and read again when their files have changed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from model.adapters.config import CONFIG
from model.adapters.file import WEIGHTS
from model.device.niceness import give_way
from model.errors import ModelError
from server.errors import OverloadedError
from server.http.adapters.names import NAME, name_problem
from server.http.adapters.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from server.http.adapters.loaded import LoadedAdapter

_MOST: Final = 65_536
"""Adapters that are remembered; one that is forgotten is read again."""
_SCANNED: Final = 256
"""Entries of the folder that are looked at for a list of names."""
_THREADS: Final = 2
_MOST_READS: Final = 64
"""Adapters that are read or wait for that; a request for a further one is refused."""
_LIST: Final = "list"

_Signature = tuple[int, ...]


class AdapterFolder:
    """The adapters in a folder, read by threads for it. Used only on the event loop.

    A name without an adapter, and an adapter that cannot be used, are remembered for `recent.SECONDS`; the latter only
    as long as its files do not change.

    Args:
        path: of the folder; None if the service has none.
        served: names of the model, which are not those of adapters.
        read: reads and checks an adapter, given its name and the path of its folder; raises a `ModelError`.
    """

    def __init__(
        self,
        path: Path | None,
        served: Collection[str],
        read: Callable[[str, str], LoadedAdapter],
    ) -> None:
        self._path, self._served, self._read = path, served, read
        self._found: OrderedDict[str, tuple[_Signature, LoadedAdapter]] = OrderedDict()
        self._reading: dict[tuple[str, _Signature], asyncio.Task[LoadedAdapter]] = {}
        self._absent: Recent[bool] = Recent()
        self._failed: Recent[tuple[_Signature, ModelError]] = Recent()
        self._lists: Recent[list[str]] = Recent()
        # Apart, so that a request for an adapter that was read waits for no other one.
        self._readers = ThreadPoolExecutor(_THREADS, "adapter-folder", give_way)
        self._lookers = ThreadPoolExecutor(1, "adapter-files")

    def close(self) -> None:
        """End the threads after what they read now; no call may follow."""
        for threads in (self._readers, self._lookers):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters that were read and are still there, in the order in which they were read."""
        for name in list(self._found):
            if not self._is_there(name):
                del self._found[name]
        return [adapter for _, adapter in self._found.values()]

    def __contains__(self, name: str) -> bool:
        if self._path is None or not NAME.fullmatch(name) or name_problem(name, self._served):
            return False
        if self._absent.get(name):
            return False
        if self._is_there(name):
            return True
        self._found.pop(name, None)
        self._absent.put(name, value=True)
        return False

    def names(self) -> list[str]:
        """Return the adapters that were read and some others, as they were a short time ago."""
        if self._path is None:
            return []
        names = self._lists.get(_LIST)
        if names is None:
            names = [it.ref.name for it in self.loaded]
            with contextlib.suppress(OSError), os.scandir(self._path) as entries:
                found = (it.name for it in itertools.islice(entries, _SCANNED))
                names += sorted(it for it in found if self._is_adapter(it))
            self._lists.put(_LIST, names)
        return names

    async def find(self, name: str) -> LoadedAdapter | None:
        """Return an adapter; it is read first if it is new, or has changed, once for all requests that wait for it.

        Returns:
            None if there is none of this name.

        Raises:
            ModelError: it cannot be used.
            OverloadedError: too many others are being read.
        """
        if name not in self:
            return None
        assert self._path is not None
        folder = self._path / name
        loop = asyncio.get_running_loop()
        signature = await loop.run_in_executor(self._lookers, _signature, folder)
        known = self._found.get(name)
        if known is not None and known[0] == signature:
            return known[1]
        failed = self._failed.get(name)
        if failed is not None and failed[0] == signature:
            raise type(failed[1])(*failed[1].args)
        key = name, signature
        if (task := self._reading.get(key)) is None:
            if len(self._reading) >= _MOST_READS:
                raise OverloadedError(
                    f"Model is overloaded: {len(self._reading)} adapters are being read", 1
                )
            task = self._reading[key] = asyncio.create_task(self._read_one(name, signature, folder))
            task.add_done_callback(lambda it: self._end_reading(key, it))
        try:
            found = await asyncio.shield(task)
        except ModelError:
            if name not in self:
                return None  # it was removed
            raise
        return found if name in self else None

    async def _read_one(self, name: str, signature: _Signature, folder: Path) -> LoadedAdapter:
        """Read an adapter and remember what was found, also if no request waits for it until then."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._readers, self._read, name, str(folder))
        except ModelError as error:
            if name in self:
                self._failed.put(name, (signature, error))
            raise
        self._failed.forget(name)
        self._found[name] = signature, found
        if len(self._found) > _MOST:
            self._found.popitem(last=False)
        return found

    def _end_reading(self, key: tuple[str, _Signature], task: asyncio.Task[LoadedAdapter]) -> None:
        self._reading.pop(key, None)
        if not task.cancelled():
            task.exception()  # which asyncio would log if no request waits for it

    def _is_adapter(self, name: str) -> bool:
        is_name = NAME.fullmatch(name) and not name_problem(name, self._served)
        return bool(is_name) and self._is_there(name)

    def _is_there(self, name: str) -> bool:
        assert self._path is not None
        try:
            return (self._path / name / CONFIG).is_file()
        except OSError:  # reading it says why
            return True


def _signature(folder: Path) -> _Signature:
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
