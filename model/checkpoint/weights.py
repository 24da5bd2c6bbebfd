"""Loads a model from a checkpoint, whose tensors must match it exactly, and saves a model in the same format."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.weight_format import LIBRARY_FORMATS, unquantized
from kernels.weights import Weight, stacked_format
from model.checkpoint.config import ModelConfig
from model.checkpoint.formats.format import StoredTensor
from model.checkpoint.formats.int_quantized import INT_QUANTIZED, compress, to_config
from model.checkpoint.formats.table import stored_formats
from model.checkpoint.gguf_parts import gguf_parts
from model.checkpoint.implied import are_equal, different_buffers
from model.checkpoint.parameter_parts import ParameterPart, named_parts, unread_names
from model.checkpoint.shards import (
    check_dtypes,
    read_headers,
    read_tensors,
)
from model.checkpoint.stored_names import Buffer, StoredNames, check_merged, hint
from model.checkpoint.stored_parts import StoredPart, combine
from model.decoder import DecoderLM
from model.device.memory import drop_pages, free_bytes
from model.device.quantizations import product_formats
from model.errors import WeightsError
from model.families.table import FAMILIES
from model.families.tensors import HEAD, Tensors
from model.network.parameters import TABLES
from model.weight_files import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from kernels.collective.communicator import Communicator
    from kernels.weight_format import WeightFormat

LoadFormat = Literal["auto", "safetensors", "pickle", "dummy"]
LoadProgress = Callable[[int, int, int, int], None]
"""Called with (bytes loaded, total bytes, number of the file that is read, number of files)."""

_logger = logging.getLogger(__name__)

_DUMMY_SEED: Final = 0
_LISTED_NAMES: Final = 8
_HALF: Final = "F16"
_IN_LAYER: Final = re.compile(r"\.\d+\.")


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
        stored, config = _checked_headers(path, config, pickle=load_format == "pickle")
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
            _listed(undone),
        )
    return {parameter: form for parameter, form in found.items() if form is not None}


def _full_tables(formats: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Return formats without those of embedding and head, which kernels for GPUs read as full numbers."""
    if names := [name for name in TABLES if name in formats and formats[name].is_quantized]:
        _logger.info("held as full numbers, as kernels for GPUs read them: %s", _listed(names))
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
        _logger.info("stored as %s, held as %s: %s", names_text, how, _listed(parameters))


def _checked_headers(
    path: Path, config: ModelConfig, *, pickle: bool
) -> tuple[dict[str, StoredPart], ModelConfig]:
    """Return what to load, by the names in the model, and the configuration that the files have.

    Raises:
        WeightsError: names, shapes or dtypes differ from those of the model.
    """
    # A GGUF file says itself what belongs together.
    parts = gguf_parts(path) if path.is_file() else None
    if parts is None:
        headers = read_headers(path, pickle=pickle)
        check_merged(headers)
    else:
        headers = {name: it.entry for name, it in parts.items()}
    needed: dict[str, ParameterPart] = named_parts(DecoderLM(config, device="meta"))
    family, network = FAMILIES[config.architecture], config.network
    names = StoredNames(family.tensors, needed, len(network.layers))
    head = f"{family.tensors.modules[HEAD]}.weight"
    if network.tied:
        names.add(head)
    unread = unread_names(network, family.tensors)
    for module in unread:
        names.add(f"{module}.weight")
    # What is ignored is not looked at any further, whatever its dtype is.
    ignored = [
        name
        for name in headers
        if names.is_ignored(name) or names.full(name).rpartition(".")[0] in unread
    ]
    beyond = [name for name in headers if names.is_beyond_layers(name)]
    buffers = {
        name: (kind, entry)
        for name, entry in headers.items()
        if (kind := names.buffer(name, entry.shape)) is not None
    }
    unused = {*ignored, *beyond, *buffers}
    used = {name: entry for name, entry in headers.items() if name not in unused}
    found = _combined(used, config) if parts is None else {name: parts[name] for name in used}
    stored = names.mapped(found)
    if network.tied and head in stored:
        config = _with_stored_head(stored, config, head)
        needed = named_parts(DecoderLM(config, device="meta"))
    extra = {name: it for name, it in stored.items() if name not in needed}
    implied = _zero_biases(stored, extra) | _checked_constants(family.tensors, extra)
    _check_fit(path, {name: it for name, it in stored.items() if name not in implied}, needed)
    ignored += implied
    _report_unused(path, config, ignored, beyond, buffers)
    return {name: stored[name] for name in needed}, config


