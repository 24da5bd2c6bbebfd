"""The adapters of `--lora-folder`: found when a request chooses them, and read again when their files have changed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

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
P = TypeVar("P")
T = TypeVar("T")


class AdapterFolder:
    """The adapters in a folder, read by threads for it. Used only on the event loop.

    A name without an adapter, and an adapter that cannot be used, are remembered for `recent.SECONDS`; the latter only
    as long as its files do not change. Methods that are not coroutines read no file.

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
        self._there: Recent[bool] = Recent()
        self._failed: Recent[tuple[_Signature, ModelError]] = Recent()
        self._lists: Recent[list[str]] = Recent()
        # Apart, so that a request for an adapter that was read waits for no other one.
        self._readers = ThreadPoolExecutor(_THREADS, "adapter-folder", give_way)
        self._lookers = ThreadPoolExecutor(1, "adapter-files")
        self._looks_for_all = False

    def close(self) -> None:
        """End the threads after what they read now; no call may follow."""
        for threads in (self._readers, self._lookers):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters that were read, in this order, but those that `look` or `look_for_all` has missed since."""
        return [adapter for _, adapter in self._found.values()]

    def __contains__(self, name: str) -> bool:
        """Whether the last `look` for a name has found it."""
        return self._there.get(name) is True

    def names(self) -> list[str]:
        """Return the adapters that were read and some others, as a `look` for an absent one has found them."""
        return [*(it.ref.name for it in self.loaded), *(self._lists.get(_LIST) or ())]

    async def look(self, name: str) -> _Signature | None:
        """Look for an adapter; that a name is absent is remembered for a while.

        Returns:
            What changes with its files; None if there is none of this name.
        """
        if self._path is None:
            return None
        signature = None
        if self._is_name(name) and self._there.get(name) is not False:
            signature = await self._in_thread(_look, self._path / name)
            self._there.put(name, value=signature is not None)
        if signature is None:
            self._found.pop(name, None)
            if self._lists.get(_LIST) is None:
                self._lists.put(_LIST, [])  # so that others do not look too
                self._lists.put(_LIST, await self._in_thread(self._scan, self._path))
        return signature

    async def look_for_all(self) -> None:
        """Forget adapters that were read and are not there any more, unless another call is looking for them."""
        if not self._found or self._looks_for_all:
            return
        self._looks_for_all = True
        try:
            for name in await self._in_thread(self._absent, list(self._found)):
                self._found.pop(name, None)
        finally:
            self._looks_for_all = False

    async def find(self, name: str) -> LoadedAdapter | None:
        """Return an adapter; it is read first if it is new, or has changed, once for all requests that wait for it.

        Returns:
            None if there is none of this name.

        Raises:
            ModelError: it cannot be used.
            OverloadedError: too many others are being read.
        """
        signature = await self.look(name)
        if signature is None:
            return None
        assert self._path is not None
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
            task = self._reading[key] = asyncio.create_task(
                self._read_one(name, signature, self._path / name)
            )
            task.add_done_callback(lambda it: self._end_reading(key, it))
        try:
            found = await asyncio.shield(task)
        except ModelError:
            if await self.look(name) is None:
                return None  # it was removed
            raise
        return None if await self.look(name) is None else found

    async def _read_one(self, name: str, signature: _Signature, folder: Path) -> LoadedAdapter:
        """Read an adapter and remember what was found, also if no request waits for it until then."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._readers, self._read, name, str(folder))
        except ModelError as error:
            if await self.look(name) is not None:
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

    async def _in_thread(self, look: Callable[[P], T], where: P) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._lookers, look, where)

    def _absent(self, names: list[str]) -> list[str]:
        """Return those of some names that have no adapter."""
        assert self._path is not None
        return [name for name in names if not _is_there(self._path / name)]

    def _scan(self, path: Path) -> list[str]:
        """Return the names of some adapters in the folder."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            found = (it.name for it in itertools.islice(entries, _SCANNED))
            return sorted(it for it in found if self._is_name(it) and _is_there(path / it))
        return []

    def _is_name(self, name: str) -> bool:
        return NAME.fullmatch(name) is not None and not name_problem(name, self._served)


def _is_there(folder: Path) -> bool:
    try:
        return (folder / CONFIG).is_file()
    except OSError:  # reading it says why
        return True


def _look(folder: Path) -> _Signature | None:
    """Return what changes with the files of an adapter; None if there is none."""
    if not _is_there(folder):
        return None
    found: list[int] = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = (folder / name).stat()
        except OSError:
            found += (0, 0, 0)
        else:
            found += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return tuple(found)
