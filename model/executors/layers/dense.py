"""The dense multi-layer perceptron of a layer."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels.norms.pytorch import activate, sparse_gate, xielu

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.projection import Projection, Residual, ResidualWriter
    from model.executors.layers.binder import Binder
    from model.network.spec import Dense


class BoundDense(NamedTuple):
    """A multi-layer perceptron.

    Attributes:
        gate_up: includes the MLP's norm and, unless it is computed apart, its activation; reads the residual stream.
        down: adds to the residual stream, after a norm if the family has one there.
        activation: parameters of xIELU; None for an activation without parameters.
        sparse: name of the activation of a sparse gate, and the multiple of `sparse_gate`; None for any other.
    """

    gate_up: Projection
    down: ResidualWriter
    activation: Tensor | None = None
    sparse: tuple[Any, float] | None = None

    @classmethod
    def bind(cls, spec: Dense, binder: Binder) -> BoundDense:
        """Bind a layer's MLP."""
        sparse = None
        if spec.sparsity:
            sparse = spec.activation, NormalDist().inv_cdf(spec.sparsity)
        return cls(
            binder.reading("gate_up"), binder.adding("down"), binder.layer.activation, sparse
        )

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """See `BoundMLP.read`."""
        gated, residual = self.gate_up.from_residual(residual)
        if self.activation is not None:
            gated = xielu(gated, self.activation)
        if self.sparse is not None:
            function, multiplier = self.sparse
            gate, up = gated.chunk(2, -1)
            gated = activate(sparse_gate(gate, multiplier), function, gated=False) * up
        return gated, residual
