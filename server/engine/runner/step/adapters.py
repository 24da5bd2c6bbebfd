"""Reads the adapters of sequences and writes them to the model's slots."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from model.adapters.adapter import AdapterReader
from model.adapters.updates import UpdateReader
from model.device.niceness import give_way
from model.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.decoder import DecoderLM
    from model.network.adapter_slots import AdapterSlots, Updates
    from server.engine.core.request import AdapterRef

_THREADS: Final = 2

T = TypeVar("T")


class SlotLoader:
    """Implements `server.engine.core.adapter_pool.AdapterLoader` for a model with slots.

    Args:
        model: on its device.
        max_rank: the largest of an adapter.
    """

    def __init__(self, model: DecoderLM, max_rank: int) -> None:
        assert model.adapters is not None
        self._slots: AdapterSlots = model.adapters
        self._pins = model.device.type == "cuda"
        self._reader = AdapterReader(model.config, max_rank)
        self._updates = UpdateReader(model.config, model.communicator)
        self._threads = ThreadPoolExecutor(_THREADS, "adapters", give_way)

    def read(self, adapter: AdapterRef) -> Future[Updates]:
        """See `AdapterLoader.read`; its error is an `AdapterError` if the files are not those of the digest."""
        return self.submit(lambda: self.read_now(adapter))

    def submit(self, read: Callable[[], T]) -> Future[T]:
        """Call a function in a thread of those that read."""
        return self._threads.submit(read)

    def write(self, slot: int, content: Updates, /) -> None:
        """See `AdapterLoader.write`."""
        self._slots.write(slot, content)

    def num_bytes(self, content: Updates, /) -> int:
        """See `AdapterLoader.num_bytes`."""
        return sum(tensor.nbytes for update in content.values() for tensor in update)

    def drop(self, content: Updates, /) -> None:
        """See `AdapterLoader.drop`; nothing else holds it."""

    def read_now(self, adapter: AdapterRef) -> Updates:
        """Read an adapter, or this rank's part of it; for a thread that `submit` uses.

        Raises:
            AdapterError: the files are not those of the digest, or cannot be used.
        """
        found = self._reader.read(Path(adapter.path))
        if found.digest != adapter.digest:
            raise AdapterError(
                f"the files of {adapter.name!r} have changed since it was loaded: load it again"
            )
        updates = self._updates.read(found, self._slots.dtype)
        if self._pins:
            updates = {
                key: type(it)(*(tensor.pin_memory() for tensor in it))
                for key, it in updates.items()
            }
        return updates
