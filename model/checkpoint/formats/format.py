"""How a format of quantized checkpoints is recognized and read.

This module does not import PyTorch, because the front end reads config.json; `read` is called where weights are loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernels.weight_format import WeightFormat
from model.errors import UnsupportedModelError
from model.json_input import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

FLOAT_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of full numbers: PyTorch's name by that in files."""
FLOATS: Final = tuple(FLOAT_DTYPES)
_ITEM_BYTES: Final = {
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
}
_DTYPES: Final = {"I8": "int8", "U8": "uint8", "I32": "int32", "F8_E4M3": "float8_e4m3fn"}
UNUSED: Final = (
    "input_scale", "input_scale_ub", "input_zero_point", "activation_scale", "output_scale", "output_zero_point",
)  # fmt: skip
"""Last components of the names of tensors of quantized checkpoints that round activations."""


class StoredTensor(NamedTuple):
    """One tensor's entry in the header of a file.

    Attributes:
        values: of a small tensor that formats read ahead of the others, see `Format.ahead`; else None.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    values: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size in the file, bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def as_configured(
    form: WeightFormat, _shape: tuple[int, int], _tensors: Mapping[str, StoredTensor]
) -> WeightFormat:
    """Return the format of a matrix of which config.json says everything."""
    return form


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of checkpoints, a row of `model.checkpoint.formats.table.FORMATS`.

    Attributes:
        name: for tables; the `WeightFormat`s that `detect` returns have their own.
        identity: what `quantization_config` says of a checkpoint in this format: "quant_method" and, where a method has
            several formats, "format".
        detect: reads `quantization_config`, whose key is the second argument; refuses by name what is not read. That of
            compressed-tensors has one group (`model.checkpoint.formats.compressed_tensors.split`).
        tensors: the last components of the names of a matrix's tensors: that of "numbers", and others, which
            `shape` and `read` get by these keys. That of "order" has the group of each input, and is not for `read`:
            numbers that it returns are in the order of the inputs, and are sorted by group then.
        dtype: of the numbers, as safetensors files name it.
        optional: keys of `tensors` that a matrix may lack.
        dtypes: of other tensors, besides those of full numbers.
        is_kept: whether a model holds the matrices in this format; else they are multiplied by their scales as they
            are loaded.
        ahead: keys of `tensors` whose values `shape` reads.
        shape: returns the shape of a matrix, see `model.checkpoint.formats.scaled.scaled_shape`.
        refine: returns the format of one matrix, by its shape and tensors, from that of `detect`.
        read: returns a matrix of a format and a shape from its tensors.

    Raises:
        ValueError: by `shape` and `read`: the tensors do not fit each other. The text is the end of a sentence.
    """

    name: str
    identity: Mapping[str, str]
    detect: Callable[[Mapping[str, Any], str], WeightFormat]
    tensors: Mapping[str, str]
    dtype: str
    is_kept: bool
    shape: Callable[[WeightFormat, Mapping[str, StoredTensor]], tuple[int, int]]
    read: Callable[[WeightFormat, tuple[int, int], Mapping[str, Tensor]], Weight]
    optional: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    refine: Callable[[WeightFormat, tuple[int, int], Mapping[str, StoredTensor]], WeightFormat] = (
        as_configured
    )

    @property
    def dtype_name(self) -> str:
        """PyTorch's name of the dtype of the numbers."""
        return _DTYPES[self.dtype]


def require(found: object, required: Mapping[str, object], where: str) -> Mapping[str, Any]:
    """Return an object of config.json that has some values.

    Raises:
        UnsupportedModelError: it is no object or has other values; names the key, its value and what is supported.
    """
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{where} must be an object, found {shorten(found)}")
    for key, value in required.items():
        if found.get(key) != value:
            raise UnsupportedModelError(
                f"{where}.{key} = {shorten(found.get(key))} is not supported; supported is {value!r}"
            )
    return found
