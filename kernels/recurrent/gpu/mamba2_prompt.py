"""Mamba-2 of prompts in Triton, in blocks of `CHUNK` tokens: the formulas of `kernels.recurrent.pytorch.mamba2`.

Four launches after the convolution: the decays of each block; the states of a prompt, block by block, which are written
before each block; the tokens of all blocks, from the states before them; the gated norm. Only the second is a chain, so
it has one product a block, and its operands are loaded ahead. The third has programs for some heads of a block, which
share the products of b and c, since all programs together read more than the second-level cache delivers otherwise. The
states before the blocks are in the dtype of the inputs, to which they are rounded as operands anyway.

Sums of logarithms of decays are exact: each logarithm is a multiple of 1 / 256 and a small rest, which are added apart.
So the difference of two sums of strong decays is exact where it is a weak one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent.gpu.convolution import causal_conv_of_prompts
from kernels.recurrent.gpu.mamba2_step import (
    NO_NORM,
    NORM_AFTER_GATE,
    NORM_BEFORE_GATE,
    group_block,
    norm_kind,
)
from kernels.recurrent.gpu.tiles import (
    find_block,
    find_prompt,
    sequences,
    softplus,
)
from kernels.recurrent.problem import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights
    from kernels.recurrent.segments import Segments

_HEADS: Final = 16
"""Whose decays a program computes."""
_ROWS: Final = 64
"""Elements of a head that a program has, the rows of the widest instructions of tensor cores."""
_COLUMNS: Final = 64
"""Columns of a state that a program carries through a prompt, or half of all if that is more."""
_CARRY_STAGES: Final = 4
"""Blocks of which parts are in shared memory at once in `carry_states`; one less for more columns."""
_STATE: Final = 8192
"""Elements of a state that a program of `scan_blocks` loads at once; the next ones are loaded ahead."""
_FLOAT32_ROWS: Final = 16
_FLOAT32_DEPTH: Final = 32
"""Rows, and columns of a product of b and c, in float32, which is multiplied without tensor cores, in registers."""
_MOST_HEADS: Final = 8
"""Heads that a program of `scan_blocks` computes; they share the products of b and c."""
_PROGRAMS: Final = 1024
"""Of `scan_blocks`, below which a program computes fewer heads."""
_FIELDS = tl.constexpr(5)
"""Numbers of a token and head: the two parts of the sum of the logarithms of the decays from the first token of the
block on, its exponential, the step size, and the step size times the decay from the token to the end of the block."""
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_LEAST: Final = tl.constexpr(-160.0)
"""Logarithm of a decay that is 0 in float32; smaller ones are replaced by it."""


@triton.jit(do_not_specialize=["num_prompts"])
def prepare_blocks(
    mixed, dt, dt_bias, a_log, scores, decays, cu_seqlens, positions, num_prompts, dt_stride, least_dt, largest_dt,
    H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Compute what a block needs beside its state; program (block, group where SCORES, or heads after the last group).

    Args:
        mixed: [T, x | b | c] of the tokens of prompts, convolved.
        dt: [T, H] of the tokens of prompts.
        dt_bias, a_log: [H] float32.
        scores: [blocks, G, CHUNK, CHUNK] float32, the products of c of a token and b of another one, where SCORES:
            without tensor cores they cost too much to be computed by each program that reads them.
        decays: [blocks, H, 5, CHUNK] float32, see `_FIELDS`.
    """
    C: tl.constexpr = INNER + 2 * G * N
    PRODUCTS: tl.constexpr = G if SCORES else 0
    number = tl.program_id(0)
    prompt, first, length, block, begin = find_block(
        cu_seqlens, positions, num_prompts, number, CHUNK, SEQS
    )
    if prompt < num_prompts:
        t = tl.arange(0, CHUNK)
        place = block * CHUNK + t - begin
        exists = (place >= 0) & (place < length)
        line = (first + place).to(tl.int64)
        part = tl.program_id(1)
        if part < PRODUCTS:
            found = tl.zeros([CHUNK, CHUNK], tl.float32)
            for start in range(0, N, DEPTH):
                n = start + tl.arange(0, DEPTH)[None, :]
                mask = exists[:, None] & (n < N)
                at = mixed + line[:, None] * C + INNER + part * N + n
                b = tl.load(at, mask=mask, other=0.0)
                c = tl.load(at + G * N, mask=mask, other=0.0)
                found = tl.dot(c, b.T, found, input_precision="ieee")
            to = scores + (number * G + part).to(tl.int64) * CHUNK * CHUNK
            tl.store(to + t[:, None] * CHUNK + t[None, :], found)
        else:
            head = (part - PRODUCTS) * HEADS + tl.arange(0, HEADS)
            is_head = head < H
            is_step = exists[:, None] & is_head[None, :]
            step = tl.load(dt + line[:, None] * dt_stride + head[None, :], mask=is_step, other=0.0)
            bias = tl.load(dt_bias + head, mask=is_head, other=0.0)
            step = softplus(step.to(tl.float32) + bias[None, :])
            step = tl.where(is_step, tl.minimum(tl.maximum(step, least_dt), largest_dt), 0.0)
            rate = tl.exp(tl.load(a_log + head, mask=is_head, other=0.0)) * _LOG2_E
            logs = tl.maximum(-rate[None, :] * step, _LEAST)
            coarse = tl.floor(logs * 256.0 + 0.5) * (1.0 / 256.0)
            fine = tl.cumsum(logs - coarse, 0)
            coarse = tl.cumsum(coarse, 0)
            is_end = (t == CHUNK - 1)[:, None]
            end_coarse = tl.sum(tl.where(is_end, coarse, 0.0), 0)[None, :]
            end_fine = tl.sum(tl.where(is_end, fine, 0.0), 0)[None, :]
            field = (
                decays + ((number * H + head).to(tl.int64) * _FIELDS * CHUNK)[None, :] + t[:, None]
            )
            stored = is_head[None, :] & (t[:, None] >= 0)
            tl.store(field, coarse, mask=stored)
            tl.store(field + CHUNK, fine, mask=stored)
            tl.store(field + 2 * CHUNK, tl.exp2(coarse + fine), mask=stored)
            tl.store(field + 3 * CHUNK, step, mask=stored)
            remaining = tl.exp2((end_coarse - coarse) + (end_fine - fine))
            tl.store(field + 4 * CHUNK, step * remaining, mask=stored)


