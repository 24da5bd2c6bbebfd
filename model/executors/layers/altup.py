"""AltUp: layers of several residual streams, with LAuReL beside the mixer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from kernels.linear.projection import Norm, Residual, settled
from kernels.norms.pytorch import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.linear.projection import Projection, ResidualWriter
    from model.executors.layers.binder import Binder
    from model.network.layers import DecoderLayer
    from model.network.parameters import DecoderParameters
    from model.network.sublayers import AltUp, Laurel

_LEAST_SQUARE = 1e-5
"""Least mean square that a stream is divided by the root of."""


class BoundLaurel(NamedTuple):
    """The low-rank sublayer beside the mixer.

    Attributes:
        norm: of the stream, which the mixer reads too.
        laurel_in: reads the normalized stream.
        laurel_out: adds to the normalized stream, after a norm.
    """

    norm: Callable[[Tensor], Tensor]
    laurel_in: Projection
    laurel_out: ResidualWriter

    @classmethod
    def bind(cls, _spec: Laurel, binder: Binder) -> BoundLaurel:
        """Bind the sublayer of a layer."""
        layer = binder.layer
        assert layer.input_norm is not None
        norm = Norm(layer.input_norm, layer.spec.norm.eps)
        return cls(binder.norm(norm), binder.reading("laurel_in"), binder.adding("laurel_out"))

    def result(self, stream: Tensor) -> Tensor:
        """Return what is added to the stream, [..., C], beside the mixer's result."""
        residual = Residual(self.norm(stream))
        narrow, residual = self.laurel_in.from_residual(residual)
        return settled(self.laurel_out.to_residual(narrow, residual))


class BoundAltUp(NamedTuple):
    """What a layer does with its streams, [A, ..., C].

    Attributes:
        spec: what it computes.
        layer: its parameters.
        norm: of the stream that the coefficients depend on.
    """

    spec: AltUp
    layer: DecoderLayer
    norm: Norm

    @classmethod
    def bind(cls, spec: AltUp, binder: Binder) -> BoundAltUp:
        """Bind the parameters of a layer."""
        norm = Norm(binder.layer.altup_norm, binder.layer.spec.norm.eps)
        return cls(spec, binder.layer, norm)

    def predicted(self, streams: Tensor) -> Tensor:
        """Return the prediction of each stream."""
        count = self.spec.count
        coefficients = functional.linear(
            self._route(streams[self.spec.active]), self.layer.altup_predict
        )
        # [..., A of the result, A that is read]
        matrix = coefficients.view(*coefficients.shape[:-1], count, count)
        return streams + torch.einsum("...rs,s...c->r...c", matrix, streams)

    def corrected(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Return the streams after a layer.

        Args:
            predicted: from `predicted`.
            computed: [..., C], what the layer made of the prediction of the active stream.
        """
        shares = functional.linear(self._route(computed), self.layer.altup_correct) + 1
        change = computed - predicted[self.spec.active]
        return predicted + shares.movedim(-1, 0)[..., None] * change

    def with_inputs(self, streams: Tensor, sublayer: Callable[[Residual], Residual]) -> Tensor:
        """Add to all streams but the first what a sublayer makes of the active one."""
        active = streams[self.spec.active]
        if self.spec.scaled:
            active = active * self.layer.altup_scale
        added = settled(sublayer(Residual(active.clone()))) - active
        return torch.cat((streams[:1], streams[1:] + added))

    def _route(self, stream: Tensor) -> Tensor:
        """Return the [..., A] numbers that the coefficients are a linear function of."""
        normalized = rms_norm(stream, *self.norm) / stream.shape[-1]
        return torch.tanh(functional.linear(normalized, self.layer.altup_router).float()).to(stream)


class BoundStreams(NamedTuple):
    """How the streams begin and end.

    Attributes:
        begin: [A - 1, C, C], of all streams but the first.
        end: likewise.
    """

    begin: Tensor
    end: Tensor

    @classmethod
    def bind(cls, model: DecoderParameters) -> BoundStreams:
        """Bind the matrices of a model."""
        shape = (-1, model.network.hidden, model.network.hidden)
        return cls(model.streams_in.view(shape), model.streams_out.view(shape))

    def split(self, hidden: Tensor) -> Tensor:
        """Return the streams, [A, ..., C], that begin with embeddings, [..., C]."""
        others = torch.einsum("...c,soc->s...o", hidden, self.begin)
        return torch.cat((hidden[None], _scaled(others, hidden)))

    def joined(self, streams: Tensor) -> Tensor:
        """Return what the streams, [A, ..., C], end as, [..., C]."""
        others = torch.einsum("s...c,soc->s...o", streams[1:], self.end)
        return torch.cat((streams[:1], _scaled(others, streams[0]))).mean(0)


def _scaled(streams: Tensor, first: Tensor) -> Tensor:
    """Scale streams, [A - 1, ..., C], to the root mean square of the first one, [..., C]."""
    target = first.float().square().mean(-1, keepdim=True).sqrt()
    length = streams.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return (streams.float() * (target / length)).to(streams.dtype)


def add_laurel(stream: Tensor, result: Tensor) -> Tensor:
    """Return the stream after the mixer, to which LAuReL's result is added."""
    return (stream + result) * math.sqrt(0.5)
