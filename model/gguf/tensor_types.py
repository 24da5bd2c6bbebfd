"""The types of tensors in GGUF files: which are read, and how many bytes they take. Imports no PyTorch."""

from __future__ import annotations

from typing import Final, NamedTuple

from kernels.weight_format import WeightFormat


class TensorType(NamedTuple):
    """How a tensor is stored: rows of blocks, each with numbers and their scales.

    Attributes:
        name: as llama.cpp has it.
        block: elements of a block, neighbours in a row.
        num_bytes: of a block.
        form: of a matrix as a model holds it; None for full numbers.
    """

    name: str
    block: int
    num_bytes: int
    form: WeightFormat | None = None


def _groups(
    name: str, bits: int, group: int, offset: int = 0, scale: str = "float32", *, shifts: bool
) -> WeightFormat:
    return WeightFormat(
        name, bits, group, "group", shifts, float=False, offset=offset, scale_dtype=scale
    )


# Numbers of 5 and 6 bits are held in 8, those of 2 and 3 bits in 4. A scale that is a product of a block's and a
# group's needs float32; those of the older types are float16 in the file.
_READ: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18, _groups("Q4_0", 4, 32, 8, "float16", shifts=False)),
    3: TensorType("Q4_1", 32, 20, _groups("Q4_1", 4, 32, 0, "float16", shifts=True)),
    6: TensorType("Q5_0", 32, 22, _groups("Q5_0", 8, 32, 0, "float16", shifts=False)),
    7: TensorType("Q5_1", 32, 24, _groups("Q5_1", 8, 32, 0, "float16", shifts=True)),
    8: TensorType("Q8_0", 32, 34, _groups("Q8_0", 8, 32, 0, "float16", shifts=False)),
    10: TensorType("Q2_K", 256, 84, _groups("Q2_K", 4, 16, 0, shifts=True)),
    11: TensorType("Q3_K", 256, 110, _groups("Q3_K", 4, 16, 4, shifts=False)),
    12: TensorType("Q4_K", 256, 144, _groups("Q4_K", 4, 32, 0, shifts=True)),
    13: TensorType("Q5_K", 256, 176, _groups("Q5_K", 8, 32, 0, shifts=True)),
    14: TensorType("Q6_K", 256, 210, _groups("Q6_K", 8, 16, 0, shifts=False)),
    20: TensorType("IQ4_NL", 32, 18, _groups("IQ4_NL", 8, 32, 0, "float16", shifts=False)),
    23: TensorType("IQ4_XS", 256, 136, _groups("IQ4_XS", 8, 32, 0, shifts=False)),
    30: TensorType("BF16", 1, 2),
}
_NOT_READ: Final = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
SUPPORTED: Final = tuple(kind.name for kind in _READ.values())
QUANTIZED: Final = {kind.name: kind for kind in _READ.values() if kind.form is not None}


def find_type(number: int) -> TensorType | None:
    """Return the type of a number in a file; None if it is not read."""
    return _READ.get(number)


def type_name(number: int) -> str:
    """Return the name of the type of a number in a file, read or not."""
    kind = _READ.get(number)
    return kind.name if kind else _NOT_READ.get(number, f"number {number}")
