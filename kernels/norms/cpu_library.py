"""Norms and activations on a CPU, in one call of the C library each; see native/rows.h.

A row has the same bits wherever it is computed: beside any other rows, and in a product that includes the operation.
PyTorch's functions have others at the ends of what a thread computes. Vectors whose size is no multiple of 16 are
left to PyTorch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.norms import pytorch
from kernels.selection import reasons

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.norms.pytorch import ActivationName
    from kernels.selection import VectorProblem

_LANES: Final = 16
_RMS_NORM, _LAYER_NORM, _SILU_GATE, _GELU_GATE, _GELU, _MULTIPLY_SIGMOID = range(6)
_ACTIVATIONS: Final[dict[tuple[ActivationName, bool], int]] = {
    ("silu", True): _SILU_GATE,
    ("gelu_tanh", True): _GELU_GATE,
    ("gelu_tanh", False): _GELU,
}
"""By function and whether it gates. ReLU and its square are exact in PyTorch."""


class _Rows(ctypes.Structure):
    """`Rows` of native/rows.h."""

    _fields_ = (
        ("operation", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("other", ctypes.c_void_p),
        ("other_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_double),
    )


def unsupported(problem: VectorProblem, arch: GPUArch) -> tuple[str, ...]:
    """List why the C library cannot compute operations on vectors; empty if it can."""
    found = reasons(
        (not arch.is_cpu, "needs a CPU"),
        (problem.trainable, "not differentiable"),
        (problem.dtype != "float32", f"no {problem.dtype}"),
    )
    library = load() if not found else ""
    return found or reasons((isinstance(library, str), str(library)))


def is_exact(function: str, size: int, *, gated: bool) -> bool:
    """Return whether an activation has the same bits for a row beside any others.

    Args:
        function: an `ActivationName`, or another one, which is not.
        size: of the result's vectors.
        gated: whether it gates.
    """
    if function in ("relu", "relu2"):
        return True
    return size % _LANES == 0 and (function, gated) in _ACTIVATIONS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `kernels.norms.pytorch.rms_norm` of float32 vectors, [..., C]."""
    if x.shape[-1] % _LANES:
        return pytorch.rms_norm(x, weight, eps)
    return _compute(_RMS_NORM, x, weight=weight.float(), eps=eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute `kernels.norms.pytorch.layer_norm` of float32 vectors, [..., C]."""
    if x.shape[-1] % _LANES:
        return pytorch.layer_norm(x, weight, bias, eps)
    return _compute(_LAYER_NORM, x, weight=weight.float(), bias=bias.float(), eps=eps)


def activate(x: Tensor, function: ActivationName, *, gated: bool) -> Tensor:
    """Compute `kernels.norms.pytorch.activate` of float32 vectors, [..., F] or, gated, [..., 2 * F]."""
    size = x.shape[-1] // (1 + gated)
    operation = _ACTIVATIONS.get((function, gated))
    if operation is None or size % _LANES:
        return pytorch.activate(x, function, gated=gated)
    if not gated:
        return _compute(operation, x)
    return _compute(operation, x[..., :size], x[..., size:])


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by the sigmoid of its gate, both [..., F] float32."""
    if x.shape[-1] % _LANES:
        return pytorch.multiply_by_sigmoid(x, gate)
    return _compute(_MULTIPLY_SIGMOID, x, gate)


def _compute(
    operation: int,
    x: Tensor,
    other: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    assert x.dtype is torch.float32
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=torch.float32)
    rows, others = _as_rows(x), None if other is None else _as_rows(other)
    vectors = [None if it is None else it.contiguous() for it in (weight, bias)]
    arguments = _Rows(
        operation,
        len(rows),
        columns,
        rows.data_ptr(),
        rows.stride(0),
        None if others is None else others.data_ptr(),
        0 if others is None else others.stride(0),
        y.data_ptr(),
        *(None if it is None else it.data_ptr() for it in vectors),
        eps,
    )
    workers.call("tessera_rows_of", arguments)
    return y


def _as_rows(x: Tensor) -> Tensor:
    """Return x, [..., C], as [rows, C] whose rows are contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
