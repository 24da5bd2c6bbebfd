"""Weights of 8 bits in the compressed-tensors format of Hugging Face checkpoints, `int-quantized`.

A matrix is stored as int8, with a scale for each row in a tensor of its own. The scales are multiplied in when a
checkpoint is loaded, so the model is one of ordinary weights: the format saves disk space and downloads
(docs/decisions/0039-weights-on-disk.md).

Source: the `compressed-tensors` package of the vLLM project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.format import Format, require
from model.errors import UnsupportedModelError
from model.json_input import refuse

if TYPE_CHECKING:
    from torch import Tensor

_IDENTITY: Final = {"quant_method": "compressed-tensors", "format": "int-quantized"}
_WEIGHTS: Final = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
_HARMLESS: Final = (((), ("kv_cache_scheme",)),)
_HARMLESS_OF_GROUP: Final = (((), ("output_activations",)), ((_IDENTITY["format"],), ("format",)))
_WEIGHT_FORMAT: Final = WeightFormat(_IDENTITY["format"], 8, scales="row", float=False)
_LARGEST: Final = 127


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    refuse(found, _HARMLESS, f"{key}.")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedModelError(f"{key} has no config_groups, which describe the weights")
    for name, group in groups.items():
        prefix = f"{key}.config_groups.{name}"
        require(group, {}, prefix)
        require(group.get("weights"), _WEIGHTS, f"{prefix}.weights")
        refuse(group, _HARMLESS_OF_GROUP, f"{prefix}.")
        activations = group.get("input_activations")
        if activations is not None:
            # Activations that the checkpoint's author rounds for speed are not rounded here.
            require(activations, {"dynamic": True}, f"{prefix}.input_activations")
    return _WEIGHT_FORMAT


INT_QUANTIZED: Final = Format(
    name=_WEIGHT_FORMAT.name,
    identity=_IDENTITY,
    detect=_detect,
    tensors={"numbers": "weight", "scale": "weight_scale"},
    dtype="I8",
    is_kept=False,
)


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [N, C] to int8 [N, C] and scales [N, 1] in float32, each row's largest being 127."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = (largest / _LARGEST).where(largest > 0, 1.0)
    return (wide / scale).round().char(), scale


def to_config() -> dict[str, Any]:
    """Return the value of `quantization_config` for layers whose matrices `compress` returned."""
    weights = {**_WEIGHTS, "dynamic": False, "group_size": None}
    # Without a format of its own a group of weights alone is taken for packed by compressed-tensors 0.20.
    group = {
        "format": _IDENTITY["format"],
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {**_IDENTITY, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed"}  # fmt: skip
