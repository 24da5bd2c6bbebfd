"""Weights of 4 bits in the format of AWQ, as AutoAWQ writes it ("gemm").

    qweight    [C, N / 8] int32, 8 outputs in a word, in the order 0 2 4 6 1 3 5 7
    qzeros     [G, N / 8] int32, zero points in the same order; the middle of the numbers without it
    scales     [G, N]

What is not converted, such as `modules_to_not_convert`, the files tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import unsupported
from model.checkpoint.formats.format import FLOATS, Format, StoredTensor
from model.checkpoint.formats.integer_groups import (
    PER_WORD,
    check_tensors,
    integer_format,
    made,
    read_bits,
    read_group,
    refined,
)
from model.json_input import check

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

FILE: Final = "quant_config.json"
"""Of older checkpoints, beside config.json."""
_OLD_KEYS: Final = {"w_bit": "bits", "q_group_size": "group_size"}
_NAME: Final = "awq"
_VERSION: Final = "gemm"
_VERSION_KEYS: Final = ("version", "format")
"""The second is of transformers 5."""
_BITS: Final = 4


def from_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` from what the file of older checkpoints holds."""
    named = {_OLD_KEYS.get(key, key): value for key, value in content.items()}
    return {"quant_method": _NAME, **named}


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    for name in _VERSION_KEYS:
        version = found.get(name)
        if version is not None and str(version).lower() != _VERSION:
            raise unsupported(f"{key}.{name}", version, (_VERSION,))
    bits = read_bits(found, key, "bits", (_BITS,))
    zero_point = check(found.get("zero_point", True), bool, f"{key}.zero_point")
    return integer_format(_NAME, bits, read_group(found, key, "group_size"), shifts=zero_point)


def _shape(form: WeightFormat, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    inputs, width = tensors["numbers"].shape
    shape = outputs, _ = width * PER_WORD[_BITS], inputs
    groups = -(-inputs // (form.group or inputs))
    return check_tensors(
        form,
        shape,
        tensors,
        {"scale": ((groups, outputs), FLOATS), "zero": ((groups, width), ("I32",))},
    )


def _read(form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Weight:
    from model.checkpoint.formats import int32_packing as packing  # noqa: PLC0415 - imports PyTorch

    zero = packing.unpack_awq(tensors["zero"]).t() if "zero" in tensors else None
    if not form.shifts and zero is not None:
        if bool((zero != form.offset).any()):
            raise ValueError(
                f"has zero points other than {form.offset}, although zero_point is false in config.json"
            )
        zero = None
    numbers = packing.along_outputs_awq(tensors["numbers"])
    return made(form, shape, numbers, tensors["scale"].t(), zero)


AWQ: Final = Format(
    name=_NAME,
    identity={"quant_method": "awq"},
    detect=_detect,
    tensors={"numbers": "qweight", "scale": "scales", "zero": "qzeros"},
    dtype="I32",
    is_kept=True,
    optional=("zero",),
    shape=_shape,
    refine=refined,
    read=_read,
)
