"""The types of quantized tensors in GGUF files, each a format: a file may have several of them.

The files have no config.json; `model.gguf.config` makes what one would say, with these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.format import Format, StoredTensor
from model.gguf.config import QUANT_METHOD
from model.gguf.tensor_types import QUANTIZED, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight


def _read(form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Weight:
    from model.checkpoint.formats.gguf_blocks import read_blocks  # noqa: PLC0415 - imports PyTorch

    return read_blocks(form, shape, tensors["numbers"])


def _shape(_form: WeightFormat, _tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    raise ValueError("which only GGUF files store")


def _row(kind: TensorType) -> Format:
    form = kind.form
    assert form is not None
    return Format(
        name=kind.name,
        identity={"quant_method": QUANT_METHOD, "format": kind.name},
        detect=lambda _found, _key: form,
        tensors={"numbers": "weight"},
        dtype="U8",
        is_kept=True,
        shape=_shape,
        read=_read,
    )


GGUF_FORMATS: Final = tuple(map(_row, QUANTIZED.values()))


def row_of(kind: TensorType) -> Format | None:
    """Return the row of a type of tensors; None for full numbers."""
    return next((row for row in GGUF_FORMATS if row.name == kind.name), None)
