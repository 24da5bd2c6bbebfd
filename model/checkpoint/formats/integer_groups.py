"""Matrices of whole numbers with scales and zero points for groups of inputs, as AWQ, GPTQ and compressed-tensors have.

    w[n, c] = (number[n, c] - zero[n, g]) * scale[n, g]

A `Weight` has a shift in place of a zero point, -(zero - offset) * scale. It is exact in float32 alone, so matrices
with zero points have scales and shifts in float32; others have scales in the dtype of the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import unsupported
from model.checkpoint.formats.format import FLOATS, StoredTensor
from model.errors import UnsupportedModelError
from model.json_input import check

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

PER_WORD: Final = {4: 8, 8: 4}
"""Numbers in an int32, by their bits."""
_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_INPUTS: Final = 1 << 20
_GROUP_OF_ROWS: Final = 128
_EVEN: Final = 2
_GROUP_SIZE: Final = Annotated[int, Meta(ge=-1, le=_MOST_INPUTS)]


def integer_format(
    name: str, bits: int, group: int, *, shifts: bool, ordered: bool = False
) -> WeightFormat:
    """Return the format of a configuration.

    Args:
        name: of the row of `FORMATS`.
        bits: of a number.
        group: inputs that share a scale; -1 for all of them.
        shifts: whether there are zero points.
        ordered: whether the inputs of a group need not be beside each other; the file tells of each matrix.
    """
    rows = group == -1
    return WeightFormat(
        name,
        bits,
        group=0 if rows else group,
        scales="row" if rows else "group",
        shifts=shifts,
        float=False,
        offset=1 << bits - 1,
        scale_dtype="float32" if shifts else "float16",
        ordered=ordered and not rows,
    )


def read_bits(found: Mapping[str, Any], key: str, name: str, supported: tuple[int, ...]) -> int:
    """Return the bits of a number.

    Args:
        found: a part of config.json.
        key: that leads to it.
        name: of the value in it.
        supported: what may be returned.

    Raises:
        UnsupportedModelError: there are others; names the key, the value and what is supported.
    """
    bits = found.get(name)
    if type(bits) is not int or bits not in supported:
        raise unsupported(f"{key}.{name}", bits, supported)
    return bits


def read_group(found: Mapping[str, Any], key: str, name: str) -> int:
    """Return the inputs that share a scale, an even number; -1 for all.

    Raises:
        ModelFolderError: it is no such number.
        UnsupportedModelError: it divides a byte; names the key, the value and what is supported.
    """
    group: int = check(found.get(name), _GROUP_SIZE, f"{key}.{name}")
    if group == 0 or (group > 0 and group % _EVEN):
        raise UnsupportedModelError(
            f"{key}.{name} = {group} is not supported; supported are even numbers and -1, one group of all inputs"
        )
    return group


def refined(
    form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, StoredTensor]
) -> WeightFormat:
    """Return the format of one matrix, whose file says the dtype of the scales.

    4-bit numbers with a scale for a row have it repeated for each group of 128 inputs, which kernels read.
    """
    stored = _DTYPES[tensors["scale"].dtype]
    form = dataclasses.replace(form, scale_dtype="float32" if form.shifts else stored)
    is_repeated = form.scales == "row" and form.bits == 4 and shape[1] % _GROUP_OF_ROWS == 0
    return dataclasses.replace(form, scales="group", group=_GROUP_OF_ROWS) if is_repeated else form


def check_tensors(
    form: WeightFormat,
    shape: tuple[int, int],
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]],
) -> tuple[int, int]:
    """Check the tensors of a matrix.

    Args:
        form: of the matrix.
        shape: of the matrix.
        tensors: of the matrix.
        expected: shape and dtypes of those that it may have.

    Returns:
        The shape of the matrix.

    Raises:
        ValueError: they do not fit; says what was expected.
    """
    if form.bits < 8 and shape[1] % _EVEN:
        raise ValueError(f"a matrix of {shape[1]} inputs, which must be an even number")
    for part, (wanted, dtypes) in expected.items():
        found = tensors.get(part)
        if found is not None and (found.shape != wanted or found.dtype not in dtypes):
            kinds = "floats" if dtypes == FLOATS else " or ".join(dtypes)
            raise ValueError(f"for which its {part} must be {list(wanted)}, {kinds}")
    if form.shifts and "zero" not in tensors:
        raise ValueError("for which there must be zero points")
    return shape


def made(
    form: WeightFormat, shape: tuple[int, int], numbers: Tensor, scale: Tensor, zero: Tensor | None
) -> Weight:
    """Return a matrix.

    Args:
        form: of the matrix, from `refined`.
        shape: of the matrix.
        numbers: as those of the `Weight`.
        scale: [N, G] or, for rows, [N, 1].
        zero: zero points as `scale`, of any dtype; None for the format's offset.
    """
    import torch  # noqa: PLC0415 - the front end imports this module

    from kernels.weights import Weight  # noqa: PLC0415 - as above

    scale = scale.to(getattr(torch, form.scale_dtype))
    shift = None if zero is None else (form.offset - zero.to(scale.dtype)) * scale
    wanted = form.scale_shape(shape)
    parts = [
        None if it is None else it.expand(-1, wanted[1]) if len(wanted) > 1 else it[:, 0]
        for it in (scale, shift)
    ]
    return Weight(form, shape, numbers, *(None if it is None else it.contiguous() for it in parts))