def _with_stored_head(stored: dict[str, StoredPart], config: ModelConfig, head: str) -> ModelConfig:
    """Return the configuration of a checkpoint that stores a head which its config.json ties to the embedding.

    As in transformers 5, the head is tied only if it equals the embedding, whose place it takes if that is not stored.

    Args:
        stored: the tensors; changed.
        config: of the checkpoint.
        head: the name of the head.
    """
    tensors = FAMILIES[config.architecture].tensors
    embedding = f"{tensors.prefix}{tensors.modules['embed_tokens']}.weight"
    if embedding not in stored:
        stored[embedding] = stored.pop(head)
        return config
    if are_equal(stored[head], stored[embedding]):
        del stored[head]
        return config
    _logger.warning(
        "config.json ties %s to %s, but the files have both with different values: the head that is stored is used",
        stored[head].name,
        stored[embedding].name,
    )
    return config.untied()


def _check_fit(
    path: Path, stored: Mapping[str, StoredPart], needed: Mapping[str, ParameterPart]
) -> None:
    """Check that the names and shapes of tensors are those of the model.

    Raises:
        WeightsError: they are not.
    """
    missing, unexpected = needed.keys() - stored.keys(), stored.keys() - needed.keys()
    misshaped = [
        f"{name} is {list(stored[name].shape)}, must be {list(part.stored_shape)}"
        for name, part in needed.items()
        if name in stored and stored[name].shape != part.stored_shape
    ]
    if missing or unexpected or misshaped:
        counts = (("missing", missing), ("unexpected", unexpected), ("wrongly shaped", misshaped))
        raise WeightsError(
            f"the tensors in {path} do not fit its config.json: "
            + "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in counts if names)
            + ("" if path.is_file() else hint(unexpected))
        )


def _report_unused(
    path: Path,
    config: ModelConfig,
    ignored: Iterable[str],
    beyond: Iterable[str],
    buffers: Mapping[str, tuple[Buffer, StoredTensor]],
) -> None:
    """Log what the files have and the model does not use, as a warning if that may be a mistake."""
    scales = [name for name, (kind, _) in buffers.items() if kind is Buffer.CACHE_SCALE]
    implied = buffers.keys() - scales
    if names := [*ignored, *implied]:
        _logger.info("tensors that the network does not need are ignored: %s", _listed(names))
    if beyond:
        _logger.warning(
            "%s has tensors of layers beyond the %d of config.json, which are ignored: %s",
            path,
            len(config.network.layers),
            _listed(beyond),
        )
    if scales:
        _logger.warning(
            "scales of a KV cache in FP8 are not used, since --kv-cache-dtype fp8 has scales of its own: %s",
            _listed(scales),
        )
    if different := list(different_buffers(buffers, config.network)):
        _logger.warning(
            "stored tensors differ from what config.json implies, which is used, as by transformers: %s; check its rope"
            " parameters and its attention if the model's text is wrong",
            _listed(different),
        )


def _combined(headers: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredPart]:
    """Return the parts of a checkpoint in a folder, by the names in its files.

    Raises:
        WeightsError: tensors have dtypes that are not read, or do not fit each other.
    """
    formats = stored_formats(config.content)
    for note in formats.notes:
        _logger.warning("%s", note)
    check_dtypes(headers, *formats.dtypes)
    ahead = {name: entry for name, entry in headers.items() if name.endswith(formats.ahead)}
    values = {name: tensor.clone() for name, tensor in read_tensors(ahead)}
    read = {name: entry._replace(values=values.get(name)) for name, entry in headers.items()}
    return combine(read, formats)


