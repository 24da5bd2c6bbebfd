"""The description of a linear layer of one step, by which a kernel is selected."""

from __future__ import annotations

import dataclasses
from typing import Final

from kernels.weight_format import WeightFormat, unquantized

_BFLOAT16: Final = unquantized("bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProblem:
    """A linear layer y = x W^T * scale + bias and the operations around it.

    Attributes:
        rows: of x, at least 1.
        outputs: N, rows of the weights; half of them where `gated`.
        inputs: C, columns of the weights.
        dtype: of input and output.
        gated: whether the weights are those of gate and up, and the output is silu(gate) * up.
        format: of the weights; one without scales is replaced by that of `dtype`.
        bias: whether a bias is added.
        residual: whether the output is added to the residual stream.
        layer_weights: number of weights in all projections of the decoder layer; 0 for the output head.
        trainable: whether the result must be differentiable and the weights may change.
        batch_invariant: whether the result of a row must have the same bits whatever the other rows and their number.
        ordered: whether the inputs are put in the order of the stored columns before the product.
        rounds_inputs: whether inputs may be rounded to 8 bits, for weights that are integers.
        in_place: whether the weights are read where they are: a copy of them would take too much memory. Full numbers
            may then be of another dtype.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: str = "bfloat16"
    gated: bool = False
    format: WeightFormat = _BFLOAT16
    bias: bool = False
    residual: bool = False
    layer_weights: int = 0
    trainable: bool = False
    batch_invariant: bool = False
    ordered: bool = False
    rounds_inputs: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        if not self.format.is_quantized:
            object.__setattr__(self, "format", unquantized(self.dtype))

    @property
    def matrices(self) -> int:
        """Weight rows per output."""
        return 2 if self.gated else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights without scales; a step reads them at least once."""
        return self.matrices * self.outputs * self.inputs * self.format.bits // 8

    def __str__(self) -> str:
        """Return one line for logs and tables."""
        gated = " gated" if self.gated else ""
        weights = "" if self.format.name == self.dtype else f", weights in {self.format.name}"
        invariant = ", batch invariant" if self.batch_invariant else ""
        ordered = ", inputs in another order" if self.ordered else ""
        size = f"{self.rows} x {self.inputs} to {self.outputs}"
        return f"{size}{gated} in {self.dtype}{weights}{ordered}{invariant}"
