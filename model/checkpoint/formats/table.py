"""The table of formats of quantized checkpoints, and the choice of some of them by config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from model.checkpoint.formats import compressed_tensors
from model.checkpoint.formats.awq import AWQ
from model.checkpoint.formats.compressed_tensors import Part
from model.checkpoint.formats.float_quantized import FLOAT_QUANTIZED
from model.checkpoint.formats.format import Format, require
from model.checkpoint.formats.fp8 import FBGEMM, FP8
from model.checkpoint.formats.gguf import GGUF_FORMATS
from model.checkpoint.formats.gptq import GPTQ
from model.checkpoint.formats.int_quantized import INT_QUANTIZED
from model.checkpoint.formats.modelopt import MODELOPT
from model.checkpoint.formats.pack_quantized import PACK_QUANTIZED
from model.checkpoint.formats.unsupported import (
    UnsupportedFormatError,
    refuse_known,
    refuse_mlx,
)
from model.errors import UnsupportedModelError
from model.json_input import check, shorten

if TYPE_CHECKING:
    from kernels.weight_format import WeightFormat

FORMATS: Final[tuple[Format, ...]] = (
    INT_QUANTIZED,
    FLOAT_QUANTIZED,
    PACK_QUANTIZED,
    FP8,
    FBGEMM,
    MODELOPT,
    AWQ,
    GPTQ,
    *GGUF_FORMATS,
)
CONFIG_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that describe the format; the second is older."""
_AUTO_ROUND: Final = ("auto-round", "intel/auto-round")
_PACKINGS: Final = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""The methods in whose layouts AutoRound packs weights, by its names of them."""
_CACHE_KEYS: Final = ("kv_cache_scheme", "kv_cache_quant_algo")


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """A way in which a checkpoint stores some of its matrices.

    Attributes:
        row: reads them.
        form: in which `row.read` returns them.
        part: says which they are; None for all that are quantized.
    """

    row: Format
    form: WeightFormat
    part: Part | None = None


@dataclasses.dataclass(frozen=True)
class StoredFormats:
    """The ways in which a checkpoint stores its matrices.

    Attributes:
        formats: the ways, in the order of config.json; empty for full numbers.
        is_kept: whether a model holds the matrices in these formats; else as full numbers.
        notes: what the configuration asks for and a service does otherwise.
    """

    formats: tuple[StoredFormat, ...] = ()
    is_kept: bool = True
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> WeightFormat | None:
        """The format in which matrices are stored, of several the first; None for full numbers."""
        return self.formats[0].form if self.formats else None

    @property
    def held(self) -> WeightFormat | None:
        """The format in which a model holds the matrices, of several the first; None for full numbers."""
        return self.first if self.is_kept else None

    @property
    def ahead(self) -> tuple[str, ...]:
        """The ends of the names of tensors whose values are read with the headers."""
        return tuple(f".{way.row.tensors[key]}" for way in self.formats for key in way.row.ahead)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of tensors, besides those of full numbers."""
        found = (it for way in self.formats for it in (way.row.dtype, *way.row.dtypes))
        return tuple(dict.fromkeys(found))


def stored_formats(config: Mapping[str, Any]) -> StoredFormats:
    """Return how a checkpoint stores the matrices of its layers, from its config.json.

    Raises:
        UnsupportedFormatError: in a way that no row of `FORMATS` reads. The message names the key, its value and what
            is supported or what to do instead.
    """
    refuse_mlx(config)
    stored = StoredFormats()
    for key in CONFIG_KEYS:
        if (found := config.get(key)) is not None:
            try:
                stored = _read(_whole(require(found, {}, key)), key)
            except UnsupportedModelError as error:
                raise UnsupportedFormatError(str(error)) from None
    return stored


def detect(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format in which a model holds the matrices of a checkpoint; None for full numbers.

    Raises:
        UnsupportedFormatError: as for `stored_formats`.
    """
    return stored_formats(config).held


def _read(found: Mapping[str, Any], key: str) -> StoredFormats:
    formats = tuple(_choose(found, key))
    is_full = check(found.get("dequantize") or False, bool, f"{key}.dequantize")
    is_kept = not is_full and all(it.row.is_kept for it in formats)
    return StoredFormats(formats, is_kept, _notes(found))


def _notes(found: Mapping[str, Any]) -> tuple[str, ...]:
    groups = found.get("config_groups")
    its = groups.values() if isinstance(groups, dict) else ()
    texts = []
    if found.get("activation_scheme") == "static" or any(
        isinstance(it, dict) and it.get(key) is not None
        for it in its
        for key in ("input_activations", "output_activations")
    ):
        texts.append(
            "activations are not rounded as the checkpoint states, nor are its scales for them used: they are in the "
            "model's dtype, or in FP8 where a GPU multiplies in FP8"
        )
    if key := next((it for it in _CACHE_KEYS if found.get(it) is not None), None):
        texts.append(
            f"the checkpoint's {key} has no effect: the KV cache has the model's dtype, or with --kv-cache-dtype fp8 "
            "scales of its own"
        )
    return tuple(texts)


def _whole(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the keys that older files put elsewhere or leave out."""
    inner = found.get("quantization_config")
    if "config_groups" not in found and isinstance(inner, dict):
        found = {**inner, "sparsity_config": found.get("sparsity_config")}
    packing = _PACKINGS.get(str(found.get("packing_format")))
    if found.get("quant_method") in _AUTO_ROUND and packing is not None:
        found = {"zero_point": not found.get("sym"), **found, "quant_method": packing}
    named = {"quant_method": compressed_tensors.METHOD} if "config_groups" in found else {}
    return named | dict(found)


def _choose(found: Mapping[str, Any], key: str) -> Iterator[StoredFormat]:
    if found.get("quant_method") != compressed_tensors.METHOD:
        row = _row(found, key)
        yield StoredFormat(row, row.detect(found, key))
        return
    parts = compressed_tensors.split(found, key)
    for part in parts:
        row = _row(part.config, key)
        yield StoredFormat(row, row.detect(part.config, key), part if len(parts) > 1 else None)


def _row(found: Mapping[str, Any], where: str) -> Format:
    rows = list(FORMATS)
    for key in ("quant_method", "format"):
        named = [row for row in rows if row.identity.get(key, found.get(key)) == found.get(key)]
        if not named:
            refuse_known(f"{where}.{key}", found.get(key))
            supported = " or ".join(dict.fromkeys(repr(row.identity[key]) for row in rows))
            raise UnsupportedModelError(
                f"{where}.{key} = {shorten(found.get(key))} is not supported; supported is {supported}"
            )
        rows = named
    return rows[0]
