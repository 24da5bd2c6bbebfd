"""FP8 as NVIDIA's ModelOpt stores it: a scale for each matrix, or for each output.

The configuration is `quantization_config` of config.json, or of older checkpoints a file `hf_quant_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import unsupported
from model.checkpoint.formats.format import Format, require
from model.checkpoint.formats.scaled import fp8_format, read_scaled, scaled_shape
from model.checkpoint.formats.unsupported import METHODS, UnsupportedFormatError

METHOD: Final = "modelopt"
FILE: Final = "hf_quant_config.json"
_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


def from_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` from what the file of older checkpoints holds."""
    return {
        "quant_method": METHOD,
        **require(content.get("quantization"), {}, f"{FILE}: quantization"),
    }


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    algorithm = found.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        error = unsupported(f"{key}.quant_algo", algorithm, _ALGORITHMS)
        if str(algorithm).upper().startswith("NVFP4"):
            raise UnsupportedFormatError(f"{error}: {METHODS['nvfp4']}")
        raise error
    return fp8_format()


MODELOPT: Final = Format(
    name="modelopt",
    identity={"quant_method": METHOD},
    detect=_detect,
    tensors={"numbers": "weight", "scale": "weight_scale"},
    dtype="F8_E4M3",
    is_kept=True,
    shape=scaled_shape,
    read=read_scaled,
)
