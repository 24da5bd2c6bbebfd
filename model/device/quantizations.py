"""The values of the setting `quantization`. This module does not import PyTorch, because the front end imports it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kernels.weight_format import (
    FP8_ROWS,
    INT4_GROUPS,
    INT8_GROUPS,
    LIBRARY_FORMATS,
    LIBRARY_GROUP,
    WeightFormat,
    is_read_by_library,
)
from model.network.matrix_shapes import matrix_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernels.arch import GPUArch
    from model.network.spec import Network

QuantizationSetting: TypeAlias = Literal["auto", "none", "fp8", "int8", "int4"]
QUANTIZATIONS: Final = {"fp8": FP8_ROWS, "int8": INT8_GROUPS, "int4": INT4_GROUPS}
"""Formats to which weights are rounded when they are loaded: `LIBRARY_FORMATS` on a CPU, the others on a GPU."""
CPU_QUANTIZATIONS: Final = tuple(
    name for name, form in QUANTIZATIONS.items() if form in LIBRARY_FORMATS
)


def quantization_name(form: WeightFormat | None, *others: WeightFormat) -> str:
    """Return what to call the format of a served model's weights; "none" for full numbers.

    Args:
        form: the format.
        others: of matrices that are in other ones; those with full numbers are not named.
    """
    if form is None:
        return "none"
    names = (
        next((name for name, it in QUANTIZATIONS.items() if it == found), found.name)
        for found in (form, *others)
        if found.is_quantized
    )
    return ", ".join(dict.fromkeys(names))


def loaded_format(
    quantization: WeightFormat | None, stored: WeightFormat | None, *, in_library: bool = False
) -> WeightFormat | None:
    """Return the format in which the matrices of the layers are loaded; None for full numbers.

    Args:
        quantization: of the served model.
        stored: the format of the checkpoint; None for full numbers.
        in_library: whether the C library computes whole steps: it keeps or rounds weights after they are loaded.
    """
    return stored if in_library else quantization


def product_formats(
    network: Network, form: WeightFormat, stored: Mapping[str, WeightFormat]
) -> dict[str, WeightFormat]:
    """Return the formats of matrices for the C library's products, where it does not compute whole steps.

    What a checkpoint holds in integers of at most as many bits stays what it is. Other matrices are rounded if the
    library can multiply by them: their inputs are a multiple of a group. Embedding and head are rounded to 8 bits.

    Args:
        network: of the model.
        form: one of `LIBRARY_FORMATS`.
        stored: of the checkpoint, by names such as `layers.0.qkv`; empty for full numbers.

    Returns:
        By those names; matrices that are not in it have full numbers.
    """
    inputs = {
        f"layers.{index}.{name}": shape.inputs
        for index, matrices in enumerate(matrix_shapes(network))
        for name, shape in matrices.items()
    }
    tables = dict.fromkeys(("embed_tokens",) if network.tied else ("embed_tokens", "lm_head"))
    made = {name: form for name, count in inputs.items() if count % LIBRARY_GROUP == 0}
    if network.hidden % LIBRARY_GROUP == 0:
        made |= dict.fromkeys(tables, INT8_GROUPS)
    kept = {
        name: it
        for name, it in stored.items()
        if name not in made
        or (
            is_read_by_library(dataclasses.replace(it, ordered=False))
            and it.bits <= made[name].bits
        )
    }
    return made | kept


def is_for_library(
    quantization: WeightFormat | None,
    arch: GPUArch,
    dtype: str,
    unsupported_on_cpu: Callable[[], tuple[str, ...]],
) -> bool:
    """Whether the C library for CPUs computes whole steps of the model, of which it packs all matrices.

    Args:
        quantization: of the served model, as `model.checkpoint.dtypes.resolve_quantization` returns it.
        arch: the processor.
        dtype: of the model, as requested; the library determines it.
        unsupported_on_cpu: lists why the library cannot compute whole steps of the model here.
    """
    is_read = quantization is not None and is_read_by_library(quantization)
    return is_read and arch.is_cpu and dtype == "auto" and not unsupported_on_cpu()
