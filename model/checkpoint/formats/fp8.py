"""Weights in FP8 as Hugging Face's own FP8 checkpoints have them (`quant_method` "fp8"): Qwen3, DeepSeek, Ministral 3.

A matrix is stored as float8_e4m3fn, with the factor of each block in a tensor of its own that is called "inverse";
without blocks it has one factor. Older checkpoints, of AutoFP8, call it `weight_scale`. What is not in FP8, such as
`modules_to_not_convert`, the files tell. Activations are not rounded as `activation_scheme` says. `fbgemm_fp8`, the
format of Llama 3.1 405B FP8, has a scale for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.format import Format
from model.checkpoint.formats.scaled import SCALE_DTYPES, fp8_format, read_scaled, scaled_shape
from model.errors import UnsupportedModelError
from model.json_input import refuse, shorten

_MOST_ROWS: Final = 65_536
_HARMLESS: Final = (
    (("e4m3",), ("fmt",)),
    (("dynamic", "static"), ("activation_scheme",)),
    (("float", "ue8m0"), ("scale_fmt",)),
    (("fp8",), ("expert_dtype",)),
)


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    refuse(found, _HARMLESS, f"{key}.")
    size = found.get("weight_block_size")
    if size is None:
        return fp8_format()
    if not isinstance(size, list) or len(size) != 2 or size[0] not in (1, size[1]):
        raise UnsupportedModelError(
            f"{key}.weight_block_size = {shorten(size)} is not supported; supported are null, squares such as "
            "[128, 128] and rows such as [1, 128]"
        )
    if any(type(it) is not int or not 1 <= it <= _MOST_ROWS for it in size):
        raise UnsupportedModelError(
            f"{key}.weight_block_size = {shorten(size)} must be whole numbers from 1 to {_MOST_ROWS}"
        )
    return fp8_format((size[0], size[1]))


FP8: Final = Format(
    name="fp8",
    identity={"quant_method": "fp8"},
    detect=_detect,
    tensors={"numbers": "weight", "scale_inv": "weight_scale_inv", "scale": "weight_scale"},
    dtype="F8_E4M3",
    dtypes=SCALE_DTYPES,
    optional=("scale_inv", "scale"),
    is_kept=True,
    shape=scaled_shape,
    read=read_scaled,
)


def _fbgemm(_found: Mapping[str, Any], _key: str) -> WeightFormat:
    return fp8_format()


FBGEMM: Final = Format(
    name="fbgemm_fp8",
    identity={"quant_method": "fbgemm_fp8"},
    detect=_fbgemm,
    tensors={"numbers": "weight", "scale": "weight_scale"},
    dtype="F8_E4M3",
    is_kept=True,
    shape=scaled_shape,
    read=read_scaled,
)
