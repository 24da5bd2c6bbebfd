"""The gated delta rule in Triton: one launch for decode rows, three for those with drafts and three for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.arch import HOPPER, TENSOR_MEMORY, detect
from kernels.recurrent.gpu.gated_delta_blocks import solve_blocks
from kernels.recurrent.gpu.gated_delta_carry import carry_states, gated_norm
from kernels.recurrent.gpu.gated_delta_drafts import apply_rule_to_drafts, normalize_drafts
from kernels.recurrent.gpu.gated_delta_hopper import carry_in_flight
from kernels.recurrent.gpu.gated_delta_step import gated_delta_step
from kernels.recurrent.gpu.row_convolution import causal_conv_of_drafts
from kernels.recurrent.gpu.tiles import sequences
from kernels.recurrent.problem import CHUNK
from kernels.recurrent.pytorch import gated_delta as pytorch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import GatedDeltaShape, RecurrentWeights
    from kernels.recurrent.segments import Segments

_MOST_ROWS: Final = 1024
"""Of a launch for decode rows."""
_TILE: Final = 4096
"""Elements of the state that a program of a decode row computes at a time, while it loads as many."""
_THREAD_TILE: Final = 32
"""Of these, in the registers of a thread."""
_SLICE: Final = 64
"""Values that a program carries through a prompt: rows of a warpgroup's smallest product; half as many elsewhere."""
_PART: Final = 128
"""Values that are computed at once in a block."""
_VECTORS: Final = 4096
"""Elements that a program normalizes."""
_MOST_KEYS: Final = 128
"""Elements of a key above which a program needs more warps."""
_MOST_STAGES: Final = 3
_RESULTS: Final = 16384
"""Bytes of shared memory beside the stages of `carry_in_flight`."""
_REGISTERS: Final = 168
"""Of a thread of `solve_blocks` on Hopper, the most with which three programs fit."""
_LEVELS: Final = CHUNK.bit_length() - 1


