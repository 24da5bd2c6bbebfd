"""Per-layer inputs: what tokens are for each layer, and the sublayer that adds it to the residual stream."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from kernels.linear.projection import LinearWeights, Norm, bind_projection
from kernels.norms.pytorch import rms_norm
from kernels.sampling.tokens import known_ids
from kernels.weights import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.projection import Projection, Purpose, Residual, ResidualWriter
    from model.executors.layers.binder import Binder
    from model.network.parameters import DecoderParameters
    from model.network.sublayers import PerLayerInput, PerLayerTable


class BoundTable(NamedTuple):
    """The embeddings of tokens for each layer.

    Attributes:
        spec: what it computes.
        table: [vocab, L * E].
        projection: of the embedding that the residual stream begins with; the norm's eps has its factor.
        norm: of E elements.
    """

    spec: PerLayerTable
    table: Tensor
    projection: Projection
    norm: Norm

    @classmethod
    def bind(cls, spec: PerLayerTable, model: DecoderParameters, purpose: Purpose) -> BoundTable:
        """Bind the table of a model."""
        weights = LinearWeights(Weight.full(model.per_layer_projection))
        product = bind_projection(weights, model.dtype, model.arch, purpose=purpose)
        norm = Norm(model.per_layer_norm, spec.eps * model.network.hidden)
        return cls(spec, model.embed_per_layer, product, norm)

    def of(self, ids: Tensor, sampled: Tensor | None, hidden: Tensor) -> Tensor:
        """Return what tokens are for each layer.

        Args:
            ids: [...] int64, or -1 - i for the token `sampled[i]`.
            sampled: [R] int64; None where no id is below 0.
            hidden: [..., C], the embeddings that the residual stream begins with.

        Returns:
            [L, ..., E], not contiguous.
        """
        known = known_ids(ids, sampled)
        rows = torch.where(known < self.spec.vocab, known, 0)
        shape = (*ids.shape, -1, self.spec.size)
        token = functional.embedding(rows, self.table).view(shape)
        # The factor is rounded to the dtype, as that of the embeddings is.
        factor = torch.tensor(math.sqrt(self.spec.size), dtype=hidden.dtype).item()
        context = rms_norm(self.projection(hidden).view(shape), *self.norm)
        return torch.add(context, token, alpha=factor).mul(math.sqrt(0.5)).movedim(-2, 0)


class BoundPerLayerInput(NamedTuple):
    """The sublayer of a layer.

    Attributes:
        per_layer_gate: includes the activation; reads the residual stream.
        per_layer_output: adds to the residual stream, after a norm.
    """

    per_layer_gate: Projection
    per_layer_output: ResidualWriter

    @classmethod
    def bind(cls, _spec: PerLayerInput, binder: Binder) -> BoundPerLayerInput:
        """Bind the sublayer of a layer."""
        return cls(binder.reading("per_layer_gate"), binder.adding("per_layer_output"))

    def to_residual(self, residual: Residual, inputs: Tensor) -> Residual:
        """Add to the residual stream what the tokens are for the layer, [..., E]."""
        gate, residual = self.per_layer_gate.from_residual(residual)
        return self.per_layer_output.to_residual(gate * inputs, residual)
