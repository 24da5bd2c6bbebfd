"""Reads the adapters of sequences and writes them to the model's slots."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.adapters.adapter import AdapterReader
from model.adapters.updates import UpdateReader
from model.device.niceness import give_way
from model.errors import AdapterError

if TYPE_CHECKING:
    from model.decoder import DecoderLM
    from model.network.adapter_slots import AdapterSlots, Updates
    from server.engine.core.request import AdapterRef

_THREADS: Final = 2


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
        self._updates = UpdateReader(model.config)
        self._threads = ThreadPoolExecutor(_THREADS, "adapters", give_way)

    def read(self, adapter: AdapterRef) -> Future[Updates]:
        """See `AdapterLoader.read`; its error is an `AdapterError` if the files are not those of the digest."""
        return self._threads.submit(self._read, adapter)

    def write(self, slot: int, content: Updates, /) -> None:
        """See `AdapterLoader.write`."""
        self._slots.write(slot, content)

    def num_bytes(self, content: Updates, /) -> int:
        """See `AdapterLoader.num_bytes`."""
        return sum(tensor.nbytes for update in content.values() for tensor in update)

    def _read(self, adapter: AdapterRef) -> Updates:
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
