"""Weights of 8 bits in the compressed-tensors format of Hugging Face checkpoints.

A matrix is stored as int8, with a scale for each row in a tensor of its own, `<name>_scale`. The scales are multiplied
in when a checkpoint is loaded, so the model is one of ordinary weights: the format saves disk space and downloads.

Source: the `compressed-tensors` package of the vLLM project, format `int-quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from model.checkpoint.shards import StoredTensor
from model.errors import WeightsError

_SUFFIX: Final = ".weight_scale"
_LARGEST: Final = 127


def split_scales(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Divide a checkpoint's tensors into those of the model and their scales.

    Raises:
        WeightsError: an int8 tensor is no matrix or has no scale for each row.
    """
    scales = {name: entry for name, entry in stored.items() if name.endswith(_SUFFIX)}
    others = {name: entry for name, entry in stored.items() if name not in scales}
    used = set()
    for name, entry in others.items():
        if entry.dtype != "I8":
            continue
        if len(entry.shape) != 2:
            raise WeightsError(
                f"{entry.file}: {name} is int8 of shape {list(entry.shape)}; only matrices may be"
            )
        rows, scale = entry.shape[0], scales.get(scale_name(name))
        if scale is None or scale.shape not in ((rows,), (rows, 1)) or scale.dtype == "I8":
            found = "is missing" if scale is None else f"is {list(scale.shape)} {scale.dtype}"
            raise WeightsError(
                f"{entry.file}: {name} is int8 with {rows} rows; {scale_name(name)}, a float for each, {found}"
            )
        used.add(scale_name(name))
    if unused := sorted(scales.keys() - used):
        raise WeightsError(f"{scales[unused[0]].file}: {unused[0]} belongs to no int8 tensor")
    return others, scales


def scale_name(name: str) -> str:
    """Return the name of the scales of an int8 tensor."""
    return f"{name}_scale"


def decompress(numbers: Tensor, scale: Tensor) -> Tensor:
    """Multiply int8 rows [N, C] by their scales, [N] or [N, 1]; returns float32."""
    return numbers.float() * scale.float().view(-1, 1)


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [N, C] to int8 [N, C] and scales [N, 1] in float32, each row's largest being 127."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return (wide / scale).round().to(torch.int8), scale
