"""Mixers with a state of fixed size, as parts of a `Network`. As `model.network.spec`, this imports no kernels.

Their matrices are `input`, which reads the residual stream, and `mixed`, which adds to it; `gates` of the gated delta
rule reads it too. What they compute between their matrices: `kernels.recurrent.problem`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from model.network.state import Both, Fixed

_CHUNK = 64
"""`kernels.recurrent.problem.CHUNK`, which a test compares."""
_FLOAT32 = "float32"


@dataclass(frozen=True)
class ShortConv:
    """A gated causal convolution of few tokens.

    Attributes:
        channels: E.
        width: tokens that it reads, the token itself included.
        bias: whether convolution and products have biases.

    Source: LFM2 Technical Report, 2025 (arXiv 2511.23404).
    """

    channels: int
    width: int
    bias: bool = field(default=False, metadata={"text": "biases of short convolutions"})

    num_float32 = 0

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        return {"input": ((3 * self.channels,), hidden), "mixed": ((hidden,), self.channels)}

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        biases = self.bias * (4 * self.channels + hidden)
        return 4 * self.channels * hidden + self.channels * self.width + biases

    def state(self, _dtype: str) -> Fixed:
        """Return what a sequence keeps."""
        return Fixed(((self.width - 1, self.channels),), (_FLOAT32,))


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule, see `kernels.recurrent.problem.GatedDeltaShape`.

    Attributes:
        num_heads: H, heads of values.
        num_key_heads: of queries and keys; divides H.
        key_dim: of a head of queries and keys.
        value_dim: of a head of values.
        width: tokens that the convolution reads.
        eps: of the norm of each head's result.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Elements of a token's result."""
        return self.num_heads * self.value_dim

    @property
    def num_float32(self) -> int:
        """Number of parameters that are float32 in every model: those of the decay."""
        return 2 * self.num_heads

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        return {
            "input": ((self.channels, self.inner), hidden),
            "gates": ((self.num_heads, self.num_heads), hidden),
            "mixed": ((hidden,), self.inner),
        }

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        rows = self.channels + 2 * self.inner + 2 * self.num_heads
        return rows * hidden + self.channels * self.width + self.num_float32 + self.value_dim

    def state(self, _dtype: str) -> Fixed:
        """Return what a sequence keeps."""
        shapes = (self.width - 1, self.channels), (self.num_heads, self.key_dim, self.value_dim)
        return Fixed(shapes, (_FLOAT32,) * 2, _CHUNK)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2, see `kernels.recurrent.problem.Mamba2Shape`.

    Attributes:
        num_heads: H.
        head_dim: P.
        state_dim: N.
        num_groups: of b and c, and of the norm; divides H.
        width: tokens that the convolution reads.
        eps: of the norm of the result; None for no norm.
        norm_before_gate: whether the norm is before the gate rather than after it.
        dt_limits: least and largest step size.
        conv_bias: whether the convolution has a bias.
        bias: whether the product that reads the stream has one.
        output_bias: whether the product that adds to it has one.
        norm_ranks: ranks that follow each other and have one group of the norm together, which is after the gate then.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    width: int
    eps: float | None
    norm_before_gate: bool = field(
        default=False, metadata={"text": "norm of Mamba-2 before its gate"}
    )
    dt_limits: tuple[float, float] = field(
        default=(0.0, float("inf")), metadata={"text": "limits of the step size of Mamba-2"}
    )
    conv_bias: bool = field(default=True, metadata={"text": "Mamba-2 without a convolution bias"})
    bias: bool = field(default=False, metadata={"text": "bias of the inputs of Mamba-2"})
    output_bias: bool = field(default=False, metadata={"text": "bias of the result of Mamba-2"})
    norm_ranks: int = field(default=1, metadata={"text": "norm of Mamba-2 over {} ranks"})

    @property
    def channels(self) -> int:
        """Of the convolution: x, b and c."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def inner(self) -> int:
        """Elements of a token's result."""
        return self.num_heads * self.head_dim

    @property
    def num_float32(self) -> int:
        """Number of parameters that are float32 in every model: those of decay, step size and skip connection."""
        return 3 * self.num_heads

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        group = self.num_groups * self.state_dim
        rows = self.inner, self.inner, group, group, self.num_heads
        return {"input": (rows, hidden), "mixed": ((hidden,), self.inner)}

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        rows = self.inner + self.channels + self.num_heads
        biases = self.bias * rows + self.output_bias * hidden + self.conv_bias * self.channels
        norm = 0 if self.eps is None else self.inner
        products = (rows + self.inner) * hidden
        return products + self.channels * self.width + self.num_float32 + norm + biases

    def state(self, _dtype: str) -> Fixed:
        """Return what a sequence keeps."""
        shapes = (self.width - 1, self.channels), (self.num_heads, self.head_dim, self.state_dim)
        return Fixed(shapes, (_FLOAT32,) * 2, _CHUNK)


@dataclass(frozen=True)
class Parallel:
    """Mixers beside each other: they read the same normalized stream, and their results are added to it.

    Attributes:
        mixers: attention, and one of the above. Their matrices have different names.
    """

    mixers: tuple[Any, Any]

    @property
    def num_float32(self) -> int:
        """Number of parameters that are float32 in every model."""
        count: int = sum(it.num_float32 for it in self.mixers)
        return count

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        named = (it.matrices(hidden).items() for it in self.mixers)
        return dict(itertools.chain.from_iterable(named))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        count: int = sum(it.num_parameters(hidden) for it in self.mixers)
        return count

    def state(self, dtype: str) -> Both:
        """Return what a sequence keeps, in a cache of a dtype."""
        paged, fixed = (it.state(dtype) for it in self.mixers)
        return Both(paged, fixed)
