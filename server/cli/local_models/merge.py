"""`tessera merge`: writes a checkpoint with an adapter added to its weights."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError

from model.adapters.adapter import AdapterReader, find_adapter_folder
from model.adapters.config import MAX_RANK
from model.adapters.updates import UpdateReader
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import stored_dtype
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from model.errors import AdapterError, ModelError
from model.hub.resolve import resolve
from model.network.matrix_shapes import matrix_shapes
from server.cli.output import fail, write_result
from server.log import configure_logging

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from model.adapters.adapter import Adapter
    from model.decoder import DecoderLM
    from model.network.adapter_slots import Updates

_COPIED: Final = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_PARTIAL: Final = ".partial"
_WRITTEN: Final = ("config.json", "model.safetensors.index.json")


def merge(options: argparse.Namespace) -> None:
    """Merge an adapter, and print the folder.

    Exits with status 1 if the model or the adapter cannot be read, or do not fit each other, or the folder cannot be
    written.
    """
    configure_logging("info", "text")
    folder = Path(options.folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise AdapterError(f"{folder} exists; give a folder that does not, or an empty one")
        merge_adapter(resolve(options.model), find_adapter_folder(options.adapter), folder)
    except ModelError as error:
        fail(str(error), "merge")
    except OSError as error:
        fail(f"{error.filename or folder} cannot be written: {error.strerror or error}", "merge")
    except SafetensorError as error:
        fail(f"{folder} cannot be written: {error}", "merge")
    write_result(str(folder))


def merge_adapter(base: Path, adapter: Path, folder: Path) -> None:
    """Write the checkpoint of a model with an adapter.

    Sums are computed in float32 and rounded once to the dtype of the checkpoint. The files get to the folder when all
    are complete.

    Args:
        base: folder of the model.
        adapter: folder of the adapter.
        folder: to write; absent or empty.

    Raises:
        ModelError: one of them cannot be read, they do not fit each other, the model is quantized, or its dtype cannot
            hold a sum.
        OSError: the folder cannot be written; nothing is left in it.
        SafetensorError: likewise.
    """
    config = ModelConfig.from_folder(base)
    if base.is_file() or config.stored_format is not None:
        raise AdapterError(f"{base} is quantized; an adapter is merged into full numbers")
    found = AdapterReader(config, MAX_RANK).read(adapter)
    updates = UpdateReader(config).read(found, torch.float32)
    model = load_model(base, config, stored_dtype(config), "cpu", pack=False)
    _add(model, updates, found)
    with _complete(folder) as partial:
        save_checkpoint(model, partial)
        for pattern in _COPIED:
            for file in base.glob(pattern):
                if file.name not in _WRITTEN:
                    shutil.copyfile(file, partial / file.name)


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield a folder to write, whose files get to another one at the end, or are removed after an error."""
    folder = folder.absolute()
    exists = folder.exists()
    # One that exists may be a mounted disk, which no other folder can replace.
    partial = folder / _PARTIAL if exists else folder.with_name(folder.name + _PARTIAL)
    partial.mkdir(parents=True)
    try:
        yield partial
        if exists:
            for file in sorted(partial.iterdir(), key=lambda it: it.name == "config.json"):
                file.rename(folder / file.name)
            partial.rmdir()
        else:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _add(model: DecoderLM, updates: Updates, adapter: Adapter) -> None:
    """Add what an adapter adds to the weights of a model.

    Raises:
        AdapterError: the model's dtype cannot hold a sum.
    """
    shapes = matrix_shapes(model.network)
    for (index, name), update in updates.items():
        numbers = model.decoder_layers[index].matrices[name].numbers
        parts = update.b.split_with_sizes(list(shapes[index][name].parts), 1)
        added = torch.cat([b.t() @ a for a, b in zip(update.a, parts, strict=True)])
        numbers.copy_(numbers.float() + added)
        if not numbers.isfinite().all():
            place = (index, name)
            changed = [
                module
                for module, it in adapter.modules.items()
                if (it.target.layer, it.target.matrix) == place
            ]
            dtype = str(numbers.dtype).removeprefix("torch.")
            raise AdapterError(
                f"{' and '.join(changed)}: {dtype} cannot hold the sum of weights and adapter"
            )
