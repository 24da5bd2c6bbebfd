"""Loads a model from a checkpoint, whose tensors must match it exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from kernels.weight_format import LIBRARY_FORMATS, unquantized
from kernels.weights import Weight, stacked_format
from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import (
    read_tensors,
)
from model.checkpoint.fit import checked_headers, listed
from model.checkpoint.formats.format import StoredTensor
from model.checkpoint.parameter_parts import named_parts
from model.checkpoint.stored_parts import StoredPart
from model.decoder import DecoderLM
from model.device.memory import drop_pages, free_bytes
from model.device.quantizations import product_formats
from model.errors import WeightsError
from model.network.parameters import TABLES

if TYPE_CHECKING:
    from kernels.collective.communicator import Communicator
    from kernels.weight_format import WeightFormat

LoadFormat = Literal["auto", "safetensors", "pickle", "dummy"]
LoadProgress = Callable[[int, int, int, int], None]
"""Called with (bytes loaded, total bytes, number of the file that is read, number of files)."""

_logger = logging.getLogger(__name__)

_DUMMY_SEED: Final = 0
_HALF: Final = "F16"


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    progress: LoadProgress | None = None,
    *,
    pack: bool = True,
    weight_format: WeightFormat | None = None,
) -> DecoderLM:
    """Build a whole model and load its weights; see `load_part` for most arguments and errors.

    Args:
        path: as for `load_part`.
        config: as for `load_part`.
        dtype: as for `load_part`.
        device: as for `load_part`.
        load_format: as for `load_part`.
        progress: as for `load_part`.
        pack: whether to call `DecoderLM.optimize`; False for a model that is trained or saved.
        weight_format: as for `load_part`.
    """
    model = load_part(
        path, config, dtype, device, load_format, progress, weight_format=weight_format
    )
    if pack:
        model.optimize()
    return model


def load_part(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    progress: LoadProgress | None = None,
    *,
    weight_format: WeightFormat | None = None,
    communicator: Communicator | None = None,
) -> DecoderLM:
    """Build the model, or a rank's part of it, and load its weights.

    The headers of all files are compared with the configuration before memory is allocated. Tensors are then copied
    one at a time from the mapped files, so that memory holds only one copy of the weights. A change of their format
    additionally needs a few float32 copies of one tensor.

    Args:
        path: the checkpoint folder.
        config: its configuration.
        dtype: dtype of the weights in the model, regardless of the files'.
        device: device of the model.
        load_format: "auto" and "safetensors" read safetensors files, "pickle" pickle files too where there are none;
            "dummy" initializes random weights.
        progress: called after every tensor.
        weight_format: in which the layers' matrices are held: None for full numbers, the checkpoint's own, or one of
            `QUANTIZATIONS`, to which they are rounded (for int8 and int4 see `product_formats`).
        communicator: of the ranks that share the model, of which each loads its part; None for a model that is whole.

    Returns:
        The model, in evaluation mode, its parameters frozen. Its configuration differs from `config` if the files have
        a head of their own although that ties it to the embedding.

    Raises:
        WeightsError: the files do not match the configuration or are damaged, or memory does not suffice.
    """
    device = torch.device(device)
    stored: dict[str, StoredPart] = {}
    if load_format != "dummy":
        stored, config = checked_headers(path, config, pickle=load_format == "pickle")
    formats: WeightFormat | dict[str, WeightFormat] | None = weight_format
    held: dict[str, WeightFormat] = {}
    rounds = weight_format in LIBRARY_FORMATS
    has_format = weight_format is not None and config.stored_format is not None
    if stored and has_format and (rounds or weight_format == config.stored_format):
        formats = held = _matrix_formats(config, stored, communicator, dtype)
        if device.type != "cpu":
            formats = _full_tables(formats)
    if rounds:
        assert weight_format is not None
        formats = product_formats(config.network, weight_format, held)
    model = _allocate(config, dtype, device, formats, communicator)
    if load_format == "dummy":
        model.init_weights(seed=_DUMMY_SEED)
    else:
        _load(model, stored, progress)
    return model


def _load(model: DecoderLM, stored: dict[str, StoredPart], progress: LoadProgress | None) -> None:
    """Copy the tensors of a checkpoint, or a rank's part of each, to the model's parameters."""
    names = {it.name: name for name, it in stored.items()}
    scales = _scales_elsewhere(stored.values())
    parts = named_parts(model)
    rank = model.communicator.rank if model.communicator else 0
    done, total = 0, sum(it.entry.num_bytes for it in stored.values())
    ordered = dict.fromkeys(it.entry.file for it in stored.values())
    files = {file: number for number, file in enumerate(ordered, start=1)}
    for name, tensor in read_tensors(_in_order(stored.values())):
        if name not in names:
            scales.setdefault(name, tensor)
            continue
        it = stored[names[name]]
        values: Any = it.read(tensor, scales)
        for scale, _ in it.scales.values():
            del scales[scale]
        try:
            parts[names[name]].load(values, rank)
        except ValueError as error:
            raise WeightsError(f"{name} {error}; serve it without --quantization") from None
        if it.entry.dtype != _HALF and (problem := _overflow(parts[names[name]].values, values)):
            raise WeightsError(f"{name} {problem}")
        drop_pages(tensor)
        done += it.entry.num_bytes
        if progress is not None:
            progress(done, total, files[it.entry.file], len(files))


def _overflow(held: Weight | Tensor, stored: Weight | Tensor) -> str | None:
    """Return what the matter is if float16 cannot hold the values of a checkpoint; the end of a sentence."""
    numbers = held if isinstance(held, Tensor) else held.numbers
    if numbers.dtype is not torch.float16 or bool(numbers.isfinite().all()):
        return None
    values = stored if isinstance(stored, Tensor) else stored.dequantize()
    if not bool(values.isfinite().all()):
        return "has weights that are not finite"
    largest, most = values.abs().max().item(), torch.finfo(torch.float16).max
    return (
        f"has weights up to {largest:.3g}; float16 holds {most:.0f} at most: set --dtype to bfloat16 or"
        " float32"
    )


def _scales_elsewhere(stored: Iterable[StoredPart]) -> dict[str, Tensor]:
    """Return copies of the scales that are not in the files of their numbers, by their names."""
    elsewhere = {
        name: entry
        for it in stored
        for name, entry in it.scales.values()
        if entry.file != it.entry.file
    }
    return {name: scale.clone() for name, scale in read_tensors(elsewhere)}


def _in_order(stored: Iterable[StoredPart]) -> dict[str, StoredTensor]:
    """Return the tensors of parts, of each its scales first, unless these are in another file than the numbers."""
    found: dict[str, StoredTensor] = {}
    for it in stored:
        found |= {name: entry for name, entry in it.scales.values() if entry.file == it.entry.file}
        found[it.name] = it.entry
    return found


def _matrix_formats(
    config: ModelConfig,
    stored: dict[str, StoredPart],
    communicator: Communicator | None,
    dtype: torch.dtype,
) -> dict[str, WeightFormat]:
    """Return the formats in which a rank's matrices hold those of a checkpoint without loss; see `DecoderLM`.

    Embedding and head have one even if they are full numbers, which no file has in more bits than `dtype`, of the
    model: they would take more memory as those, and twice that if a product copied them.
    """
    rank = communicator.rank if communicator else 0
    weights: dict[str, list[Weight]] = {}
    ordered: set[str] = set()
    planned = DecoderLM(config, device="meta", communicator=communicator)
    for name, part in named_parts(planned).items():
        if isinstance(part.values, Weight):
            try:
                planned_parts = part.loaded(stored[name].empty(), rank)
            except ValueError as error:
                text = f"{name}: {error}; set --tensor-parallel to another number"
                raise WeightsError(text) from None
            weights.setdefault(part.parameter, []).extend(planned_parts)
            if stored[name].order is not None:
                ordered.add(part.parameter)
    found = {parameter: stacked_format(its) for parameter, its in weights.items()}
    full = unquantized(dtype)
    for name in TABLES:
        if name in found and found[name] is None:
            (table,) = weights[name]
            found[name] = table.format if table.format.bits < full.bits else full
    _log_mixed(weights, found)
    if undone := {it for it in ordered if found[it] is None}:
        _logger.warning(
            "%s are held as full numbers, which takes more memory: their inputs have an order, which differs among "
            "what they stack or would be divided among ranks",
            listed(undone),
        )
    return {parameter: form for parameter, form in found.items() if form is not None}


def _full_tables(formats: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Return formats without those of embedding and head, which kernels for GPUs read as full numbers."""
    if names := [name for name in TABLES if name in formats and formats[name].is_quantized]:
        _logger.info("held as full numbers, as kernels for GPUs read them: %s", listed(names))
    return {name: form for name, form in formats.items() if name not in TABLES}


