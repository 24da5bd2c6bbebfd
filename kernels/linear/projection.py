"""Binds the projections of a decoder layer, `kernels.linear.residual.Projection`, to the kernels that compute them.

The selected kernel computes (absorbs) some of the surrounding operations in its own launch, see
`kernels.linear.registry`; the others are separate launches. Inputs of weights that have an order are gathered in
it before the product: no product reads an order.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from kernels.gpu.dependent_launch import may_depend
from kernels.linear.around import (
    Vectors,
    activate,
    activate_on_gpu,
    add_and_normalize,
    multiply_by_sigmoid_on_gpu,
    normalize,
    normalized_part,
)
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import REGISTRY
from kernels.linear.residual import Add, Projection, Residual, ResidualWriter, add_both, settled
from kernels.linear.select import LinearChoice, select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import (
    PRODUCT_ONLY,
    SWIGLU,
    Activation,
    LayerNorm,
    LinearArguments,
    LinearWeights,
    Norm,
    Operations,
)
from kernels.norms import cpu_library, pytorch
from kernels.norms import registry as norms
from kernels.sampling.tokens import argmax_tokens
from kernels.selection import VectorProblem, load, select_vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch

__all__ = [
    "SWIGLU", "Activation", "FixedProjection", "FusedProjection", "LayerNorm", "LinearWeights", "Norm", "Operations",
    "Projection", "Purpose", "Residual", "ResidualWriter", "add_both", "bind_norm", "bind_output_gate",
    "bind_projection", "linear_problem", "settled",
]  # fmt: skip


class Purpose(enum.Enum):
    """What a projection is bound for, which decides what its results must satisfy."""

    TRAINING = "training"
    """They are differentiable, and the weights may change."""
    SERVING = "serving"
    DETERMINISTIC_SERVING = "deterministic serving"
    """The result of a row has the same bits whatever the other rows and their number."""


class FusedProduct(Protocol):
    """A product for any number of rows with the operations around it; float32 on a CPU."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product alone, [..., C] to [..., N]."""

    def read(self, hidden: Tensor) -> Tensor:
        """Compute what `Projection.from_residual` returns of a residual stream, [..., C]."""

    def add(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Compute what `Projection.to_residual` returns of x, [..., C], and a residual stream, maybe in place."""

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the matrix, [M] int64, as numbers, [M, C]."""


def bind_projection(
    weights: LinearWeights,
    dtype: torch.dtype,
    arch: GPUArch,
    operations: Operations = PRODUCT_ONLY,
    *,
    layer_weights: int = 0,
    purpose: Purpose = Purpose.SERVING,
    rounds_inputs: bool = False,
    in_place: bool = False,
) -> Projection:
    """Bind a linear layer to its weights and to the kernels that can compute it.

    Args:
        weights: must not be replaced; each call reads them, unless the projection copies them.
        dtype: of inputs and outputs.
        arch: processor of the weights' device.
        operations: around the product.
        layer_weights: as in `LinearProblem`.
        purpose: what is demanded of the results.
        rounds_inputs: as in `LinearProblem`.
        in_place: as in `LinearProblem`.

    Raises:
        NoKernelError: no kernel supports a batch-invariant layer.
    """
    problem = linear_problem(
        weights,
        operations,
        dtype,
        layer_weights=layer_weights,
        purpose=purpose,
        rounds_inputs=rounds_inputs,
        in_place=in_place,
    )
    order, weights = weights.weight.order, _in_stored_order(weights)
    spec = select_linear(problem, arch).spec
    if spec.any_rows and spec.absorbs_norm and order is None:
        return FusedProjection(load(spec.target)(weights, problem, operations), operations)
    if spec.any_rows:
        product = _gathering(load(spec.target)(weights, problem), order)
        vectors = _vectors(VectorProblem(problem.dtype, problem.trainable), arch)
        return FixedProjection(
            product, operations, copies_weights=spec.copies_weights, vectors=vectors or pytorch
        )
    return _RowProjection(weights, problem, operations, arch, order)


def linear_problem(
    weights: LinearWeights,
    operations: Operations,
    dtype: torch.dtype,
    *,
    layer_weights: int = 0,
    purpose: Purpose = Purpose.SERVING,
    rounds_inputs: bool = False,
    in_place: bool = False,
) -> LinearProblem:
    """Return the problem of a linear layer with one row; arguments as for `bind_projection`, on any device."""
    stacked, inputs = weights.weight.shape
    gated = operations.activation == SWIGLU
    form = weights.weight.format
    return LinearProblem(
        rows=1,
        outputs=stacked // 2 if gated else stacked,
        inputs=inputs,
        dtype=str(dtype).removeprefix("torch."),
        gated=gated,
        format=dataclasses.replace(form, ordered=False),
        bias=weights.bias is not None,
        residual=operations.residual and operations.post_norm is None,
        layer_weights=layer_weights,
        trainable=purpose is Purpose.TRAINING,
        batch_invariant=purpose is Purpose.DETERMINISTIC_SERVING,
        ordered=form.ordered,
        rounds_inputs=rounds_inputs,
        in_place=in_place,
    )


def _in_stored_order(weights: LinearWeights) -> LinearWeights:
    return weights._replace(weight=weights.weight.in_stored_order())


def _gathering(product: Callable[..., Tensor], order: Tensor | None) -> Callable[..., Tensor]:
    """Return a product of inputs [..., C] that are put in an order, [C], first; None for their own."""
    if order is None:
        return product
    return lambda x, *arguments: product(x.index_select(-1, order), *arguments)


_VECTORS: Final[dict[str, Vectors]] = {
    norms.CPU_LIBRARY.name: cpu_library,
    norms.PYTORCH.name: pytorch,
}


def _vectors(problem: VectorProblem, arch: GPUArch) -> Vectors | None:
    """Return the functions of norms and activations that are no Triton kernels; None where they are."""
    return _VECTORS.get(select_vector(norms.REGISTRY, problem, arch).spec.name)


def bind_norm(
    norm: Norm | LayerNorm, problem: VectorProblem, arch: GPUArch
) -> Callable[[Residual], Tensor]:
    """Bind the norm after the last layer, a function from the residual stream with its partial sums to [..., C].

    Args:
        norm: the norm.
        problem: dtype of the residual stream, and whether the norm must be differentiable.
        arch: processor of the norm's device.
    """
    vectors = _vectors(problem, arch)
    if vectors is not None:
        return lambda residual: normalize(norm, residual.hidden, vectors)
    pdl = may_depend(arch, norm.weight.device)
    return functools.partial(_add_and_normalize, norm, pdl=pdl)


def bind_output_gate(
    problem: VectorProblem, arch: GPUArch, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Bind the product of attention's result and the sigmoid of its gate.

    Args:
        problem: dtype of both, and whether the product must be differentiable.
        arch: processor of the device.
        device: of both.

    Returns:
        A function of two tensors, [T, F], maybe of any more dimensions if PyTorch computes it, which may write the
        first one.
    """
    vectors = _vectors(problem, arch)
    if vectors is not None:
        return vectors.multiply_by_sigmoid
    return functools.partial(multiply_by_sigmoid_on_gpu, pdl=may_depend(arch, device))


class FixedProjection:
    """A projection by one product for any number of rows; norms, activation and residual by separate functions.

    Differentiable if the product and the functions are.

    Args:
        multiply: the product, from [..., C] to [..., N].
        operations: around the product.
        copies_weights: as in `Projection`.
        vectors: functions of the norms and the activation.
    """

    row_counts: tuple[int, ...] = ()

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        operations: Operations = PRODUCT_ONLY,
        *,
        copies_weights: bool,
        vectors: Vectors = pytorch,
    ) -> None:
        self.copies_weights, self._vectors = copies_weights, vectors
        self._multiply = multiply
        self._operations = operations

    def adapted(self, add: Add) -> FixedProjection:
        """See `Projection.adapted`."""
        multiply = self._multiply
        return FixedProjection(
            lambda x: add(x)(multiply(x)),
            self._operations,
            copies_weights=self.copies_weights,
            vectors=self._vectors,
        )

    def from_residual(self, residual: Residual) -> tuple[Tensor, Residual]:
        """See `Projection.from_residual`."""
        norm, activation = self._operations[:2]
        x = normalize(norm, residual.hidden, self._vectors)
        return activate(activation, self._multiply(x), self._vectors), residual

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        """See `Projection.to_residual`."""
        y = self._multiply(x)
        if self._operations.post_norm is not None:
            y = normalize(self._operations.post_norm, y, self._vectors)
        return Residual(residual.hidden + y)

    def partials(self, x: Tensor) -> Tensor:
        """See `Projection.partials`."""
        return self._multiply(x)[None]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Projection.__call__`."""
        y = self._multiply(x)
        return y if out is None else out.copy_(y)

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """See `Projection.argmax`."""
        return argmax_tokens(self(x, out), checked=tokens, logprobs=logprobs)[0]

    def prefetches(self, _rows: int, /) -> bool:
        """See `Projection.prefetches`."""
        return False


class FusedProjection(FixedProjection):
    """A projection by a product for any number of rows, which computes the operations around it too.

    Args:
        product: bound to the operations.
        operations: those, for a product with adapters, which computes none of them.

    Attributes:
        product: see above.
    """

    def __init__(self, product: FusedProduct, operations: Operations) -> None:
        super().__init__(product, operations, copies_weights=True, vectors=cpu_library)
        self.product = product

    def from_residual(self, residual: Residual) -> tuple[Tensor, Residual]:
        """See `Projection.from_residual`."""
        return self.product.read(residual.hidden), residual

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        """See `Projection.to_residual`."""
        return Residual(self.product.add(x, residual.hidden))


class _RowProjection:
    """On a GPU: a product for each number of rows; Triton kernels compute the norms and activations around it."""

    copies_weights = False

    def __init__(
        self,
        weights: LinearWeights,
        problem: LinearProblem,
        operations: Operations,
        arch: GPUArch,
        order: Tensor | None,
    ) -> None:
        self._weights, self._problem, self._arch, self._order = weights, problem, arch, order
        self._norm, self._activation, _, self._post_norm = operations
        self._pdl = may_depend(arch, weights.weight.numbers.device)
        self._products: dict[str, Callable[..., Tensor]] = {}
        self._chosen: dict[int, tuple[LinearChoice, Callable[..., Tensor]]] = {}

    def adapted(self, add: Add) -> Projection:
        problem, operations = self._problem, Operations(self._norm, self._activation)
        plain = dataclasses.replace(
            problem, outputs=problem.matrices * problem.outputs, gated=False, residual=False
        )
        product = _RowProjection(self._weights, plain, PRODUCT_ONLY, self._arch, self._order)
        operations = operations._replace(post_norm=self._post_norm)
        return _AdaptedRowProjection(product, self, operations, add, pdl=self._pdl)

    def from_residual(self, residual: Residual) -> tuple[Tensor, Residual]:
        hidden, norm, absorbed = residual.hidden, self._norm, None
        choice, product = self._choose(len(hidden))
        absorbs = choice.spec.absorbs_norm and self._order is None
        if residual.partials is None and absorbs and isinstance(norm, Norm):
            absorbed = norm
        else:
            hidden = add_and_normalize(norm, *residual, pdl=self._pdl)
        y = product(hidden, choice, None, LinearArguments(norm=absorbed, pdl=self._pdl))
        absorbs_activation = self._problem.gated and choice.spec.absorbs_gate
        if self._activation is not None and not absorbs_activation:
            y = activate_on_gpu(self._activation, y, pdl=self._pdl)
        return y, Residual(residual.hidden)

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        hidden = residual.hidden
        assert residual.partials is None, "`from_residual` comes first, and adds them"
        if self._post_norm is not None:
            return Residual(hidden, normalized_part(self._post_norm, self(x), pdl=self._pdl))
        choice, product = self._choose(len(x))
        if choice.spec.leaves_partials:
            return Residual(hidden, product(x, choice, None, LinearArguments(pdl=self._pdl)))
        assert choice.spec.absorbs_residual, choice.spec.name
        arguments = LinearArguments(residual=hidden, pdl=self._pdl)
        return Residual(product(x, choice, hidden, arguments))

    def partials(self, x: Tensor) -> Tensor:
        choice, product = self._choose(len(x))
        parts = product(x, choice, None, LinearArguments(pdl=self._pdl))
        return parts if self._problem.residual and choice.spec.leaves_partials else parts[None]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        choice, product = self._choose(len(x))
        return product(x, choice, out, LinearArguments(pdl=self._pdl))

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        choice, product = self._choose(len(x))
        if not choice.tiles:
            return argmax_tokens(self(x, out), checked=tokens, logprobs=logprobs)[0]
        from kernels.sampling.gpu.best_token import best_tokens  # noqa: PLC0415 - as above
        from kernels.sampling.tile_best import TileBest  # noqa: PLC0415 - of the head only

        best = TileBest.empty(len(x), choice.tiles, x.device)
        ids = torch.empty_like(tokens)
        product(x, choice, out, LinearArguments(best=best, pdl=self._pdl))
        best_tokens(best, ids, tokens, logprobs, pdl=self._pdl)
        return ids

    def prefetches(self, rows: int, /) -> bool:
        return self._choose(rows)[0].spec.prefetches

    @property
    def row_counts(self) -> tuple[int, ...]:
        counts = sorted({rows for spec in REGISTRY for rows in spec.row_counts})
        chosen = {rows: self._choose(rows)[0].spec for rows in counts}
        own = {rows for rows, spec in chosen.items() if rows in spec.row_counts}
        # A kernel for any number of rows may have launches of its own around it, although another one has most rows.
        most = chosen[counts[-1]].name
        others = {it.name: rows for rows, it in reversed(chosen.items()) if not it.row_counts}
        return tuple(sorted(own.union(rows for name, rows in others.items() if name != most)))

    def _choose(self, rows: int) -> tuple[LinearChoice, Callable[..., Tensor]]:
        """Choose the product for `rows` rows; cached for each number."""
        found = self._chosen.get(rows)
        if found is None:
            problem = dataclasses.replace(self._problem, rows=rows)
            choice = select_linear(problem, self._arch, tuned_linear)
            name = choice.spec.name
            if name not in self._products:
                product = load(choice.spec.target)(self._weights, problem)
                self._products[name] = _gathering(product, self._order)
            found = self._chosen[rows] = choice, self._products[name]
        return found


class _AdaptedRowProjection:
    """On a GPU: a projection with adapters, whose product and the operations around it are separate launches.

    Args:
        product: without operations.
        writer: adds the product to the residual stream.
        operations: around the product.
        add: what adapters add to it.
        pdl: use programmatic dependent launch.
    """

    copies_weights = False

    def __init__(
        self,
        product: _RowProjection,
        writer: _RowProjection,
        operations: Operations,
        add: Add,
        *,
        pdl: bool,
    ) -> None:
        self._product, self._writer = product, writer
        self._operations, self._add, self._pdl = operations, add, pdl

    def adapted(self, add: Add) -> Projection:
        first = self._add

        def both(x: Tensor, *, pdl: bool = False) -> Callable[[Tensor], Tensor]:
            one, two = first(x, pdl=pdl), add(x, pdl=pdl)
            return lambda y: two(one(y))

        return _AdaptedRowProjection(
            self._product, self._writer, self._operations, both, pdl=self._pdl
        )

    def from_residual(self, residual: Residual) -> tuple[Tensor, Residual]:
        norm, activation = self._operations[:2]
        y = self(add_and_normalize(norm, *residual, pdl=self._pdl))
        if activation is not None:
            y = activate_on_gpu(activation, y, pdl=self._pdl)
        return y, Residual(residual.hidden)

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        assert residual.partials is None, "`from_residual` comes first, and adds them"
        post_norm = self._operations.post_norm
        if post_norm is not None:
            part = normalized_part(post_norm, self(x), pdl=self._pdl)
            return Residual(residual.hidden, part)
        finish = self._add(x, pdl=self._pdl)
        added = self._writer.to_residual(x, residual)
        finish(added.hidden)
        return added

    def partials(self, x: Tensor) -> Tensor:
        return self(x)[None]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        finish = self._add(x, pdl=self._pdl)
        return finish(self._product(x, out))

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        return argmax_tokens(self(x, out), checked=tokens, logprobs=logprobs)[0]

    def prefetches(self, rows: int, /) -> bool:
        return self._writer.prefetches(rows)

    @property
    def row_counts(self) -> tuple[int, ...]:
        return self._product.row_counts


def _add_and_normalize(norm: Norm | LayerNorm, residual: Residual, *, pdl: bool) -> Tensor:
    return add_and_normalize(norm, *residual, pdl=pdl)
