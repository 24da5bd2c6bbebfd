"""Weights in FP8 with a scale for each block of outputs and inputs, as in the FP8 checkpoints of Qwen3 and DeepSeek.

A matrix is stored as float8_e4m3fn, with the factor of each block in a tensor of its own that is called "inverse". What
is not in FP8, such as `modules_to_not_convert`, the files tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.format import Format
from model.errors import UnsupportedModelError
from model.json_input import refuse, shorten

_NAME: Final = "fp8-blocks"
_MOST_ROWS: Final = 65_536
_HARMLESS: Final = (
    (("e4m3",), ("fmt",)),
    (("dynamic",), ("activation_scheme",)),
    (("float",), ("scale_fmt",)),
)


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    refuse(found, _HARMLESS, f"{key}.")
    size = found.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
        raise UnsupportedModelError(
            f"{key}.weight_block_size = {shorten(size)} is not supported; supported are squares such as [128, 128]"
        )
    if type(size[0]) is not int or not 1 <= size[0] <= _MOST_ROWS:
        raise UnsupportedModelError(
            f"{key}.weight_block_size = {shorten(size)} must be whole numbers from 1 to {_MOST_ROWS}"
        )
    return WeightFormat(_NAME, 8, group=size[0], scales="block")


FP8_BLOCKS: Final = Format(
    name=_NAME,
    identity={"quant_method": "fp8"},
    detect=_detect,
    tensors={"numbers": "weight", "scale": "weight_scale_inv"},
    dtype="F8_E4M3",
    is_kept=True,
)
