"""FP8 in compressed-tensors checkpoints, `float-quantized`: a scale for a matrix, an output, a group or a block.

Source: the `compressed-tensors` package of the vLLM project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import METHOD, read_weights, unsupported
from model.checkpoint.formats.format import Format
from model.checkpoint.formats.scaled import fp8_format, read_scaled, scaled_shape
from model.errors import UnsupportedModelError


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    weights = read_weights(found, key)
    if weights.kind != "float":
        raise unsupported(f"{weights.where}.type", weights.kind, ("float",))
    weights.require(num_bits=(8,), symmetric=(True,))
    if weights.strategy == "block":
        if weights.block[0] not in (1, weights.block[1]):
            raise UnsupportedModelError(
                f"{weights.where}.block_structure = {list(weights.block)} is not supported; supported are squares such "
                "as [128, 128] and rows such as [1, 128]"
            )
        return fp8_format(weights.block)
    return fp8_format(group=weights.group)


FLOAT_QUANTIZED: Final = Format(
    name="float-quantized",
    identity={"quant_method": METHOD, "format": "float-quantized"},
    detect=_detect,
    tensors={"numbers": "weight", "scale": "weight_scale", "zero": "weight_zero_point"},
    dtype="F8_E4M3",
    optional=("zero",),
    is_kept=True,
    shape=scaled_shape,
    read=read_scaled,
)
