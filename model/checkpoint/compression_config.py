"""The description of weights of 8 bits in config.json: Hugging Face's compressed-tensors, format `int-quantized`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from model.errors import UnsupportedModelError
from model.json_input import refuse, shorten

CONFIG_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that describe the format; the second is older."""
_REQUIRED: Final = {"quant_method": "compressed-tensors", "format": "int-quantized"}
_REQUIRED_OF_WEIGHTS: Final = {
    "type": "int",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "channel",
}
_HARMLESS_OF_GROUP: Final = (
    ((), ("output_activations",)),
    ((_REQUIRED["format"],), ("format",)),
)
_HARMLESS: Final = (((), ("kv_cache_scheme",)),)


def check_compression(config: Mapping[str, Any]) -> None:
    """Check that a checkpoint's weights are stored in no other way than this module reads.

    Args:
        config: the content of config.json.

    Raises:
        UnsupportedModelError: they are. The message names the key, its value and what is supported.
    """
    for key in CONFIG_KEYS:
        if (found := config.get(key)) is None:
            continue
        _require(found, _REQUIRED, key)
        refuse(found, _HARMLESS, f"{key}.")
        groups = found.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise UnsupportedModelError(f"{key} has no config_groups, which describe the weights")
        for name, group in groups.items():
            prefix = f"{key}.config_groups.{name}"
            _require(group, {}, prefix)
            _require(group.get("weights"), _REQUIRED_OF_WEIGHTS, f"{prefix}.weights")
            refuse(group, _HARMLESS_OF_GROUP, f"{prefix}.")
            activations = group.get("input_activations")
            if activations is not None:
                # Activations that the checkpoint's author rounds for speed are not rounded here.
                _require(activations, {"dynamic": True}, f"{prefix}.input_activations")


def _require(found: object, required: Mapping[str, object], where: str) -> None:
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{where} must be an object, found {shorten(found)}")
    for key, value in required.items():
        if found.get(key) != value:
            raise UnsupportedModelError(
                f"{where}.{key} = {shorten(found.get(key))} is not supported; supported is {value!r}"
            )


def to_config() -> dict[str, Any]:
    """Return the value of `quantization_config` for layers whose matrices `compress` returned."""
    weights = {**_REQUIRED_OF_WEIGHTS, "dynamic": False, "group_size": None}
    # Without a format of its own a group of weights alone is taken for packed by compressed-tensors 0.20.
    group = {
        "format": _REQUIRED["format"],
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {**_REQUIRED, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed"}  # fmt: skip
