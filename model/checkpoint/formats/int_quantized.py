"""Integers of 8 bits in compressed-tensors checkpoints, `int-quantized`: W8A8 and W8A16.

A matrix is stored as int8, with scales, and of an asymmetric one zero points, in tensors of their own.
`save_checkpoint` writes the format too (docs/decisions/0039-weights-on-disk.md).

Source: the `compressed-tensors` package of the vLLM project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import METHOD, read_weights, unsupported
from model.checkpoint.formats.format import Format
from model.checkpoint.formats.scaled import read_scaled, scaled_shape

if TYPE_CHECKING:
    from torch import Tensor

_IDENTITY: Final = {"quant_method": METHOD, "format": "int-quantized"}
_LARGEST: Final = 127


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    weights = read_weights(found, key)
    if weights.kind != "int":
        raise unsupported(f"{weights.where}.type", weights.kind, ("int",))
    if weights.strategy == "block":
        weights.require(strategy=("tensor", "channel", "group"))
    end = "" if weights.symmetric else "-asymmetric"
    if weights.strategy == "group":
        name = f"int8-groups{end}"
        return WeightFormat(name, 8, weights.group, "group", not weights.symmetric, float=False)
    return WeightFormat(
        f"int8-rows{end}", 8, scales="row", shifts=not weights.symmetric, float=False
    )


INT_QUANTIZED: Final = Format(
    name=_IDENTITY["format"],
    identity=_IDENTITY,
    detect=_detect,
    tensors={"numbers": "weight", "scale": "weight_scale", "zero": "weight_zero_point"},
    dtype="I8",
    optional=("zero",),
    is_kept=True,
    shape=scaled_shape,
    read=read_scaled,
)


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [N, C] to int8 [N, C] and scales [N, 1] in float32, each row's largest being 127."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = (largest / _LARGEST).where(largest > 0, 1.0)
    return (wide / scale).round().char(), scale


def to_config() -> dict[str, Any]:
    """Return the value of `quantization_config` for layers whose matrices `compress` returned.

    With "dequantize", as `transformers` reads it too, a model holds full numbers: the format saves disk space and
    downloads, and no product converts.
    """
    weights = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False,
               "group_size": None}  # fmt: skip
    # Without a format of its own a group of weights alone is taken for packed by compressed-tensors 0.20.
    group = {
        "format": _IDENTITY["format"],
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {**_IDENTITY, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed", "dequantize": True}  # fmt: skip
