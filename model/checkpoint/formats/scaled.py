"""Matrices stored as numbers beside tensors of their scales and zero points, with nothing packed.

w[n, c] = (number[n, c] - zero[n, c]) * scale[n, c]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kernels.weight_format import FP8_ROWS, WeightFormat
from model.checkpoint.formats.format import FLOATS, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

SCALE_DTYPES: Final = ("F8_E8M0",)
"""Of scales, besides floats: powers of two."""
SCALES: Final = ("scale", "scale_inv")
"""Keys of `Format.tensors` for the scales, of which a matrix has one; both are factors."""
ZERO: Final = "zero"
"""The key of the zero points."""
_ONE: Final = ((), (1,), (1, 1))


def fp8_format(block: tuple[int, int] | None = None, group: int = 0) -> WeightFormat:
    """Return the format of numbers in FP8.

    Args:
        block: outputs and inputs that share a scale: a square, or one output.
        group: inputs of an output that share one. Without either an output has one.
    """
    if block is not None and block[0] == block[1]:
        return WeightFormat("fp8-blocks", 8, block[0], "block")
    if block is not None or group:
        return WeightFormat("fp8-groups", 8, block[1] if block else group, "group")
    return FP8_ROWS


def scaled_shape(form: WeightFormat, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """Return the shape of a matrix from the headers of its tensors.

    Scales may have one more dimension, of 1; for a scale of each output there may be only one.

    Raises:
        ValueError: the tensors do not fit each other; says what was expected.
    """
    outputs, inputs = tensors["numbers"].shape
    wanted = form.scale_shape((outputs, inputs))
    allowed = (wanted, (*wanted, 1), *(_ONE if form.scales == "row" else ()))
    found = [tensors[key] for key in SCALES if key in tensors]
    text = f"for which there must be {list(wanted)} scales, floats"
    if form.scales == "row":
        text += ", or one"
    if len(found) != 1:
        raise ValueError(f"{text}; there are {'two tensors of them' if found else 'none'}")
    scale = found[0]
    if scale.dtype not in (*FLOATS, *SCALE_DTYPES) or scale.shape not in allowed:
        raise ValueError(text)
    zero = tensors.get(ZERO)
    if form.shifts and zero is None:
        raise ValueError("whose zero points are missing")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"for whose {list(scale.shape)} scales there must be as many zero points")
    return outputs, inputs


def read_scaled(
    form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> Weight:
    """Return a matrix from its tensors; scales and shifts are float32.

    Raises:
        ValueError: a symmetric matrix has zero points that are not 0; the text is the end of a sentence.
    """
    from kernels.weights import Weight  # noqa: PLC0415 - imports PyTorch

    wanted = form.scale_shape(shape)

    def spread(values: Tensor) -> Tensor:
        # A single scale is that of every output.
        return values.float().reshape(-1 if values.numel() == 1 else wanted).expand(wanted)

    (stored,) = (tensors[key] for key in SCALES if key in tensors)
    scale, zero = spread(stored).contiguous(), tensors.get(ZERO)
    if form.shifts:
        assert zero is not None
        return Weight(form, shape, tensors["numbers"], scale, -spread(zero) * scale)
    if zero is not None and bool(zero.float().any()):
        raise ValueError("has zero points other than 0, which config.json denies: symmetric = true")
    return Weight(form, shape, tensors["numbers"], scale)