def _log_mixed(
    weights: Mapping[str, Sequence[Weight]], found: Mapping[str, WeightFormat | None]
) -> None:
    """Log how matrices are held whose parts are stored in several formats."""
    held: dict[tuple[str, str], list[str]] = {}
    for parameter, its in weights.items():
        forms = {it.format for it in its}
        names = sorted({it.name if it.is_quantized else "full numbers" for it in forms})
        if len(names) > 1 and any(it.is_quantized for it in forms):
            form = found[parameter]
            how = "full numbers" if form is None else f"{form.bits} bits in groups of {form.group}"
            held.setdefault((" and ".join(names), how), []).append(parameter)
    for (names_text, how), parameters in held.items():
        _logger.info("stored as %s, held as %s: %s", names_text, how, listed(parameters))


def _allocate(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormat | Mapping[str, WeightFormat] | None,
    communicator: Communicator | None,
) -> DecoderLM:
    planned = DecoderLM(config, dtype, "meta", formats, communicator)
    num_bytes, form = planned.weight_bytes, planned.weight_format
    wanted = f"the weights need {num_bytes / 2**30:.1f} GiB as {form.name} on {device}"
    # Linux overcommits memory: an allocation that is too large succeeds, and the process is killed when it uses it.
    if num_bytes > (free := free_bytes(device)):
        raise WeightsError(f"{wanted}; free are {free / 2**30:.1f} GiB")
    try:
        model = DecoderLM(config, dtype, device, formats, communicator)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise WeightsError(f"{wanted}, which failed: {error}") from None
    return model.requires_grad_(requires_grad=False).eval()
