"""Integers of 4 or 8 bits in compressed-tensors checkpoints, `pack-quantized`: W4A16 and W8A16.

    weight_packed        [N, C * bits / 32] int32, rounded up, inputs that follow each other in a word
    weight_shape         (N, C)
    weight_scale         [N, G], of a matrix with one scale [1]
    weight_zero_point    [N * bits / 32, G] int32, packed as the numbers, along the outputs; or int8, as the scales
    weight_g_idx         [C], the group of each input (act-order)

Numbers and packed zero points are stored with half of their range added.

Source: the `compressed-tensors` package of the vLLM project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import METHOD, read_weights, unsupported
from model.checkpoint.formats.format import FLOATS, Format, StoredTensor
from model.checkpoint.formats.integer_groups import (
    PER_WORD,
    check_tensors,
    integer_format,
    made,
    refined,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

_IDENTITY: Final = {"quant_method": METHOD, "format": "pack-quantized"}
_ACT_ORDERS: Final = ("group", "dynamic", True)
_NO_ACT_ORDERS: Final = (None, False, "weight", "static")
"""With "weight" and its other name, groups are of inputs beside each other again."""
_INTEGERS: Final = ("I32", "I64")
_ONE: Final = ((), (1,), (1, 1))


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    weights = read_weights(found, key)
    if weights.kind != "int":
        raise unsupported(f"{weights.where}.type", weights.kind, ("int",))
    weights.require(num_bits=tuple(PER_WORD))
    if weights.strategy == "block":
        weights.require(strategy=("tensor", "channel", "group"))
    if weights.actorder not in (allowed := (*_ACT_ORDERS, *_NO_ACT_ORDERS)):
        raise unsupported(f"{weights.where}.actorder", weights.actorder, allowed)
    return integer_format(
        f"w{weights.bits}a16",
        weights.bits,
        weights.group or -1,
        shifts=not weights.symmetric,
        ordered=weights.actorder in _ACT_ORDERS,
    )


def _shape(form: WeightFormat, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    stated = _stated(tensors["shape"])
    outputs, width = tensors["numbers"].shape
    per_word = PER_WORD[form.bits]
    if len(stated) != 2 or stated[0] != outputs or -(-stated[1] // per_word) != width:
        raise ValueError(
            f"for which its shape must be [{outputs}, up to {width * per_word}], not {stated}"
        )
    inputs = stated[1]
    groups = -(-inputs // (form.group or inputs))
    scale, zero = tensors["scale"], tensors.get("zero")
    expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {"order": ((inputs,), _INTEGERS)}
    is_one = not form.group and scale.shape in _ONE
    expected["scale"] = (scale.shape if is_one else (outputs, groups), FLOATS)
    if zero is not None and zero.dtype == "I8":
        expected["zero"] = (scale.shape, ("I8",))
    else:
        expected["zero"] = ((-(-outputs // per_word), groups), ("I32",))
    return check_tensors(form, (outputs, inputs), tensors, expected)


def _stated(shape: StoredTensor) -> list[int]:
    """Return the shape that a file states; empty if it is none."""
    if shape.values is None or shape.shape != (2,) or shape.dtype not in _INTEGERS:
        return []
    stated: list[int] = shape.values.tolist()
    return stated


def _read(form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Weight:
    import torch  # noqa: PLC0415 - the front end imports this module

    from model.checkpoint.formats import int32_packing as packing  # noqa: PLC0415 - as above

    outputs, inputs = shape

    def spread(values: Tensor) -> Tensor:
        # A single scale is that of every output.
        return (values if values.ndim == 2 else values.reshape(1, 1)).expand(outputs, -1)

    stored, zero = tensors.get("zero"), None
    if stored is not None and stored.dtype == torch.int8:
        zero = spread(stored).short() + form.offset
    elif stored is not None:
        zero = packing.unpack(stored.t(), form.bits)[:, :outputs].t()
    if not form.shifts and zero is not None:
        if bool((zero != form.offset).any()):
            raise ValueError(
                "has zero points other than 0, although symmetric is true in config.json"
            )
        zero = None
    numbers = tensors["numbers"].contiguous().view(torch.uint8)[:, : inputs * form.bits // 8]
    return made(form, shape, numbers, spread(tensors["scale"]), zero)


PACK_QUANTIZED: Final = Format(
    name=_IDENTITY["format"],
    identity=_IDENTITY,
    detect=_detect,
    tensors={
        "numbers": "weight_packed",
        "scale": "weight_scale",
        "zero": "weight_zero_point",
        "shape": "weight_shape",
        "order": "weight_g_idx",
    },
    dtype="I32",
    is_kept=True,
    optional=("zero", "order"),
    dtypes=("I64", "I8"),
    ahead=("shape", "order"),
    shape=_shape,
    refine=refined,
    read=_read,
)
