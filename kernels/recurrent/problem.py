"""What a recurrent mixer computes between its products, as data: sizes, weights and the states that it keeps.

T tokens of a step, S slots of the cache, W taps of a causal convolution, H heads (of values), G heads of keys, or
groups. States have the shapes of one sequence after [S]; all are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

CHUNK: Final = 64
"""Tokens that kernels for prompts compute as one block.

Blocks begin at positions that are multiples of it. A state after a multiple of it has the same bits however a prompt is
divided into steps that end at such multiples.
"""
NORM_EPS: Final = 1e-6
"""Added to the squared length of a query or key of the gated delta rule."""
LEAST_DECAY: Final = -200.0
"""Logarithm of a decay that is 0 in float32; smaller ones are replaced by it, so that sums and differences of them are
exact enough."""


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A gated causal convolution: y = c * conv(b * x), from one product of [b | c | x].

    State: the last W - 1 values of b * x, [W - 1, channels].

    Attributes:
        channels: of b, c and x each.
        width: W.
        bias: whether the convolution has one.
    """

    channels: int
    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """The gated delta rule after a causal convolution with SiLU, from a product of [q | k | v | z] and one of [b | a].

    With q and k of length 1 (with `NORM_EPS` under the root), q scaled by 1 / sqrt(key_dim), each key head serving
    num_heads / num_key_heads value heads beside each other, g = -exp(a_log) * softplus(a + dt_bias) and
    beta = sigmoid(b), for each head and token

        S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q;  y = rms_norm(o) * weight * silu(z)

    where the norm is of each head. States: the last W - 1 inputs of the convolution, [W - 1, channels], and S,
    [H, key_dim, value_dim].

    Source: Yang et al., Gated Delta Networks, 2024 (arXiv 2412.06464).

    Attributes:
        num_heads: H, heads of values.
        num_key_heads: G, of queries and keys.
        key_dim: of a head of queries and keys.
        value_dim: of a head of values.
        width: W.
        eps: of the norm.
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
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Elements of the result of a token."""
        return self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Mamba-2 after a causal convolution with SiLU, from one product of [z | x | b | c | dt].

    With d = clamp(softplus(dt + dt_bias), *dt_limits), for each head (P = head_dim, N = state_dim, b and c of its
    group) and token

        h = exp(-exp(a_log) d) h + d x b^T;  y = h c + D x

    then y = rms_norm(y * silu(z)) * weight, of each group; or rms_norm(y) * weight * silu(z) if `norm_before_gate`; or
    y * silu(z) without a norm. States: the last W - 1 inputs of the convolution, [W - 1, channels], and h, [H, P, N].

    Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv 2405.21060).

    Attributes:
        num_heads: H.
        head_dim: P.
        state_dim: N.
        num_groups: G, of b and c, and of the norm.
        width: W.
        eps: of the norm; None for no norm.
        norm_before_gate: see above.
        dt_limits: least and largest d.
        conv_bias: whether the convolution has a bias.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    width: int
    eps: float | None
    norm_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True

    @property
    def channels(self) -> int:
        """Of the convolution: x, b and c."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def inner(self) -> int:
        """Elements of the result of a token."""
        return self.num_heads * self.head_dim


RecurrentShape: TypeAlias = ShortConvShape | GatedDeltaShape | Mamba2Shape


class RecurrentWeights(NamedTuple):
    """The parameters of a recurrent mixer beside its matrices.

    Attributes:
        conv: [channels, W]; the last tap is that of the token itself.
        conv_bias: [channels] or None.
        a_log: [H] float32; None for a short convolution.
        dt_bias: [H] float32; None for a short convolution.
        d: [H] float32, of Mamba-2.
        norm: [value_dim] of the gated delta rule, [H * P] of Mamba-2; None without a norm.
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    d: Tensor | None = None
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecurrentProblem:
    """A recurrent mixer on a processor, for which a kernel is chosen.

    Attributes:
        shape: of the mixer.
        dtype: of the products' results and of what the kernel returns.
        trainable: whether the result must be differentiable.
    """

    shape: RecurrentShape
    dtype: str
    trainable: bool = False

    def __str__(self) -> str:
        """Return one line for logs and error messages."""
        return f"{type(self.shape).__name__.removesuffix('Shape')} in {self.dtype}"
