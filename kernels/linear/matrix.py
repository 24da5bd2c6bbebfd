"""The door to a decoder layer's products of 5 to 256 rows on Hopper's tensor cores, with few launches.

    qkv | norms per head, rotation, cache | attention | output | residual, norm | gate, up, SiLU | down | residual, norm

Output and down leave parts of sums, which the norm behind them (`FusedNorm`) adds to the residual. Knows no cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kernels.arch import HOPPER
from kernels.linear.matrix_tiles import FEWEST_ROWS, ROW_COUNTS, most_rows

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.linear.gpu.matrix import MatrixLinear
    from kernels.linear.projection import FusedLinear

__all__ = [
    "FEWEST_ROWS",
    "ROW_COUNTS",
    "MatrixLayer",
    "bind_layer",
    "most_rows",
    "objection",
]

_DTYPES: Final = (torch.bfloat16, torch.float16)
_MULTIPLE: Final = 64


class MatrixLayer(NamedTuple):
    """A layer's products, each bound to its weights.

    Attributes:
        qkv: [T, C] to [T, N].
        output: [T, N] to parts [S, T, C] float32.
        gate_up: [T, C] to [T, F], gated.
        down: [T, F] to parts [S, T, C] float32.
    """

    qkv: MatrixLinear
    output: MatrixLinear
    gate_up: MatrixLinear
    down: MatrixLinear


def objection(layers: tuple[FusedLinear, ...], arch: GPUArch) -> str:
    """Say why the products of a layer cannot be computed so; empty where they can.

    Args:
        layers: QKV, output, gate and up, down.
        arch: of their device.
    """
    if reasons := arch.unsupported(HOPPER):
        return f"the matrix kernel {reasons[0]}"
    qkv, *others = layers
    dtype = qkv.weight.dtype
    odd = next((n for it in layers for n in it.weight.shape if n % _MULTIPLE), None)
    checks = (
        (any(it.scale is not None for it in layers), "weights are quantised"),
        (dtype not in _DTYPES, f"no {str(dtype).removeprefix('torch.')}"),
        (any(it.bias is not None for it in others), "a bias behind attention or in the MLP"),
        (odd is not None, f"a size of {odd}, which is no multiple of {_MULTIPLE}"),
    )
    return next((reason for refused, reason in checks if refused), "")


def bind_layer(layers: tuple[FusedLinear, ...]) -> MatrixLayer:
    """Bind the products of a layer that `objection` has nothing against; arguments as there."""
    from kernels.linear.gpu.matrix import MatrixLinear  # noqa: PLC0415 - Triton is not everywhere

    qkv, output, gate_up, down = layers
    return MatrixLayer(
        MatrixLinear(qkv.weight, qkv.bias),
        MatrixLinear(output.weight, in_parts=True),
        MatrixLinear(gate_up.weight, gated=True),
        MatrixLinear(down.weight, in_parts=True),
    )
