"""Sublayers beside mixer and MLP, as parts of a `Network`. As `model.network.spec`, this imports no kernels.

per-layer inputs    stream + norm(W_output (f(W_gate stream) * e_l))            e_l: what the token is for layer l
LAuReL              norm(stream) + norm(W_out W_in norm(stream)), added to the stream with the mixer's result
AltUp               several streams: a layer changes one and predicts how the others change with it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class PerLayerTable:
    """Embeddings that tokens have for each layer.

    Of a token with the embedding h, scaled as the residual stream begins, layer l of L gets

        e_l = (norm(W_l h / sqrt(C)) + sqrt(E) table[token, l]) / sqrt(2)

    Attributes:
        vocab: tokens of the table; others have the row of token 0.
        size: E.
        eps: of the norm, an RMS norm of E elements, whose weight all layers have in common.

    Source: transformers 5, `modeling_gemma4.py`, `get_per_layer_inputs` and `project_per_layer_inputs`.
    """

    vocab: int
    size: int
    eps: float

    def num_table(self, num_layers: int) -> int:
        """Return the number of elements of the table of a network of L layers, of which a token reads a row."""
        return self.vocab * num_layers * self.size

    def num_parameters(self, hidden: int, num_layers: int) -> int:
        """Return the number of parameters of a network of L layers."""
        return self.num_table(num_layers) + hidden * num_layers * self.size + self.size


@dataclass(frozen=True)
class PerLayerInput:
    """The sublayer that adds a token's embedding for the layer, gated by the stream; its result is normalized.

    Attributes:
        size: E of `PerLayerTable`.
        activation: f.
    """

    size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu_tanh"

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        return {
            "per_layer_gate": ((self.size,), hidden),
            "per_layer_output": ((hidden,), self.size),
        }

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        return 2 * self.size * hidden + hidden


@dataclass(frozen=True)
class Laurel:
    """The learned augmented residual layer.

    With x = norm(stream), the mixer's result m and r = x + norm(W_out W_in x), the stream becomes
    (stream + m + r) / sqrt(2).

    Attributes:
        rank: of the product of both matrices.

    Source: Menghani et al., LAuReL, 2024 (arXiv 2411.07501); transformers 5, `modeling_gemma3n.py`.
    """

    rank: int

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        return {"laurel_in": ((self.rank,), hidden), "laurel_out": ((hidden,), self.rank)}

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        return 2 * self.rank * hidden + hidden


@dataclass(frozen=True)
class AltUp:
    """Alternating updates of A streams by one layer.

    The layer predicts each stream as itself and a sum of all streams, computes on the prediction of the active one, and
    adds to each prediction a share of the change of that one. The coefficients of both depend on the token. Per-layer
    inputs read the active stream and are added to all streams but the first.

    Attributes:
        count: A.
        active: index of the stream that mixer and MLP change.
        scaled: whether per-layer inputs read that stream multiplied by a vector.

    Source: Baykal et al., Alternating Updates for Efficient Transformers, 2023 (arXiv 2301.13310); transformers 5,
        `modeling_gemma3n.py`.
    """

    count: int
    active: int = field(default=0, metadata={"text": "AltUp of another stream than the first"})
    scaled: bool = field(default=True, metadata={"text": "AltUp without a scale"})

    def matrices(self, _hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return no matrices of layers: those of the coefficients are too small to be held in another format."""
        return {}

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        return (self.count + 2) * hidden + self.count**3 + self.count**2


@dataclass(frozen=True)
class Streams:
    """How A streams begin and end.

    The first one begins as the embedding h, the others as W_i h; they end as the mean of the first one and of V_i times
    each other. Each product is scaled to the root mean square of the first stream.

    Attributes:
        count: A.
    """

    count: int

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters."""
        return 2 * (self.count - 1) * hidden * hidden
