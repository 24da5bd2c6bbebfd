"""Mamba-2 of decode rows, also with drafts, in Triton: a launch for the convolution, one for state, gate and norm.

Each program of the latter has some rows of the state of one head. The last one of a group to arrive normalizes the
group; which one that is changes no bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.gpu.functions import product, silu
from kernels.recurrent.gpu.row_convolution import causal_conv_of_drafts, causal_conv_of_rows
from kernels.recurrent.gpu.tiles import is_last, slot_after, softplus

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights
    from kernels.recurrent.segments import Segments

_ELEMENTS: Final = 4096
"""Of a state, of one program."""
_THREAD_ELEMENTS: Final = 32
"""Of these, in the registers of a thread."""
_NORMALIZED: Final = 4096
"""Elements of a group that are loaded at once."""
_ROWS: Final = 1024
"""Tokens of decode rows for which counters are kept."""
NO_NORM: Final = tl.constexpr(0)
NORM_AFTER_GATE: Final = tl.constexpr(1)
NORM_BEFORE_GATE: Final = tl.constexpr(2)


@triton.jit
def step_mamba2(
    projected, mixed, state, a_log, dt_bias, d, norm, scratch, counters, out, slots,
    stride, state_stride, eps, least_dt, largest_dt,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute some elements of a head of one decode row; program (part of all heads, row).

    Args:
        projected: [R, z | x | b | c | dt].
        mixed: [R, x | b | c] float32, after the convolution.
        state: [S, H, P, N] float32, slots at any distance.
        a_log, dt_bias, d: [H] float32.
        norm: [H * P], where there is a NORM.
        scratch: [R, H * P] float32, likewise.
        counters: [R, G] int32 of 0, likewise, which they are again afterwards.
        out: [R, H * P].
        slots: [R, 2].
        ROWS, COLUMNS: of the tile of a state.
        GROUP: elements of a group that are normalized at once.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    group = head // (H // G)
    p = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    is_p, is_n = p < P, n < N
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1).to(tl.int64)
    tile = (head * P + p)[:, None] * N + n[None, :]
    is_tile = is_p[:, None] & is_n[None, :]
    h = tl.load(state + read * state_stride + tile, mask=is_tile & (read >= 0), other=0.0)
    log_decay, bias, skip = tl.load(a_log + head), tl.load(dt_bias + head), tl.load(d + head)
    compute_token(
        h, row, projected, mixed, state, write, tile, log_decay, bias, skip, norm, scratch, counters, out, head, group,
        p, n, stride, state_stride, eps, least_dt, largest_dt, H, P, N, G, NORM, ROWS, GROUP,
    )  # fmt: skip


@triton.jit
def step_drafts(
    projected, mixed, state, a_log, dt_bias, d, norm, scratch, counters, out, cu_seqlens, slots, kept_slots,
    stride, state_stride, eps, least_dt, largest_dt,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute some elements of a head of a decode row's tokens, one after the other; program (part of all heads, row).

    Args:
        projected, mixed, scratch, counters, out: as of `step_mamba2`, of T tokens.
        cu_seqlens, kept_slots: as in `Segments`.

    The others are those of `step_mamba2`.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    row = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    group = head // (H // G)
    p = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1)
    tile = (head * P + p)[:, None] * N + n[None, :]
    is_tile = (p < P)[:, None] & (n < N)[None, :]
    reads = is_tile & (read >= 0) & (first < end)
    h = tl.load(state + read * state_stride + tile, mask=reads, other=0.0)
    log_decay, bias, skip = tl.load(a_log + head), tl.load(dt_bias + head), tl.load(d + head)
    for i in range(end - first):
        token = first + i
        slot = slot_after(kept_slots, token, end, write)
        h = compute_token(
            h, token.to(tl.int64), projected, mixed, state, slot, tile, log_decay, bias, skip, norm, scratch, counters,
            out, head, group, p, n, stride, state_stride, eps, least_dt, largest_dt, H, P, N, G, NORM, ROWS, GROUP,
        )  # fmt: skip


@triton.jit
def compute_token(
    h, row, projected, mixed, state, write, tile, log_decay, bias, skip, norm, scratch, counters, out, head, group,
    p, n, stride, state_stride, eps, least_dt, largest_dt,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute and store some elements of a head of a token; return its state after the token.

    Args:
        h: the state before, [ROWS, COLUMNS] float32.
        row: the token's row in `projected`, `mixed`, `scratch`, `counters` and `out`, int64.
        write: the slot to which the state is written; negative for none.
        tile: places of the elements in a slot.
        log_decay, bias, skip: of the head.
        head, group: their numbers.
        p, n: rows and columns of the state.

    The others are those of `step_mamba2`.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    INNER: tl.constexpr = H * P
    C: tl.constexpr = INNER + 2 * G * N
    is_p, is_n = p < P, n < N
    is_tile = is_p[:, None] & is_n[None, :]
    z = projected + row * stride
    mixed += row * C
    of_x = head * P + p
    of_b = mixed + INNER + group * N + n
    x = tl.load(mixed + of_x, mask=is_p, other=0.0)
    b = tl.load(of_b, mask=is_n, other=0.0)
    c = tl.load(of_b + G * N, mask=is_n, other=0.0)
    dt = softplus(tl.load(z + INNER + C + head).to(tl.float32) + bias)
    dt = tl.minimum(tl.maximum(dt, least_dt), largest_dt)
    gate = tl.zeros([ROWS], tl.float32)
    if NORM != NORM_BEFORE_GATE:
        gate = tl.load(z + of_x, mask=is_p, other=0.0).to(tl.float32)
    h = tl.fma(h, tl.exp(-tl.exp(log_decay) * dt), product((x * dt)[:, None], b[None, :]))
    y = tl.sum(h * c[None, :], 1) + skip * x
    if NORM != NORM_BEFORE_GATE:
        y *= silu(gate)
    line = row * INNER
    after = state + write * state_stride + tile
    written = is_tile & (write >= 0)
    if NORM == NO_NORM:
        tl.store(out + line + of_x, y.to(out.dtype.element_ty), mask=is_p)
        tl.store(after, h, mask=written)
    else:
        tl.store(scratch + line + of_x, y, mask=is_p)
        # Before the state is stored, for which it would wait too.
        last = is_last(counters + row * G + group, H // G * PARTS)
        tl.store(after, h, mask=written)
        if last:
            first = group * (INNER // G)
            normalize(
                scratch + line + first, z + first, norm + first, out + line + first, eps, INNER // G, GROUP, NORM
            )  # fmt: skip
    return h


@triton.jit
def normalize(y, z, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Normalize SIZE elements, BLOCK at a time, and multiply them by their weights; and by silu(z) if it comes after.

    Other programs may have stored `y`, so the loads bypass the L1 cache.
    """
    element = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(0, SIZE, BLOCK):
        exists = i + element < SIZE
        value = tl.load(y + i + element, mask=exists, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares) / SIZE + eps)
    for i in tl.static_range(0, SIZE, BLOCK):
        exists = i + element < SIZE
        value = tl.load(y + i + element, mask=exists, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
        factor = tl.load(weight + i + element, mask=exists, other=0.0).to(tl.float32)
        result = value * scale * factor
        if NORM == NORM_BEFORE_GATE:
            result *= silu(tl.load(z + i + element, mask=exists, other=0.0).to(tl.float32))
        tl.store(out + i + element, result.to(out.dtype.element_ty), mask=exists)


def norm_kind(shape: Mamba2Shape) -> int:
    """Return NORM of a mixer."""
    if shape.eps is None:
        return 0
    return 2 if shape.norm_before_gate else 1


def group_block(shape: Mamba2Shape) -> int:
    """Return the elements of a group that are normalized at once."""
    return min(_NORMALIZED, int(triton.next_power_of_2(shape.inner // shape.num_groups)))


class Step:
    """Computes decode rows; owns the counters of arrived programs, which every launch leaves at 0.

    Launches of one object must not run at the same time.
    """

    def __init__(self, shape: Mamba2Shape, weights: RecurrentWeights) -> None:
        self.shape, self.weights = shape, weights
        self._conv = weights.conv.t().contiguous()
        self._counters = self._zeros(_ROWS)

    def _zeros(self, rows: int) -> Tensor:
        size, device = rows * self.shape.num_groups, self.weights.conv.device
        return torch.zeros(size, dtype=torch.int32, device=device)

    def __call__(
        self,
        projected: Tensor,
        states: tuple[Tensor, ...],
        segments: Segments,
        out: Tensor,
    ) -> None:
        """Compute the decode rows of a step.

        Args:
            projected: [T, z | x | b | c | dt], contiguous in its rows.
            states: as the shape lists them.
            segments: of the step.
            out: [R, inner] contiguous; [T, inner] if the segments are `by_token`.
        """
        shape, weights, slots = self.shape, self.weights, segments.slots
        rows = len(out)
        columns = triton.next_power_of_2(shape.state_dim)
        tile_rows = min(max(1, _ELEMENTS // columns), triton.next_power_of_2(shape.head_dim))
        has_norm = norm_kind(shape) != NO_NORM.value
        scratch = (
            torch.empty(out.shape, dtype=torch.float32, device=out.device) if has_norm else out
        )
        counters = self._counters if rows <= _ROWS else self._zeros(rows)
        conv_state, state = states
        mixed = torch.empty((rows, shape.channels), dtype=torch.float32, device=out.device)
        x, conv = projected[:rows, shape.inner :], (self._conv, weights.conv_bias, conv_state)
        step, count = step_mamba2, rows
        where: tuple[Tensor, ...] = (slots,)
        if segments.by_token:
            assert segments.kept_slots is not None
            causal_conv_of_drafts(x, *conv, segments, mixed)
            step, count = step_drafts, segments.num_prompts
            where = segments.cu_seqlens, slots, segments.kept_slots
        else:
            causal_conv_of_rows(x, *conv, slots, mixed)
        step[shape.num_heads * triton.cdiv(shape.head_dim, tile_rows), count](
            projected, mixed, state, weights.a_log, weights.dt_bias, weights.d,
            weights.norm if has_norm else self._conv, scratch, counters, out, *where,
            projected.stride(0), state.stride(0), shape.eps or 0.0, *shape.dt_limits,
            H=shape.num_heads, P=shape.head_dim, N=shape.state_dim, G=shape.num_groups, NORM=norm_kind(shape),
            ROWS=tile_rows, COLUMNS=columns, GROUP=group_block(shape),
            num_warps=max(1, min(8, tile_rows * columns // (32 * _THREAD_ELEMENTS))),
        )  # fmt: skip