def _checked_constants(tensors: Tensors, extra: Mapping[str, StoredPart]) -> set[str]:
    """Return the names of the tensors whose numbers the network has without them.

    Raises:
        WeightsError: a number is another one.
    """
    found = {}
    for name, part in extra.items():
        in_layer = _IN_LAYER.search(name)
        constant = None if in_layer is None else tensors.constants.get(name[in_layer.end() :])
        if constant is not None:
            found[part.name] = (name, part, constant)
    for stored_name, value in read_tensors({it: part.entry for it, (_, part, _) in found.items()}):
        name, part, constant = found[stored_name]
        # Files in bfloat16 have rounded numbers.
        if value.numel() != 1 or not math.isclose(value.item(), constant, rel_tol=2**-7):
            raise WeightsError(
                f"{part.entry.file}: {stored_name} must be {constant:g}, found {value.flatten()[:1].tolist()}"
            )
    return {name for name, _, _ in found.values()}


def _zero_biases(stored: Mapping[str, StoredPart], extra: Iterable[str]) -> set[str]:
    """Return which of some tensors are biases of 0 of quantized matrices: AutoGPTQ stores them for every family."""
    found = {}
    for name in extra:
        matrix = stored.get(f"{name.removesuffix('.bias')}.weight")
        if name.endswith(".bias") and matrix is not None and matrix.form is not None:
            found[stored[name].name] = name
    entries = {stored[name].name: stored[name].entry for name in found.values()}
    return {found[name] for name, bias in read_tensors(entries) if not bool(bias.any())}


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _LISTED_NAMES
    return ", ".join(ordered[:_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")


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


def save_checkpoint(
    model: DecoderLM, path: Path, max_shard_bytes: int = 5 * 2**30, *, int8: bool = False
) -> None:
    """Write the model as a Hugging Face checkpoint: config, generation config and safetensors.

    Args:
        model: any dtype, any device.
        path: folder, created if it does not exist; weight files in it are replaced, other files are kept.
        max_shard_bytes: maximum size of a file with more than one tensor.
        int8: whether to store the matrices of the layers in 8 bits, see `model.checkpoint.formats.int_quantized`.
    """
    assert not model.is_quantized, "the format is for weights of one dtype"
    path.mkdir(parents=True, exist_ok=True)
    for stale in (*path.glob("model*.safetensors"), path / INDEX_NAME):
        stale.unlink(missing_ok=True)
    dtype = model.dtype
    config = dataclasses.replace(model.config, dtype=str(dtype).removeprefix("torch."))
    compression = {"quantization_config": to_config()} if int8 else {}
    _write_json(path / "config.json", config.to_dict() | compression)
    ends = list(config.eos_token_ids) or None
    _write_json(
        path / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": ends}
    )
    shards: list[list[str]] = [[]]
    parts = named_parts(model)
    tensors = _StoredTensors(parts, dtype, int8=int8)
    num_bytes = {name: tensors.num_bytes(name) for name in parts}
    size = 0
    for name, its_bytes in num_bytes.items():
        if shards[-1] and size + its_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += its_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        saved = {key: value for name in names for key, value in tensors.of(name).items()}
        save_file(saved, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(saved, file)
    if len(shards) > 1:
        total = sum(num_bytes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(path / INDEX_NAME, index)


class _StoredTensors:
    """The tensors of a model as a checkpoint stores them."""

    def __init__(self, parts: dict[str, ParameterPart], dtype: torch.dtype, *, int8: bool) -> None:
        self._parts, self._dtype, self._int8 = parts, dtype, int8

    def of(self, name: str) -> dict[str, Tensor]:
        """Return a tensor, and its scales if it is compressed, by name."""
        stored = self._parts[name].to_stored(self._dtype)
        if not self._is_compressed(name):
            return {name: stored}
        ends = (INT_QUANTIZED.tensors[key] for key in ("numbers", "scale"))
        module = name.removesuffix("weight")
        return dict(zip((module + end for end in ends), compress(stored), strict=True))

    def num_bytes(self, name: str) -> int:
        """Size in a file."""
        shape = self._parts[name].stored_shape
        if self._is_compressed(name):
            return math.prod(shape) + shape[0] * torch.float32.itemsize
        return math.prod(shape) * self._dtype.itemsize

    def _is_compressed(self, name: str) -> bool:
        part = self._parts[name]
        assert not (self._int8 and part.transposed), "the format has a scale for each output"
        # `transformers` cannot load compressed embeddings, nor a compressed head that is tied to them.
        return self._int8 and isinstance(part.values, Weight) and _IN_LAYER.search(name) is not None


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
