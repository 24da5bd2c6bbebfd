"""Recurrent mixers of a layer: over states in the slots of the cache for serving, over whole sequences for training.

What a mixer computes between its products is one kernel of `kernels.recurrent.registry`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeGuard

from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentProblem,
    RecurrentShape,
    RecurrentWeights,
    ShortConvShape,
)
from kernels.recurrent.registry import select
from kernels.recurrent.segments import Segments
from kernels.selection import load
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.state import fixed_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels import GPUArch
    from kernels.linear.projection import Projection, Residual, ResidualWriter
    from kernels.recurrent.registry import RecurrentSpec
    from kernels.selection import Choice
    from model.device.kv_cache import KVCache
    from model.executors.layers.binder import Binder
    from model.executors.step import StepInput
    from model.network.layers import DecoderLayer
    from model.network.spec import Network

RecurrentMixer: TypeAlias = ShortConv | GatedDelta | Mamba2
_SHAPES: Final[dict[type, type[Any]]] = {
    ShortConv: ShortConvShape,
    GatedDelta: GatedDeltaShape,
    Mamba2: Mamba2Shape,
}


def recurrent_shape(mixer: RecurrentMixer) -> RecurrentShape:
    """Return a mixer as kernels see it: without what only its products have, and without a norm that ranks divide."""
    kind = _SHAPES[type(mixer)]
    if _divides_norm(mixer):
        mixer = dataclasses.replace(mixer, eps=None)
    shape: RecurrentShape = kind(
        **{it.name: getattr(mixer, it.name) for it in dataclasses.fields(kind)}
    )
    return shape


def recurrent_choice(
    mixer: RecurrentMixer, dtype: str, arch: GPUArch, *, trainable: bool = False
) -> Choice[RecurrentSpec]:
    """Choose the kernel of a mixer on a processor, which need not be present.

    Args:
        mixer: of a layer.
        dtype: name of the dtype of activations.
        arch: the processor.
        trainable: whether the result must be differentiable.

    Raises:
        NoKernelError: no kernel computes it; lists every reason.
    """
    return select(RecurrentProblem(recurrent_shape(mixer), dtype, trainable), arch)


class Kernel(Protocol):
    """A `RecurrentKernel`, which also computes whole sequences."""

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
        /,
    ) -> Tensor:
        """See `RecurrentKernel.__call__`."""

    def dense(self, projected: Tensor, gates: Tensor | None, /) -> Tensor:
        """Compute whole sequences, [B, L, ...], from states of zeros: [B, L, inner]; differentiable."""


class _Normalized(NamedTuple):
    """A `Kernel` with a norm of its results, which ranks divide."""

    kernel: Kernel
    norm: Callable[[Tensor], Tensor]

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
        /,
    ) -> Tensor:
        """See `Kernel.__call__`."""
        return self.norm(self.kernel(projected, gates, states, segments))

    def dense(self, projected: Tensor, gates: Tensor | None, /) -> Tensor:
        """See `Kernel.dense`."""
        return self.norm(self.kernel.dense(projected, gates))


class BoundRecurrent(NamedTuple):
    """A recurrent mixer with its products.

    Attributes:
        kernel: what is between the products.
        input: includes the layer's first norm; reads the residual stream.
        mixed: adds to the residual stream.
        gates: as `input`, of the gated delta rule; None for others, and where `input` computes them too.
        sizes: outputs of `input`, and of the gates behind them; None where it computes no gates.
    """

    kernel: Kernel
    input: Projection
    mixed: ResidualWriter
    gates: Projection | None = None
    sizes: tuple[int, int] | None = None

    @classmethod
    def bind(cls, spec: RecurrentMixer, binder: Binder) -> BoundRecurrent:
        """Bind a layer's mixer."""
        choice = recurrent_choice(
            spec, binder.model.dtype_name, binder.model.arch, trainable=binder.is_trainable
        )
        shape = recurrent_shape(spec)
        weights, divided_norm = _weights(binder.layer), None
        if _divides_norm(spec):
            communicator = binder.model.communicator
            assert communicator is not None
            divided_norm = load(choice.spec.divided_norm)(
                weights.norm, spec.eps, spec.norm_ranks, communicator
            )
            weights = weights._replace(norm=None)
        made: Kernel = load(choice.spec.targets[type(shape)])(shape, weights)
        if divided_norm is not None:
            made = _Normalized(made, divided_norm)
        if not isinstance(spec, GatedDelta):
            return cls(made, binder.reading("input"), binder.adding("mixed"))
        gates = binder.reading("gates") if binder.has("gates") else None
        sizes = spec.channels + spec.inner, 2 * spec.num_heads
        bound = cls(made, binder.reading("input"), binder.adding("mixed"), gates)
        return bound if gates is not None else bound._replace(sizes=sizes)

    @property
    def output(self) -> ResidualWriter:
        """See `BoundMixer.output`."""
        return self.mixed

    def read(self, index: int, residual: Residual, recur: Recur) -> tuple[Tensor, Residual]:
        """See `BoundMixer.read`."""
        gates = None
        if self.gates is not None:
            gates, residual = self.gates.from_residual(residual)
        projected, residual = self.input.from_residual(residual)
        if self.sizes is not None:
            start, count = self.sizes
            projected, gates = projected[..., :start], projected[..., start : start + count]
        return recur(index, self.kernel, projected, gates), residual


