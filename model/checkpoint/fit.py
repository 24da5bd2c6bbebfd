"""Checks that the tensors of a checkpoint are those of a model, before any is read."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import (
    check_dtypes,
    read_headers,
    read_tensors,
)
from model.checkpoint.formats.format import StoredTensor
from model.checkpoint.formats.table import stored_formats
from model.checkpoint.gguf_parts import gguf_parts
from model.checkpoint.implied import are_equal, different_buffers
from model.checkpoint.parameter_parts import ParameterPart, named_parts, unread_names
from model.checkpoint.stored_names import Buffer, StoredNames, check_merged, hint
from model.checkpoint.stored_parts import StoredPart, combine
from model.decoder import DecoderLM
from model.errors import WeightsError
from model.families.tensors import HEAD, Tensors

_LISTED_NAMES: Final = 8
IN_LAYER: Final = re.compile(r"\.\d+\.")
"""Before the name of a layer's tensor."""
_logger = logging.getLogger(__name__)


def checked_headers(
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
    tensors, network = config.tensors(), config.network
    names = StoredNames(tensors, needed, len(network.layers))
    head = f"{tensors.modules[HEAD]}.weight"
    if network.tied:
        names.add(head)
    unread = unread_names(network, tensors)
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
    implied = _zero_biases(stored, extra) | _checked_constants(tensors, extra)
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
    tensors = config.tensors()
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
            + "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in counts if names)
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
        _logger.info("tensors that the network does not need are ignored: %s", listed(names))
    if beyond:
        _logger.warning(
            "%s has tensors of layers beyond the %d of config.json, which are ignored: %s",
            path,
            len(config.network.layers),
            listed(beyond),
        )
    if scales:
        _logger.warning(
            "scales of a KV cache in FP8 are not used, since --kv-cache-dtype fp8 computes other scales: %s",
            listed(scales),
        )
    if different := list(different_buffers(buffers, config.network)):
        _logger.warning(
            "stored tensors differ from what config.json implies, which is used, as by transformers: %s; check its rope"
            " parameters and its attention if the model's text is wrong",
            listed(different),
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
        in_layer = IN_LAYER.search(name)
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


def listed(names: Iterable[str]) -> str:
    """Return the first names in their order, for a message, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _LISTED_NAMES
    return ", ".join(ordered[:_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")
