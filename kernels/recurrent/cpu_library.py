"""Recurrent mixers on a CPU, each in one call of the C library; see native/recurrent.h.

Tokens of a sequence are computed one after the other, so that a state and a result have the same bits however a prompt
is divided into steps and whatever other sequences a step has.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentProblem,
    ShortConvShape,
)
from kernels.recurrent.segments import Segments
from kernels.selection import reasons

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.recurrent.problem import RecurrentShape, RecurrentWeights

_LANES: Final = 16
_MOST_WIDTH: Final = 8
_MOST_STATE: Final = 256
_INT, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Segments(ctypes.Structure):
    _fields_ = (
        ("rows", _INT),
        ("prompts", _INT),
        ("cu_seqlens", _POINTER),
        ("slots", _POINTER),
        ("kept", _POINTER),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("state", _POINTER),
        ("slot", _INT),
        ("channels", _INT),
        ("width", _INT),
    )


class _Mixer(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.POINTER(_Segments)),
        ("x", _POINTER),
        ("stride", _INT),
        ("y", _POINTER),
        ("convolution", _Convolution),
    )


class _GatedDelta(ctypes.Structure):
    _fields_ = (
        ("mixer", _Mixer),
        ("heads", _INT),
        ("key_heads", _INT),
        ("key_dim", _INT),
        ("value_dim", _INT),
        ("eps", _DOUBLE),
        ("gates", _POINTER),
        ("gates_stride", _INT),
        ("a", _POINTER),
        ("bias", _POINTER),
        ("norm", _POINTER),
        ("state", _POINTER),
        ("slot", _INT),
    )


class _Mamba2(ctypes.Structure):
    _fields_ = (
        ("mixer", _Mixer),
        ("heads", _INT),
        ("head_dim", _INT),
        ("state_dim", _INT),
        ("groups", _INT),
        ("eps", _DOUBLE),
        ("norm_first", _INT),
        ("least", _DOUBLE),
        ("most", _DOUBLE),
        ("a", _POINTER),
        ("bias", _POINTER),
        ("d", _POINTER),
        ("norm", _POINTER),
        ("state", _POINTER),
        ("slot", _INT),
    )


def unsupported(problem: RecurrentProblem, arch: GPUArch) -> tuple[str, ...]:
    """List why the C library cannot compute a mixer on a processor; empty if it can."""
    shape, library = problem.shape, load()
    odd = next(((name, n) for name, n in _sizes(shape).items() if n % _LANES), None)
    states = {"key dim": getattr(shape, "key_dim", 0), "state": getattr(shape, "state_dim", 0)}
    wide = next(((name, n) for name, n in states.items() if n > _MOST_STATE), None)
    found = reasons(
        (not arch.is_cpu, "needs a CPU"),
        (problem.trainable, "not differentiable"),
        (problem.dtype != "float32", f"no {problem.dtype}"),
        (odd is not None, f"a {odd and odd[0]} of {odd and odd[1]} is not a multiple of {_LANES}"),
        (wide is not None, f"a {wide and wide[0]} of {wide and wide[1]}, more than {_MOST_STATE}"),
        (shape.width > _MOST_WIDTH, f"{shape.width} taps, more than {_MOST_WIDTH}"),
    )
    return found or reasons((isinstance(library, str), str(library)))


def _sizes(shape: RecurrentShape) -> dict[str, int]:
    """Return what must be a multiple of the lanes of a vector, by name."""
    if isinstance(shape, ShortConvShape):
        return {"number of channels": shape.channels}
    if isinstance(shape, GatedDeltaShape):
        return {"key dim": shape.key_dim, "value dim": shape.value_dim}
    return {
        "head dim": shape.head_dim,
        "state": shape.state_dim,
        "group": shape.inner // shape.num_groups,
    }


class _Kernel:
    """What the mixers have in common; see `kernels.recurrent.segments.RecurrentKernel`.

    Args:
        shape: `unsupported` must be empty for it.
        weights: copied as float32.
        inner: elements of the result of a token.
        state: shape of that of a sequence, beside the state of the convolution; None for none.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        weights: RecurrentWeights,
        inner: int,
        state: tuple[int, ...] | None = None,
    ) -> None:
        self._conv = weights.conv.detach().float().t().contiguous()
        self._bias = _float32(weights.conv_bias)
        self._channels, self._width, self._inner = shape.channels, shape.width, inner
        conv = shape.width - 1, shape.channels
        self._states = (conv,) if state is None else (conv, state)
        a_log = _float32(weights.a_log)
        assert state is None or a_log is not None
        self._a = None if a_log is None else a_log.exp()
        self._dt_bias, self._d = _float32(weights.dt_bias), _float32(weights.d)
        self._norm = _float32(weights.norm)

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
        /,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        assert projected.dtype is torch.float32
        assert projected.stride(-1) == 1
        assert all(not len(it) or it[0].is_contiguous() for it in states)
        cu_seqlens, slots = segments.cu_seqlens.contiguous(), segments.slots.contiguous()
        kept = None if segments.kept_slots is None else segments.kept_slots.contiguous()
        of_step = _Segments(
            segments.rows, segments.num_prompts, *map(_address, (cu_seqlens, slots, kept))
        )
        out = projected.new_empty(len(projected), self._inner)
        convolution = _Convolution(
            *map(_address, (self._conv, self._bias, states[0])),
            states[0].stride(0),
            self._channels,
            self._width,
        )
        mixer = _Mixer(
            ctypes.pointer(of_step),
            projected.data_ptr(),
            projected.stride(0),
            out.data_ptr(),
            convolution,
        )
        self._compute(mixer, gates, states)
        return out

    def _compute(self, mixer: _Mixer, gates: Tensor | None, states: tuple[Tensor, ...]) -> None:
        """Call the library's function."""
        raise NotImplementedError

    def dense(self, projected: Tensor, gates: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [B, L, ...], from states of zeros: [B, L, inner]; not differentiable."""
        count, length = projected.shape[:2]
        ends = length * torch.arange(count + 1, dtype=torch.int32)
        slots = torch.full((count, 2), -1, dtype=torch.int32)
        segments = Segments(0, ends, torch.arange(length).repeat(count), slots)
        states = tuple(projected.new_empty(0, *shape) for shape in self._states)
        flat = None if gates is None else gates.flatten(0, 1)
        out = self(projected.flatten(0, 1).clone(), flat, states, segments)
        return out.view(count, length, out.shape[-1])


class ShortConv(_Kernel):
    """The gated short convolution."""

    def __init__(self, shape: ShortConvShape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights, shape.channels)

    def _compute(self, mixer: _Mixer, _gates: Tensor | None, _states: tuple[Tensor, ...]) -> None:
        workers.call("tessera_short_conv", mixer)


class GatedDelta(_Kernel):
    """The gated delta rule."""

    def __init__(self, shape: GatedDeltaShape, weights: RecurrentWeights) -> None:
        state = shape.num_heads, shape.key_dim, shape.value_dim
        super().__init__(shape, weights, shape.inner, state)
        self._sizes = shape.num_heads, shape.num_key_heads, *state[1:], shape.eps

    def _compute(self, mixer: _Mixer, gates: Tensor | None, states: tuple[Tensor, ...]) -> None:
        _, state = states
        assert gates is not None
        assert gates.dtype is torch.float32
        assert gates.stride(-1) == 1
        of_gates = gates.data_ptr(), gates.stride(0)
        pointers = map(_address, (self._a, self._dt_bias, self._norm, state))
        structure = _GatedDelta(mixer, *self._sizes, *of_gates, *pointers, state.stride(0))
        workers.call("tessera_gated_delta", structure)


class Mamba2(_Kernel):
    """Mamba-2."""

    def __init__(self, shape: Mamba2Shape, weights: RecurrentWeights) -> None:
        state = shape.num_heads, shape.head_dim, shape.state_dim
        super().__init__(shape, weights, shape.inner, state)
        if shape.eps is None:
            self._norm = None
        norm = shape.eps or 0.0, shape.norm_before_gate
        self._sizes = *state, shape.num_groups, *norm, *shape.dt_limits

    def _compute(self, mixer: _Mixer, _gates: Tensor | None, states: tuple[Tensor, ...]) -> None:
        _, state = states
        pointers = map(_address, (self._a, self._dt_bias, self._d, self._norm, state))
        structure = _Mamba2(mixer, *self._sizes, *pointers, state.stride(0))
        workers.call("tessera_mamba2", structure)


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