def _divides_norm(mixer: RecurrentMixer) -> TypeGuard[Mamba2]:
    return isinstance(mixer, Mamba2) and mixer.norm_ranks > 1


def _weights(layer: DecoderLayer) -> RecurrentWeights:
    names = {"norm": "gated_norm"}
    found: dict[str, Any] = {
        it: getattr(layer, names.get(it, it), None) for it in RecurrentWeights._fields
    }
    return RecurrentWeights(**found)


class Recur(Protocol):
    """The recurrences of the layers of a step."""

    def __call__(
        self, index: int, kernel: Kernel, projected: Tensor, gates: Tensor | None, /
    ) -> Tensor:
        """Compute what is between the products of a layer.

        Args:
            index: the layer's index.
            kernel: of the layer.
            projected: [..., N], the result of `input`; may be overwritten.
            gates: [..., 2 * H], that of `gates`, or the rows behind it in the same memory; None for a layer without it.

        Returns:
            [..., inner].
        """


class PagedStates:
    """Recurrences of one step over the states in the slots of the cache, which are replaced.

    Args:
        cache: the cache; written.
        segments: the sequences of the step.
    """

    def __init__(self, cache: KVCache, segments: Segments) -> None:
        self._states, self._segments = cache.fixed, segments

    def __call__(
        self, index: int, kernel: Kernel, projected: Tensor, gates: Tensor | None, /
    ) -> Tensor:
        """See `Recur.__call__`; [T, ...], rows as [decode rows | prompts]."""
        return kernel(projected, gates, self._states[index], self._segments)


def compute_dense(
    _index: int, kernel: Kernel, projected: Tensor, gates: Tensor | None, /
) -> Tensor:
    """Compute whole sequences, [B, L, ...], without a cache; differentiable. See `Recur`."""
    return kernel.dense(projected, gates)


def step_segments(step: StepInput) -> Segments:
    """Return the sequences of a step; those of a step with drafts with their states kept after each token."""
    bucket, arrays = step.bucket, step.device
    assert bucket.has_states, "the step has no slots"
    if bucket.queries > 1:
        assert not bucket.prompt_seqs, "no drafts beside prompts"
        return Segments(
            0,
            arrays.cu_seqlens,
            arrays.positions,
            arrays.state_slots,
            arrays.kept_slots,
            by_token=True,
        )
    return Segments(
        bucket.rows,
        arrays.prompt_cu_seqlens,
        arrays.positions,
        arrays.state_slots,
        arrays.kept_slots if bucket.prompt_seqs else None,
    )


class StateKernels(NamedTuple):
    """What the kernels of all recurrent mixers of a network have in common.

    Attributes:
        keeps: whether they write states within prompts, see `RecurrentSpec.keeps`.
        chunk: as `StateSpec.chunk`; 1 where they compute token by token.
        several_queries: whether decode rows may have drafts, see `RecurrentSpec.several_queries`.
    """

    keeps: bool
    chunk: int
    several_queries: bool


def state_kernels(network: Network, dtype: str, arch: GPUArch) -> StateKernels:
    """Return what is common to the kernels that a processor has for the layers with a state of fixed size."""
    mixers = {
        it
        for layer in network.layers
        for it in (layer.mixer.mixers if isinstance(layer.mixer, Parallel) else (layer.mixer,))
    }
    fixed = {it: state for it in mixers if (state := fixed_of(it.state(dtype))) is not None}
    keeps, chunk, several_queries = True, 1, True
    for mixer, state in fixed.items():
        row = None
        if isinstance(mixer, RecurrentMixer):
            row = recurrent_choice(mixer, dtype, arch).spec
        keeps &= row is not None and row.keeps
        several_queries &= row is not None and row.several_queries
        if row is None or not row.by_token:
            chunk = math.lcm(chunk, state.chunk)
    return StateKernels(keeps, chunk, several_queries)
