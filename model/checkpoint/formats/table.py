"""The table of formats of quantized checkpoints, and the choice of one by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from model.checkpoint.formats.format import Format, require
from model.checkpoint.formats.fp8_blocks import FP8_BLOCKS
from model.checkpoint.formats.gguf import GGUF_FORMATS
from model.checkpoint.formats.int_quantized import INT_QUANTIZED
from model.errors import UnsupportedModelError
from model.json_input import shorten

if TYPE_CHECKING:
    from kernels.weight_format import WeightFormat

FORMATS: Final[tuple[Format, ...]] = (INT_QUANTIZED, FP8_BLOCKS, *GGUF_FORMATS)
CONFIG_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that describe the format; the second is older."""


def detect(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return how a checkpoint stores the matrices of its layers; None for full numbers.

    Raises:
        UnsupportedModelError: in a way that no row of `FORMATS` reads. The message names the key, its value and what is
            supported.
    """
    form = None
    for key in CONFIG_KEYS:
        if (found := config.get(key)) is not None:
            form = _choose(require(found, {}, key), key).detect(found, key)
    return form


def find(form: WeightFormat | None) -> Format | None:
    """Return the row of a checkpoint's format; None for full numbers."""
    return None if form is None else next(row for row in FORMATS if row.name == form.name)


def kept(form: WeightFormat | None) -> WeightFormat | None:
    """Return the format in which a model holds the matrices of a checkpoint; None for full numbers."""
    row = find(form)
    return form if row is not None and row.is_kept else None


def _choose(found: Mapping[str, Any], where: str) -> Format:
    rows = list(FORMATS)
    for key in ("quant_method", "format"):
        named = [row for row in rows if row.identity.get(key, found.get(key)) == found.get(key)]
        if not named:
            supported = " or ".join(dict.fromkeys(repr(row.identity[key]) for row in rows))
            raise UnsupportedModelError(
                f"{where}.{key} = {shorten(found.get(key))} is not supported; supported is {supported}"
            )
        rows = named
    return rows[0]
