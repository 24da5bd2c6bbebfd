"""The values of the setting `quantization`. This module does not import PyTorch, because the front end imports it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_ROWS, LIBRARY_FORMATS, WeightFormat

QuantizationSetting: TypeAlias = Literal["auto", "none", "fp8", "int8", "int4"]
QUANTIZATIONS: Final = {"fp8": FP8_ROWS, "int8": INT8_ROWS, "int4": INT4_GROUPS}
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
        quantization: of the served model; the C library rounds weights after they are loaded.
        stored: the format of the checkpoint that a model can hold; None for full numbers.
    """
    return stored if quantization in LIBRARY_FORMATS else quantization
