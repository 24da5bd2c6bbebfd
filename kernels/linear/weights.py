"""The tensors of a linear layer, the operations around it, and those that one call of its product absorbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.norms.pytorch import ActivationName
    from kernels.sampling.tile_best import TileBest
    from kernels.weights import Weight


class LinearWeights(NamedTuple):
    """Parameters of a linear layer.

    Attributes:
        weight: [N, C]; [2 * N, C], gate above up, where the layer is gated.
        bias: as many as `weight` has outputs; None for none.
    """

    weight: Weight
    bias: Tensor | None = None


class Norm(NamedTuple):
    """An RMS norm: its weight [C], in the dtype of the input or float32, and the eps added to the mean square."""

    weight: Tensor
    eps: float


class LayerNorm(NamedTuple):
    """A layer norm: its weight and bias [C], and the eps that is added to the variance."""

    weight: Tensor
    bias: Tensor
    eps: float


class Activation(NamedTuple):
    """The activation between the two projections of an MLP.

    Attributes:
        function: f.
        gated: whether it is f(gate) * up, of weights that stack gate and up; else f of each output.
    """

    function: ActivationName
    gated: bool


SWIGLU: Final = Activation("silu", gated=True)
"""silu(gate) * up, which some products absorb."""


class Operations(NamedTuple):
    """The operations around the product of a projection; `kernels.linear.projection` describes where they are.

    Attributes:
        norm: of the residual stream that `from_residual` reads.
        activation: of the output of `from_residual`.
        residual: whether the projection is for `to_residual`.
        post_norm: of the output that `to_residual` adds.
    """

    norm: Norm | LayerNorm | None = None
    activation: Activation | None = None
    residual: bool = False
    post_norm: Norm | None = None


PRODUCT_ONLY: Final = Operations()


class LinearArguments(NamedTuple):
    """The operations that one call of a product absorbs; its registry row must support them.

    Attributes:
        norm: of the input rows; None for no norm.
        residual: [rows, N], contiguous in N, added to the output; may be the output. Not with a gate.
        best: written with the largest key of each tile; only by the vector kernel, and not with a gate.
        pdl: use programmatic dependent launch.
    """

    norm: Norm | None = None
    residual: Tensor | None = None
    best: TileBest | None = None
    pdl: bool = False
