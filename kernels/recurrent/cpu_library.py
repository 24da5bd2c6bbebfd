"""Recurrent mixers on a CPU, each in one call of the C library; see native/recurrent.h.

Tokens of a sequence are computed one after the other, so that a state and a result have the same bits however a prompt
is divided into steps and whatever other sequences a step has.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

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
    """

    def __init__(self, shape: RecurrentShape, weights: RecurrentWeights) -> None:
        self._conv = weights.conv.detach().float().t().contiguous()
        self._bias = _float32(weights.conv_bias)
        self._channels, self._width = shape.channels, shape.width
        self._states: tuple[tuple[int, ...], ...] = ((shape.width - 1, shape.channels),)

    def _mixer(
        self, projected: Tensor, state: Tensor, segments: Segments, inner: int
    ) -> tuple[_Mixer, Tensor, tuple[Any, ...]]:
        """Return the structure of a step, its result [T, inner], and what must live as long as the structure."""
        assert projected.dtype is torch.float32
        assert projected.stride(-1) == 1
        assert not len(state) or state[0].is_contiguous()
        cu_seqlens, slots = segments.cu_seqlens.contiguous(), segments.slots.contiguous()
        kept = None if segments.kept_slots is None else segments.kept_slots.contiguous()
        of_step = _Segments(
            segments.rows, segments.num_prompts, *map(_address, (cu_seqlens, slots, kept))
        )
        out = projected.new_empty(len(projected), inner)
        convolution = _Convolution(
            self._conv.data_ptr(),
            _address(self._bias),
            state.data_ptr(),
            state.stride(0),
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
        return mixer, out, (cu_seqlens, slots, kept, of_step)

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
        /,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
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
        super().__init__(shape, weights)

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, channels]; see `RecurrentKernel`."""
        mixer, out, _held = self._mixer(projected, states[0], segments, self._channels)
        workers.call("tessera_short_conv", mixer)
        return out


class GatedDelta(_Kernel):
    """The gated delta rule."""

    def __init__(self, shape: GatedDeltaShape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights)
        assert weights.a_log is not None
        self._shape = shape
        self._a = weights.a_log.detach().float().exp().contiguous()
        self._dt_bias, self._norm = _float32(weights.dt_bias), _float32(weights.norm)
        self._states += ((shape.num_heads, shape.key_dim, shape.value_dim),)

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        it, (conv, state) = self._shape, states
        assert gates is not None
        assert gates.dtype is torch.float32
        assert gates.stride(-1) == 1
        assert not len(state) or state[0].is_contiguous()
        mixer, out, _held = self._mixer(projected, conv, segments, it.inner)
        structure = _GatedDelta(
            mixer,
            it.num_heads,
            it.num_key_heads,
            it.key_dim,
            it.value_dim,
            it.eps,
            gates.data_ptr(),
            gates.stride(0),
            *map(_address, (self._a, self._dt_bias, self._norm, state)),
            state.stride(0),
        )
        workers.call("tessera_gated_delta", structure)
        return out


class Mamba2(_Kernel):
    """Mamba-2."""

    def __init__(self, shape: Mamba2Shape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights)
        assert weights.a_log is not None
        self._shape = shape
        self._a = weights.a_log.detach().float().exp().contiguous()
        self._dt_bias, self._d = _float32(weights.dt_bias), _float32(weights.d)
        self._norm = None if shape.eps is None else _float32(weights.norm)
        self._states += ((shape.num_heads, shape.head_dim, shape.state_dim),)

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        it, (conv, state) = self._shape, states
        assert not len(state) or state[0].is_contiguous()
        mixer, out, _held = self._mixer(projected, conv, segments, it.inner)
        structure = _Mamba2(
            mixer,
            it.num_heads,
            it.head_dim,
            it.state_dim,
            it.num_groups,
            it.eps or 0.0,
            it.norm_before_gate,
            *it.dt_limits,
            *map(_address, (self._a, self._dt_bias, self._d, self._norm, state)),
            state.stride(0),
        )
        workers.call("tessera_mamba2", structure)
        return out


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
