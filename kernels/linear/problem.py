"""The description of a linear layer of one step, by which a kernel is selected."""

from __future__ import annotations

import dataclasses

from kernels.fp8 import FP8

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1}


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProblem:
    """A linear layer y = x W^T * scale + bias and the operations around it.

    Attributes:
        rows: of x, at least 1.
        outputs: N, rows of the weights; half of them where `gated`.
        inputs: C, columns of the weights.
        dtype: of input, output and, unless `weight_dtype` says otherwise, weights.
        gated: whether the weights are those of gate and up, and the output is silu(gate) * up.
        weight_dtype: of quantized weights with a float32 scale for each output: "float8_e4m3fn"; else None.
        bias: whether a bias is added.
        residual: whether the output is added to the residual stream.
        layer_weights: number of weights in all projections of the decoder layer; 0 for the output head.
        trainable: whether the result must be differentiable and the weights may change.
        batch_invariant: whether the result of a row must have the same bits whatever the other rows and their number.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: str = "bfloat16"
    gated: bool = False
    weight_dtype: str | None = None
    bias: bool = False
    residual: bool = False
    layer_weights: int = 0
    trainable: bool = False
    batch_invariant: bool = False

    @property
    def matrices(self) -> int:
        """Weight rows per output."""
        return 2 if self.gated else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight."""
        return _ITEM_BYTES[self.weight_dtype or self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; a step reads them at least once."""
        return self.matrices * self.outputs * self.inputs * self.item_bytes

    def __str__(self) -> str:
        """Return one line for logs and tables."""
        gated = " gated" if self.gated else ""
        weights = f", weights in {self.weight_dtype}" if self.weight_dtype else ""
        invariant = ", batch invariant" if self.batch_invariant else ""
        size = f"{self.rows} x {self.inputs} to {self.outputs}"
        return f"{size}{gated} in {self.dtype}{weights}{invariant}"