class GatedDelta(pytorch.GatedDelta):
    """See `kernels.recurrent.segments.RecurrentKernel`. PyTorch computes whole sequences.

    Bits of a token depend on its sequence alone: programs of decode rows share nothing but a count, and a prompt's
    blocks and the sizes of tiles do not depend on the other sequences. Launches of one object must not run at the same
    time.

    Args:
        shape: of the mixer.
        weights: on the device.
    """

    def __init__(self, shape: GatedDeltaShape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights)
        conv = weights.conv.t().contiguous()
        has_bias = weights.conv_bias is not None
        bias = weights.conv_bias if has_bias else conv
        self._arguments = conv, bias, self._a_log, self._dt_bias
        self._arch = detect(conv.device)
        # Not made at a call, which may be recorded: it must hold zeros before the first replay.
        counters = _MOST_ROWS * shape.num_key_heads if shape.num_heads > shape.num_key_heads else 1
        self._arrivals = torch.zeros(counters, dtype=torch.int32, device=conv.device)
        self._sizes = {
            "H": shape.num_heads,
            "G": shape.num_key_heads,
            "DK": shape.key_dim,
            "DV": shape.value_dim,
            "W": shape.width,
            "BK": max(16, triton.next_power_of_2(shape.key_dim)),
        }
        values = max(16, triton.next_power_of_2(shape.value_dim))
        self._from_shared = not self._arch.unsupported(HOPPER | TENSOR_MEMORY)
        self._is_wide = self._sizes["BK"] > _MOST_KEYS
        self._slice = min(values, _SLICE if self._from_shared else _SLICE // 2)
        self._padded = {"BV": values}
        self._has_bias = {"BIAS": has_bias}
        keys = self._sizes["BK"]
        part = min(triton.next_power_of_2(shape.value_dim), max(1, _TILE // keys))
        self._parts = {
            "BV": part,
            "PARTS": int(triton.next_power_of_2(triton.cdiv(shape.value_dim, part))),
            "num_warps": max(1, min(8, keys * part // _THREAD_TILE // 32)),
        }

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        assert gates is not None
        out = torch.empty(
            (len(projected), self.shape.inner), dtype=projected.dtype, device=projected.device
        )
        if segments.by_token:
            self._drafts(projected, gates, states, segments, out)
            return out
        rows = segments.rows
        for first in range(0, rows, _MOST_ROWS):
            some = slice(first, min(first + _MOST_ROWS, rows))
            self._step(projected[some], gates[some], states, segments.slots[some], out[some])
        if len(projected) > rows and segments.num_prompts:
            self._prompts(projected[rows:], gates[rows:], states, segments, out[rows:])
        return out

    def _step(
        self,
        projected: Tensor,
        gates: Tensor,
        states: tuple[Tensor, ...],
        slots: Tensor,
        out: Tensor,
    ) -> None:
        """Compute decode rows; the arguments are theirs."""
        shape, (conv_state, state) = self.shape, states
        gated_delta_step[shape.num_heads, len(projected)](
            projected, gates, *self._arguments, self._norm, conv_state, state, slots, out, self._arrivals,
            projected.stride(0), gates.stride(0), conv_state.stride(0), state.stride(0), shape.eps,
            shape.key_dim**-0.5,
            **self._sizes, **self._has_bias, **self._parts, TAPS=triton.next_power_of_2(shape.width),
        )  # fmt: skip

    def _drafts(
        self,
        projected: Tensor,
        gates: Tensor,
        states: tuple[Tensor, ...],
        segments: Segments,
        out: Tensor,
    ) -> None:
        """Compute decode rows with drafts."""
        shape, (conv_state, state), kept = self.shape, states, segments.kept_slots
        assert kept is not None
        heads, parts = shape.num_heads, self._parts
        results = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        apply_rule_to_drafts[heads * parts["PARTS"], segments.num_prompts](
            projected, gates, *self._arguments, conv_state, state, segments.cu_seqlens, segments.slots, kept, results,
            projected.stride(0), gates.stride(0), conv_state.stride(0), state.stride(0), shape.key_dim**-0.5,
            **self._sizes, **self._has_bias, **parts, TAPS=triton.next_power_of_2(shape.width),
        )  # fmt: skip
        sizes = {it: self._sizes[it] for it in ("H", "G", "DK", "DV")}
        normalize_drafts[heads, len(out)](
            results, projected, self._norm, out, projected.stride(0), shape.eps, **sizes, **parts
        )
        conv, bias, *_ = self._arguments
        # After all programs have read the states of the convolution.
        causal_conv_of_drafts(projected, conv, bias, conv_state, segments, None)

    def _prompts(
        self,
        projected: Tensor,
        gates: Tensor,
        states: tuple[Tensor, ...],
        segments: Segments,
        out: Tensor,
    ) -> None:
        """Compute prompts; the arguments are those of their tokens."""
        shape, (conv_state, state) = self.shape, states
        heads = shape.num_heads
        count = len(projected) // CHUNK + 2 * segments.num_prompts
        keys, values = self._sizes["BK"], self._padded["BV"]
        dtype, device = projected.dtype, projected.device
        blocks = (
            torch.empty((count, heads, 3, CHUNK, keys), dtype=dtype, device=device),
            torch.empty((count, heads, values, CHUNK), dtype=dtype, device=device),
            torch.empty((count, heads, CHUNK, CHUNK), dtype=dtype, device=device),
            torch.empty((count, heads), dtype=torch.float32, device=device),
        )
        keeps = segments.kept_slots is not None
        kept = segments.kept_slots if keeps else segments.slots
        where = segments.cu_seqlens, segments.positions[segments.rows :], segments.slots, kept
        counts = segments.rows, segments.num_prompts
        sizes = {"CHUNK": CHUNK, "SEQS": sequences(segments.num_prompts), "KEEPS": keeps}
        few = self._from_shared and dtype.itemsize == 2 and not self._is_wide
        launch = {"num_warps": 4 if few else 8}
        if few and not self._arch.unsupported(HOPPER) and values <= _PART:
            launch["maxnreg"] = _REGISTERS
        solve_blocks[heads, count](
            projected, gates, *self._arguments, conv_state, *where, *blocks, *counts, projected.stride(0),
            gates.stride(0), conv_state.stride(0), shape.key_dim**-0.5,
            **self._sizes, **self._padded, **sizes, **self._has_bias, PART=min(values, _PART), LEVELS=_LEVELS,
            OPERANDS=tl.float32 if dtype is torch.float32 else tl.float16,
            **launch,
        )  # fmt: skip
        slices = triton.cdiv(shape.value_dim, self._slice)
        carry, arrays, launch = self._carry(dtype, blocks)
        carry[slices, heads, segments.num_prompts](
            *arrays, projected, conv_state, state, *where, out, *counts,
            projected.stride(0), conv_state.stride(0), state.stride(0),
            **self._sizes, **self._padded, **sizes, SLICE=self._slice,
            CHANNELS=triton.next_power_of_2(triton.cdiv(shape.channels, slices * heads)), **launch,
        )  # fmt: skip
        vectors = max(1, _VECTORS // values)
        gated_norm[triton.cdiv(len(projected) * heads, vectors),](
            out, projected[:, shape.channels :], self._norm, len(projected) * heads, projected.stride(0), shape.eps,
            H=heads, DV=shape.value_dim, BV=values, VECTORS=vectors, num_warps=4,
        )  # fmt: skip

    def _carry(
        self, dtype: torch.dtype, blocks: tuple[Tensor, ...]
    ) -> tuple[Any, tuple[Any, ...], dict[str, int]]:
        """Return the kernel that carries states, what it takes of `blocks`, and its launch options.

        Its loop has as many stages as the shared memory holds blocks. Where products read all operands from registers,
        Triton keeps one block less, and twice the warps are needed to hold them, as they are for wide states.
        """
        keys, size = self._sizes["BK"], self._slice
        warps = 4 if self._from_shared and not self._is_wide else 8
        if dtype is torch.float32:
            return carry_states, blocks, {"STAGES": 1, "num_warps": 8}
        a_block = CHUNK * (3 * keys + CHUNK + size) * dtype.itemsize
        if not (self._arch.unsupported(HOPPER) or self._is_wide) and size == _SLICE:
            stages = min(_MOST_STAGES, (self._arch.shared_memory_bytes - _RESULTS) // a_block)
            boxes = ([CHUNK, keys], [size, CHUNK], [CHUNK, CHUNK])
            arrays = tuple(map(_in_boxes, blocks, boxes))
            return carry_in_flight, (*arrays, blocks[-1]), {"STAGES": stages, "num_warps": 4}
        held = (self._arch.shared_memory_bytes - keys * size * dtype.itemsize) // a_block
        stages = max(1, min(_MOST_STAGES, held + (not self._from_shared)))
        return carry_states, blocks, {"STAGES": stages, "num_warps": warps}


def _in_boxes(x: Tensor, box: list[int]) -> TensorDescriptor:
    """Describe an array's rows, which TMA copies in boxes."""
    layout = gl.NVMMASharedLayout.get_default_for(
        box, getattr(gl, str(x.dtype).removeprefix("torch."))
    )
    return TensorDescriptor(x, [x.numel() // box[1], box[1]], [box[1], 1], box, layout)
