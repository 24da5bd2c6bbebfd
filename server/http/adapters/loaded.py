"""Adapters that were checked against the model, as front ends get them at their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from model.adapters.adapter import AdapterReader, find_adapter_folder
from model.checkpoint.config import ModelConfig
from model.errors import ModelError
from model.families.unlisted import ModelBackend
from server.engine.core.request import AdapterRef

if TYPE_CHECKING:
    from collections.abc import Iterable


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that was checked.

    Attributes:
        ref: for the engine.
        rank: the largest of its modules.
    """

    ref: AdapterRef
    rank: int


class AdapterBase(msgspec.Struct, frozen=True):
    """What adapters are checked against.

    Attributes:
        path: of the checkpoint.
        backend: see `EngineSettings.model_backend`.
        max_rank: the largest rank of an adapter.
    """

    path: str
    backend: ModelBackend
    max_rank: int

    def reader(self) -> AdapterReader:
        """Return a reader of adapters of the model.

        Raises:
            ModelError: it cannot have adapters.
        """
        return AdapterReader(ModelConfig.from_folder(self.path, self.backend), self.max_rank)


def read_adapter(reader: AdapterReader, name: str, path: str) -> LoadedAdapter:
    """Find, download if necessary, read and check an adapter.

    Raises:
        ModelError: there is none, or it does not fit the model.
    """
    folder = find_adapter_folder(path).absolute()
    found = reader.read(folder)
    return LoadedAdapter(AdapterRef(name, str(folder), found.digest), found.rank)


def read_modules(base: AdapterBase, modules: Iterable[str]) -> tuple[LoadedAdapter, ...]:
    """Read the adapters of `--lora-modules`.

    Raises:
        ModelError: of the type of the problem; the message names the adapter.
    """
    found: dict[str, LoadedAdapter] = {}
    reader: AdapterReader | None = None
    for module in modules:
        name, _, path = module.partition("=")
        reader = reader or base.reader()
        try:
            if name in found:
                raise ModelError("the name is given twice")
            found[name] = read_adapter(reader, name, path)
        except ModelError as error:
            raise type(error)(f"--lora-modules {name}: {error}") from None
    return tuple(found.values())
