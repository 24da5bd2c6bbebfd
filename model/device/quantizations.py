"""The values of the setting `quantization`. This module does not import PyTorch, because the front end imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kernels.weight_format import (
    FP8_ROWS,
    INT4_GROUPS,
    INT8_GROUPS,
    LIBRARY_FORMATS,
    WeightFormat,
    is_read_by_library,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch

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
    quantization: WeightFormat | None, stored: WeightFormat | None
) -> WeightFormat | None:
    """Return the format in which the matrices of the layers are loaded; None for full numbers.

    Args:
        quantization: of the served model; the C library keeps or rounds weights after they are loaded.
        stored: the format of the checkpoint; None for full numbers.
    """
    return stored if quantization in LIBRARY_FORMATS else quantization


def is_for_library(
    quantization: WeightFormat | None,
    arch: GPUArch,
    dtype: str,
    unsupported_on_cpu: Callable[[], tuple[str, ...]],
) -> bool:
    """Whether the C library for CPUs computes the model, of which it packs all matrices.

    Args:
        quantization: of the served model, as `model.checkpoint.dtypes.resolve_quantization` returns it.
        arch: the processor.
        dtype: of the model, as requested; the library determines it.
        unsupported_on_cpu: lists why the library cannot serve the model here.
    """
    if quantization in LIBRARY_FORMATS:
        return True
    is_read = quantization is not None and is_read_by_library(quantization)
    return is_read and arch.is_cpu and dtype == "auto" and not unsupported_on_cpu()