@triton.jit(do_not_specialize=["rows", "num_prompts"])
def carry_states(
    mixed, decays, state, before, cu_seqlens, positions, slots, kept_slots, rows, num_prompts, state_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, SEQS: tl.constexpr, STAGES: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Carry some elements of the state of a head through a prompt; program (part of all states, prompt).

    Args:
        mixed: as of `prepare_blocks`.
        decays: of `prepare_blocks`.
        state: [S, H, P, N] float32, slots at any distance.
        before: [blocks, H, P, N], the states before each block.
        kept_slots: as in `Segments`, where KEEPS.
        ROWS, COLUMNS: of the part of a state.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    SLICES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    INNER: tl.constexpr = H * P
    C: tl.constexpr = INNER + 2 * G * N
    dtype: tl.constexpr = mixed.dtype.element_ty
    prompt = tl.program_id(1)
    first, length, begin, blocks, number = find_prompt(
        cu_seqlens, positions, num_prompts, prompt, CHUNK, SEQS
    )
    if length > 0:
        part = tl.program_id(0) // SLICES
        head = part // PARTS
        group = head // (H // G)
        p = (part % PARTS) * ROWS + tl.arange(0, ROWS)
        n = (tl.program_id(0) % SLICES) * COLUMNS + tl.arange(0, COLUMNS)
        t = tl.arange(0, CHUNK)
        is_p, is_n = p < P, n < N
        read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
        write = tl.load(slots + 2 * (rows + prompt) + 1).to(tl.int64)
        tile = (head * P + p)[:, None] * N + n[None, :]
        is_tile = is_p[:, None] & is_n[None, :]
        h = tl.load(state + read * state_stride + tile, mask=is_tile & (read >= 0), other=0.0)
        of_x = t[:, None] * C + (head * P + p)[None, :]
        of_b = t[:, None] * C + (INNER + group * N + n)[None, :]
        decay = decays + (number.to(tl.int64) * H + head) * _FIELDS * CHUNK
        before += number.to(tl.int64) * H * P * N
        # What is read of the next block is loaded before the products of this one, which then wait for no memory.
        weight = tl.load(decay + 4 * CHUNK + t)
        whole = tl.load(decay + 3 * CHUNK - 1)
        slot = tl.full([], -1, tl.int32)
        if KEEPS:
            slot = tl.load(kept_slots + first + tl.minimum(CHUNK - begin, length) - 1)
        for i in tl.range(0, blocks, num_stages=STAGES):
            tl.store(before + tile, h.to(dtype), mask=is_tile)
            before += H * P * N
            place = i * CHUNK - begin
            exists = ((place + t >= 0) & (place + t < length))[:, None]
            tokens = mixed + (first + place).to(tl.int64) * C
            x = tl.load(tokens + of_x, mask=exists & is_p[None, :], other=0.0)
            b = tl.load(tokens + of_b, mask=exists & is_n[None, :], other=0.0)
            weighted = (x.to(tl.float32) * weight[:, None]).to(dtype)
            h *= whole
            is_next = i + 1 < blocks
            decay += H * _FIELDS * CHUNK
            weight = tl.load(decay + 4 * CHUNK + t, mask=is_next, other=0.0)
            whole = tl.load(decay + 3 * CHUNK - 1, mask=is_next, other=0.0)
            h = tl.dot(weighted.T, b, h, input_precision="ieee")
            if KEEPS:
                if slot >= 0:
                    tl.store(state + slot.to(tl.int64) * state_stride + tile, h, mask=is_tile)
                end = tl.minimum(place + 2 * CHUNK, length)
                slot = tl.load(kept_slots + first + end - 1, mask=is_next, other=-1)
        tl.store(state + write * state_stride + tile, h, mask=is_tile & (write >= 0))


@triton.jit(do_not_specialize=["num_prompts", "count"])
def scan_blocks(
    mixed, z, scores, decays, d, before, out, cu_seqlens, positions, num_prompts, count, z_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr, SCORES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute some heads of the tokens of a block; program (`count` parts of the heads of a group, block).

    Args:
        mixed: as of `prepare_blocks`.
        z: [T, H * P] of the tokens of prompts.
        scores: of `prepare_blocks`, where SCORES.
        decays: of `prepare_blocks`.
        d: [H] float32.
        before: of `carry_states`.
        out: [T, H * P] of the tokens of prompts; with the gate where GATED, and without the norm.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    IN_GROUP: tl.constexpr = H // G * PARTS
    INNER: tl.constexpr = H * P
    C: tl.constexpr = INNER + 2 * G * N
    dtype: tl.constexpr = mixed.dtype.element_ty
    number = tl.program_id(1).to(tl.int64)
    prompt, first, length, block, begin = find_block(
        cu_seqlens, positions, num_prompts, number, CHUNK, SEQS
    )
    if prompt < num_prompts:
        programs = (IN_GROUP + count - 1) // count
        group = tl.program_id(0) // programs
        start = tl.program_id(0) % programs * count
        n = tl.arange(0, COLUMNS)
        t = tl.arange(0, CHUNK)
        is_n = n < N
        place = block * CHUNK + t - begin
        exists = ((place >= 0) & (place < length))[:, None]
        line = (first + block * CHUNK - begin).to(tl.int64)
        tokens = mixed + line * C
        of_b = t[:, None] * C + (INNER + group * N + n)[None, :]
        c = tl.load(tokens + G * N + of_b, mask=exists & is_n[None, :], other=0.0)
        if SCORES:
            square = t[:, None] * CHUNK + t[None, :]
            products = tl.load(scores + (number * G + group) * CHUNK * CHUNK + square)
        else:
            b = tl.load(tokens + of_b, mask=exists & is_n[None, :], other=0.0)
            products = tl.dot(c, b.T)
        for unit in tl.range(start, tl.minimum(start + count, IN_GROUP), num_stages=STAGES):
            head = group * (H // G) + unit // PARTS
            p = unit % PARTS * ROWS + tl.arange(0, ROWS)
            is_p = p < P
            of_head = (head * P + p)[None, :]
            x = tl.load(tokens + t[:, None] * C + of_head, mask=exists & is_p[None, :], other=0.0)
            at = before + (number * H + head) * P * N + p[:, None] * N + n[None, :]
            h = tl.load(at, mask=is_p[:, None] & is_n[None, :], other=0.0)
            decay = decays + (number * H + head) * _FIELDS * CHUNK
            coarse, fine = tl.load(decay + t), tl.load(decay + CHUNK + t)
            kept, step = tl.load(decay + 2 * CHUNK + t), tl.load(decay + 3 * CHUNK + t)
            skip = tl.load(d + head)
            gate = tl.zeros([CHUNK, ROWS], dtype)
            if GATED:
                of_z = z + line * z_stride + t[:, None] * z_stride + of_head
                gate = tl.load(of_z, mask=exists & is_p[None, :], other=0.0)
            between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
            factors = products * tl.exp2(between) * step[None, :]
            # Those of later tokens may be infinite.
            factors = tl.where(t[:, None] >= t[None, :], factors, 0.0).to(dtype)
            y = tl.dot(c, h.T, input_precision="ieee") * kept[:, None]
            y = tl.dot(factors, x, y, input_precision="ieee")
            y += skip * x.to(tl.float32)
            if GATED:
                y *= silu(gate.to(tl.float32))
            to = out + line * INNER + t[:, None] * INNER + of_head
            tl.store(to, y.to(out.dtype.element_ty), mask=exists & is_p[None, :])


@triton.jit
def load_values(y, z, element, exists, NORM: tl.constexpr):
    """Return elements of a token, float32, with the gate if it comes before the norm, and those of the gate."""
    value = tl.load(y + element, mask=exists, other=0.0).to(tl.float32)
    gate = silu(tl.load(z + element, mask=exists, other=0.0).to(tl.float32))
    if NORM == NORM_AFTER_GATE:
        value *= gate
    return value, gate


@triton.jit
def normalize_tokens(
    y, z, weight, z_stride, eps,
    INNER: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gate and normalize a group of a token in place; program (token, group)."""
    SIZE: tl.constexpr = INNER // G
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SIZE
    y += token * INNER + first
    z += token * z_stride + first
    weight += first
    element = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    value, gate = squares, squares
    for i in tl.static_range(0, SIZE, BLOCK):
        value, gate = load_values(y, z, i + element, i + element < SIZE, NORM)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares) / SIZE + eps)
    for i in tl.static_range(0, SIZE, BLOCK):
        exists = i + element < SIZE
        if SIZE > BLOCK:
            value, gate = load_values(y, z, i + element, exists, NORM)
        factor = tl.load(weight + i + element, mask=exists, other=0.0).to(tl.float32)
        result = value * scale * factor
        if NORM == NORM_BEFORE_GATE:
            result *= gate
        tl.store(y + i + element, result.to(y.dtype.element_ty), mask=exists)


def mamba2_prompts(
    shape: Mamba2Shape,
    weights: RecurrentWeights,
    projected: Tensor,
    states: tuple[Tensor, ...],
    segments: Segments,
    out: Tensor,
) -> None:
    """Compute the prompts of a step.

    Args:
        shape: of the mixer.
        weights: likewise.
        projected: [T, z | x | b | c | dt] of all tokens, contiguous in its rows.
        states: as the shape lists them.
        segments: of the step.
        out: [T - R, inner] contiguous, of the tokens of prompts.
    """
    prompts, tokens = segments.num_prompts, len(out)
    if tokens == 0 or prompts == 0:
        return
    heads, groups, inner, channels = shape.num_heads, shape.num_groups, shape.inner, shape.channels
    conv_state, state = states
    z = projected[segments.rows :]
    positions = segments.positions[segments.rows :]
    mixed = torch.empty((tokens, channels), dtype=out.dtype, device=out.device)
    causal_conv_of_prompts(
        projected[:, inner:],
        weights.conv,
        weights.conv_bias,
        conv_state,
        segments,
        mixed,
        silu=True,
    )
    # A prompt may begin and end within a block.
    blocks = tokens // CHUNK + 2 * prompts
    is_wide = out.dtype is torch.float32
    products = groups if is_wide else 0
    scores = torch.empty((blocks, products, CHUNK, CHUNK), dtype=torch.float32, device=out.device)
    decays = torch.empty(
        (blocks, heads, _FIELDS.value, CHUNK), dtype=torch.float32, device=out.device
    )
    before = torch.empty((blocks, *state.shape[1:]), dtype=out.dtype, device=out.device)
    sizes = {
        "H": heads,
        "N": shape.state_dim,
        "G": groups,
        "CHUNK": CHUNK,
        "SEQS": sequences(prompts),
    }
    # Products on tensor cores have at least 16 rows and columns.
    columns = max(16, triton.next_power_of_2(shape.state_dim))
    prepare_blocks[blocks, products + triton.cdiv(heads, _HEADS)](
        mixed, z[:, inner + channels :], weights.dt_bias, weights.a_log, scores, decays, segments.cu_seqlens, positions,
        prompts, z.stride(0), *shape.dt_limits,
        INNER=inner, DEPTH=min(_FLOAT32_DEPTH, columns), HEADS=_HEADS, SCORES=is_wide, num_warps=4, **sizes,
    )  # fmt: skip
    kind, kept = norm_kind(shape), segments.kept_slots
    rows = max(16, triton.next_power_of_2(shape.head_dim))
    rows = min(_FLOAT32_ROWS if is_wide else _ROWS, rows)
    parts = triton.cdiv(shape.head_dim, rows)
    carried = columns if is_wide else min(columns, max(_COLUMNS, columns // 2))
    carry_states[heads * parts * triton.cdiv(shape.state_dim, carried), prompts](
        mixed, decays, state, before, segments.cu_seqlens, positions, segments.slots,
        segments.slots if kept is None else kept, segments.rows, prompts, state.stride(0),
        P=shape.head_dim, ROWS=rows, COLUMNS=carried, KEEPS=kept is not None,
        STAGES=1 if is_wide else _CARRY_STAGES if carried <= _COLUMNS else _CARRY_STAGES - 1,
        num_warps=8 if is_wide else 4, **sizes,
    )  # fmt: skip
    rows = min(rows, _STATE // columns)
    parts = triton.cdiv(shape.head_dim, rows)
    count = max(1, min(_MOST_HEADS, heads * parts * blocks // _PROGRAMS))
    scan_blocks[groups * triton.cdiv(heads // groups * parts, count), blocks](
        mixed, z, scores, decays, weights.d, before, out, segments.cu_seqlens, positions, prompts, count, z.stride(0),
        P=shape.head_dim, GATED=kind == NO_NORM.value, ROWS=rows, COLUMNS=columns, SCORES=is_wide,
        STAGES=1 if is_wide else 2, num_warps=8 if is_wide else 4, **sizes,
    )  # fmt: skip
    if shape.eps is not None:
        normalize_tokens[tokens, groups](
            out, z, weights.norm, z.stride(0), shape.eps,
            INNER=inner, G=groups, BLOCK=group_block(shape), NORM=kind, num_warps=4,
        )  # fmt: skip
