"""Linear layers on a CPU with weights of 8 or 4 bits, which the C library multiplies with their norm and activation.

Activations are rounded to 8 bits in groups, as in the library's steps (`kernels.cpu.decoder`). The bits of a row
depend on nothing but the row.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.cpu.matrix import CMatrix, PackedMatrix
from kernels.linear.weights import SWIGLU, Activation, LayerNorm, Norm, Operations
from kernels.norms import cpu_library as norms
from kernels.selection import reasons
from kernels.weight_format import LIBRARY_GROUP, NARROW_GROUP, is_read_by_library

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.weights import LinearWeights

_GEGLU: Final = Activation("gelu_tanh", gated=True)
_GELU: Final = Activation("gelu_tanh", gated=False)
_STORE, _ADD = 0, 1
_RESULTS: Final = {SWIGLU: 2, _GEGLU: 3, _GELU: 4}
"""`enum Result` of native/products.h for what the library computes after a product."""
_TILE: Final = 16


class _Linear(ctypes.Structure):
    """`Linear` of native/linear.h."""

    _fields_ = (
        ("matrix", ctypes.POINTER(CMatrix)),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("post_norm", ctypes.c_void_p),
        ("post_eps", ctypes.c_double),
    )


def unsupported(problem: LinearProblem) -> tuple[str, ...]:
    """List why the C library cannot multiply by the weights of a problem here; empty if it can."""
    library, form = load(), problem.format
    group = _smallest_group(problem)
    return reasons(
        (isinstance(library, str), str(library)),
        (problem.dtype != "float32", f"no {problem.dtype}"),
        (
            not is_read_by_library(form),
            f"no weights in {form.name}: set --quantization int8 or int4 to round them",
        ),
        (
            problem.inputs % group != 0,
            f"{problem.inputs} inputs are not a multiple of {group}",
        ),
    )


def _smallest_group(problem: LinearProblem) -> int:
    """Return of how many inputs the number of inputs must be a multiple."""
    form = problem.format
    is_narrow = form.scales != "row" and (form.group & -form.group) < LIBRARY_GROUP
    return NARROW_GROUP if is_narrow else LIBRARY_GROUP


class CPULibraryLinear:
    """Multiplies by a packed copy of the weights, with the operations around the product.

    Args:
        weights: of 8 or 4 bits.
        problem: of the layer; `unsupported` must be empty for it.
        operations: around the product.

    Attributes:
        matrix: the packed weights.
    """

    def __init__(
        self,
        weights: LinearWeights,
        problem: LinearProblem,
        operations: Operations = Operations(),  # noqa: B008 - immutable
    ) -> None:
        library = load()
        assert not isinstance(library, str), library
        weight, bias = weights
        self._norm, self._activation, _, self._post_norm = operations
        gated = self._activation in (SWIGLU, _GEGLU) and weight.shape[0] % (2 * _TILE) == 0
        form = problem.format
        self.matrix = PackedMatrix(library, weight, form, bias, gated=gated)
        self._outputs = weight.shape[0]
        self._inputs = weight.shape[1]
        self._is_gated = gated
        self._result, self._activates = _STORE, self._activation
        if self._activation is not None and (gated or self._activation == _GELU):
            self._result, self._activates = _RESULTS[self._activation], None
        vectors = [it.detach().float().contiguous() for it in _vectors(self._norm)]
        self._held = vectors
        self._normed = tuple(it.data_ptr() for it in vectors)
        self._eps = 0.0 if self._norm is None else self._norm.eps
        self._post = None
        if self._post_norm is not None and self._outputs % _TILE == 0:
            self._post = self._post_norm.weight.detach().float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product alone, [..., C] to [..., N]."""
        y = self._multiply(x, _STORE, self._outputs)
        if not self._is_gated:
            return y
        tiles = y.view(*y.shape[:-1], self._outputs // (2 * _TILE), 2, _TILE)
        return tiles.transpose(-3, -2).flatten(-3)

    def read(self, hidden: Tensor) -> Tensor:
        """Compute activation(norm(hidden) W^T + bias), [..., C] to [..., N] or, with a gate, [..., N / 2]."""
        outputs = self._outputs // 2 if self._is_gated else self._outputs
        y = self._multiply(hidden, self._result, outputs, self._normed)
        if self._activates is None:
            return y
        return norms.activate(y, self._activates.function, gated=self._activates.gated)

    def add(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Add norm(x W^T + bias), with or without that norm, to hidden, [..., N], in place if it is contiguous."""
        if self._post_norm is not None and self._post is None:
            return hidden + norms.rms_norm(self(x), self._post_norm.weight, self._post_norm.eps)
        hidden = hidden.contiguous()
        self._run(x, hidden, _ADD, (), self._post)
        return hidden

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the matrix, [M] int64, as numbers, [M, C]; not of gate and up."""
        assert not self._is_gated
        return self.matrix.rows(index)

    def _multiply(self, x: Tensor, result: int, outputs: int, norm: tuple[int, ...] = ()) -> Tensor:
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
        self._run(x, y, result, norm)
        return y

    def _run(
        self,
        x: Tensor,
        y: Tensor,
        result: int,
        norm: tuple[int, ...],
        post_norm: Tensor | None = None,
    ) -> None:
        assert x.dtype is y.dtype is torch.float32
        x = x.contiguous()
        norm_weight, norm_bias = (*norm, None, None)[:2]
        linear = _Linear(
            ctypes.pointer(self.matrix.c),
            x.data_ptr(),
            y.data_ptr(),
            x.numel() // self._inputs,
            result,
            norm_weight,
            norm_bias,
            self._eps,
            None if post_norm is None else post_norm.data_ptr(),
            0.0 if self._post_norm is None else self._post_norm.eps,
        )
        workers.call("tessera_linear", linear)


def _vectors(norm: Norm | LayerNorm | None) -> tuple[Tensor, ...]:
    if norm is None:
        return ()
    return (norm.weight, norm.bias) if isinstance(norm, LayerNorm) else (norm.weight,)
