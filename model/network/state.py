"""What a sequence keeps on the device from step to step, layer by layer, and how many bytes that takes.

A mixer says what it keeps: keys and values of each token, in the blocks of the cache, or arrays of a fixed size for
each sequence, in one of the cache's slots. This module imports neither PyTorch nor kernels, since sizes are checked
before either is loaded.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

SCALED_DTYPE: Final = "float8_e4m3fn"
"""A cache of this dtype has a float32 scale for each key and each value of a head."""
_SCALE_DTYPE: Final = "float32"
_ALIGNMENT: Final = 128
"""Bytes: each array of a slot begins at a multiple, so that kernels load it in whole vectors."""
_BYTES: Final = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int8": 1
}  # fmt: skip


def quantized_kv_dtype(requested: str) -> str | None:
    """Return the dtype of keys and values that a setting asks for; None for that of the model.

    Args:
        requested: "auto" or "fp8".
    """
    return SCALED_DTYPE if requested == "fp8" else None


@dataclass(frozen=True)
class Paged:
    """Keys and values of each token, in blocks.

    Attributes:
        num_kv_heads: K.
        head_dim: D.
        dtype: of keys and values, PyTorch's name; with scales if it is `SCALED_DTYPE`.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def scale_dtype(self) -> str | None:
        """Dtype of the scale of each key and each value of a head; None if there are none."""
        return _SCALE_DTYPE if self.dtype == SCALED_DTYPE else None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, scales included."""
        scale = _BYTES[self.scale_dtype] if self.scale_dtype else 0
        return 2 * self.num_kv_heads * (self.head_dim * _BYTES[self.dtype] + scale)


@dataclass(frozen=True)
class Fixed:
    """Arrays whose size does not depend on the tokens of a sequence, in a slot.

    Attributes:
        shapes: of the arrays of one sequence.
        dtypes: theirs, PyTorch's names.
        chunk: a state after a multiple of so many tokens does not depend on how the tokens are divided into steps that
            end at such multiples, not even in its rounding.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    chunk: int = 1

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of each array."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * _BYTES[dtype] for shape, dtype in pairs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bytes of the slot before each array, and bytes of all arrays, with what aligns them."""
        aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.num_bytes)
        return tuple(itertools.accumulate(aligned, initial=0))


@dataclass(frozen=True)
class Shared:
    """What an earlier layer keeps, which this one reads too and does not write.

    Attributes:
        layer: index of that layer, whose state is `Paged`.
    """

    layer: int


@dataclass(frozen=True)
class Both:
    """Keys and values in blocks, and arrays of a fixed size in a slot."""

    paged: Paged
    fixed: Fixed


MixerState: TypeAlias = Paged | Fixed | Shared | Both


def paged_of(state: MixerState) -> Paged | None:
    """Return what a layer keeps in blocks; None for nothing."""
    if isinstance(state, Both):
        return state.paged
    return state if isinstance(state, Paged) else None


def fixed_of(state: MixerState) -> Fixed | None:
    """Return what a layer keeps in a slot; None for nothing."""
    if isinstance(state, Both):
        return state.fixed
    return state if isinstance(state, Fixed) else None


@dataclass(frozen=True)
class StateSpec:
    """What a sequence keeps in all layers of a network.

    Attributes:
        dtype: of keys and values, PyTorch's name.
        layers: in order.
    """

    dtype: str
    layers: tuple[MixerState, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(it.token_bytes for it in map(paged_of, self.layers) if it is not None)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, for what does not depend on the number of tokens; 0 if no layer has such a state."""
        return sum(it.offsets[-1] for it in map(fixed_of, self.layers) if it is not None)

    @property
    def chunk(self) -> int:
        """The least common multiple of `Fixed.chunk` of all layers."""
        return math.lcm(*(it.chunk for it in map(fixed_of, self.layers) if it is not None))
