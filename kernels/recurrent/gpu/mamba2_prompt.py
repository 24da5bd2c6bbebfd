"""Mamba-2 of prompts in Triton, in blocks of `CHUNK` tokens: the formulas of `kernels.recurrent.pytorch.mamba2`.

Three launches after the convolution: what does not depend on the state, for each block; the blocks of a prompt one
after the other, for some elements of a head; the norm. The second keeps the state in registers, since writing it for
each block would move more bytes than all of the rest.

Sums of logarithms of decays are exact: each logarithm is a multiple of 1 / 256 and a small rest, which are added apart.
So the difference of two sums of strong decays is exact where it is a weak one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.arch import detect
from kernels.gpu.functions import silu
from kernels.recurrent.gpu.convolution import causal_conv_of_prompts
from kernels.recurrent.gpu.mamba2_step import NORM_BEFORE_GATE, group_block, norm_kind, normalize
from kernels.recurrent.gpu.tiles import find_block, find_prompt, sequences, softplus
from kernels.recurrent.problem import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights
    from kernels.recurrent.segments import Segments

_HEADS: Final = 16
"""Whose decays a program computes."""
_STATE: Final = 4096
"""Elements of a state that a program keeps in registers, for 32 or fewer elements of a head."""
_MOST_ROWS: Final = 32
_DEPTH: Final = 256
"""Columns of a product of b and c that are in registers at once."""
_FLOAT32_ROWS: Final = 16
_FLOAT32_DEPTH: Final = 32
"""The same in float32, which is multiplied without tensor cores, in registers."""
_PIPELINED_STATE: Final = 128
"""Columns of states whose blocks are loaded ahead everywhere; those of wider ones only with much shared memory."""
_MUCH_SHARED_MEMORY: Final = 200 * 1024
_FIELDS = tl.constexpr(5)
"""Numbers of a token and head: the two parts of the sum of the logarithms of the decays from the first token of the
block on, its exponential, the step size, and the step size times the decay from the token to the end of the block."""
_LEAST: Final = tl.constexpr(-128.0)
"""Logarithm of a decay that is 0 in float32; smaller ones are replaced by it."""


@triton.jit(do_not_specialize=["num_prompts"])
def prepare_blocks(
    mixed, dt, dt_bias, a_log, scores, decays, cu_seqlens, positions, num_prompts, dt_stride, least_dt, largest_dt,
    H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Compute what a block needs beside its state; program (block, group, or heads after the last group).

    Args:
        mixed: [T, x | b | c] of the tokens of prompts, convolved.
        dt: [T, H] of the tokens of prompts.
        dt_bias, a_log: [H] float32.
        scores: [blocks, G, CHUNK, CHUNK] float32, the products of c of a token and b of another one.
        decays: [blocks, H, 5, CHUNK] float32, see `_FIELDS`.
    """
    C: tl.constexpr = INNER + 2 * G * N
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
        if part < G:
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
            head = (part - G) * HEADS + tl.arange(0, HEADS)
            is_head = head < H
            is_step = exists[:, None] & is_head[None, :]
            step = tl.load(dt + line[:, None] * dt_stride + head[None, :], mask=is_step, other=0.0)
            bias = tl.load(dt_bias + head, mask=is_head, other=0.0)
            step = softplus(step.to(tl.float32) + bias[None, :])
            step = tl.where(is_step, tl.minimum(tl.maximum(step, least_dt), largest_dt), 0.0)
            rate = tl.exp(tl.load(a_log + head, mask=is_head, other=0.0))
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
            tl.store(field + 2 * CHUNK, tl.exp(coarse + fine), mask=stored)
            tl.store(field + 3 * CHUNK, step, mask=stored)
            remaining = tl.exp((end_coarse - coarse) + (end_fine - fine))
            tl.store(field + 4 * CHUNK, step * remaining, mask=stored)


@triton.jit(do_not_specialize=["rows", "num_prompts"])
def scan_blocks(
    mixed, z, scores, decays, d, state, out, cu_seqlens, positions, slots, kept_slots, rows, num_prompts,
    z_stride, state_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr, STAGES: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Compute some elements of a head of one prompt, block by block; program (part of all heads, prompt).

    Args:
        mixed: as of `prepare_blocks`.
        z: [T, H * P] of the tokens of prompts.
        scores: of `prepare_blocks`.
        decays: likewise.
        d: [H] float32.
        state: [S, H, P, N] float32, slots at any distance.
        kept_slots: as in `Segments`, where KEEPS.
        out: [T, H * P] of the tokens of prompts; with the gate where GATED, and without the norm.
    """
    PARTS: tl.constexpr = (P + ROWS - 1) // ROWS
    INNER: tl.constexpr = H * P
    C: tl.constexpr = INNER + 2 * G * N
    dtype: tl.constexpr = mixed.dtype.element_ty
    prompt = tl.program_id(1)
    first, length, begin, blocks, number = find_prompt(
        cu_seqlens, positions, num_prompts, prompt, CHUNK, SEQS
    )
    number = number.to(tl.int64)
    if length > 0:
        head = tl.program_id(0) // PARTS
        group = head // (H // G)
        p = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
        n = tl.arange(0, COLUMNS)
        t = tl.arange(0, CHUNK)
        is_p, is_n = p < P, n < N
        read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
        write = tl.load(slots + 2 * (rows + prompt) + 1).to(tl.int64)
        tile = (head * P + p)[None, :] * N + n[:, None]
        is_tile = is_p[None, :] & is_n[:, None]
        h = tl.load(state + read * state_stride + tile, mask=is_tile & (read >= 0), other=0.0)
        skip = tl.load(d + head)
        # Offsets within a block fit 32 bits, of which the registers hold more.
        of_head = head * P + p[None, :]
        of_x = t[:, None] * C + of_head
        of_b = t[:, None] * C + (INNER + group * N + n[None, :])
        square = t[:, None] * CHUNK + t[None, :]
        for i in tl.range(0, blocks, num_stages=STAGES):
            place = i * CHUNK - begin
            exists = ((place + t >= 0) & (place + t < length))[:, None]
            line = (first + place).to(tl.int64)
            gate = tl.zeros([CHUNK, ROWS], tl.float32)
            if GATED:
                at = z + line * z_stride + t[:, None] * z_stride + of_head
                gate = tl.load(at, mask=exists & is_p[None, :], other=0.0).to(tl.float32)
            tokens = mixed + line * C
            x = tl.load(tokens + of_x, mask=exists & is_p[None, :], other=0.0)
            c = tl.load(tokens + G * N + of_b, mask=exists & is_n[None, :], other=0.0)
            products = tl.load(scores + ((number + i) * G + group) * CHUNK * CHUNK + square)
            decay = decays + ((number + i) * H + head) * _FIELDS * CHUNK
            coarse, fine = tl.load(decay + t), tl.load(decay + CHUNK + t)
            kept = tl.load(decay + 2 * CHUNK + t)
            step, weight = tl.load(decay + 3 * CHUNK + t), tl.load(decay + 4 * CHUNK + t)
            between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
            factors = products * tl.exp(tl.minimum(between, 0.0)) * step[None, :]
            factors = tl.where(t[:, None] >= t[None, :], factors, 0.0).to(dtype)
            y = tl.dot(c, h.to(dtype), input_precision="ieee") * kept[:, None]
            y = tl.dot(factors, x, y, input_precision="ieee")
            wide = x.to(tl.float32)
            y += skip * wide
            if GATED:
                y *= silu(gate)
            at = out + line * INNER + t[:, None] * INNER + of_head
            tl.store(at, y.to(out.dtype.element_ty), mask=exists & is_p[None, :])
            b = tl.load(tokens + of_b, mask=exists & is_n[None, :], other=0.0)
            h *= tl.load(decay + 3 * CHUNK - 1)
            h = tl.dot(b.T, (wide * weight[:, None]).to(dtype), h, input_precision="ieee")
            if KEEPS:
                end = tl.minimum(place + CHUNK, length)
                slot = tl.load(kept_slots + first + end - 1).to(tl.int64)
                if slot >= 0:
                    tl.store(state + slot * state_stride + tile, h, mask=is_tile)
        tl.store(state + write * state_stride + tile, h, mask=is_tile & (write >= 0))


@triton.jit
def normalize_tokens(
    y, z, weight, z_stride, eps,
    INNER: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalize a group of a token in place; program (token, group)."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (INNER // G)
    at = y + token * INNER + first
    normalize(at, z + token * z_stride + first, weight + first, at, eps, INNER // G, BLOCK, NORM)


def _stages(columns: int, x: Tensor) -> int:
    """Return the number of blocks of which parts are in shared memory at once."""
    if x.dtype is torch.float32:
        return 1
    ahead = (
        columns <= _PIPELINED_STATE or detect(x.device).shared_memory_bytes > _MUCH_SHARED_MEMORY
    )
    return 2 if ahead else 1


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
    scores = torch.empty((blocks, groups, CHUNK, CHUNK), dtype=torch.float32, device=out.device)
    decays = torch.empty(
        (blocks, heads, _FIELDS.value, CHUNK), dtype=torch.float32, device=out.device
    )
    sizes = {
        "H": heads,
        "N": shape.state_dim,
        "G": groups,
        "CHUNK": CHUNK,
        "SEQS": sequences(prompts),
    }
    # Products on tensor cores have at least 16 rows and columns.
    is_wide = out.dtype is torch.float32
    most_rows, depth = (_FLOAT32_ROWS, _FLOAT32_DEPTH) if is_wide else (_MOST_ROWS, _DEPTH)
    columns = max(16, triton.next_power_of_2(shape.state_dim))
    prepare_blocks[blocks, groups + triton.cdiv(heads, _HEADS)](
        mixed, z[:, inner + channels :], weights.dt_bias, weights.a_log, scores, decays, segments.cu_seqlens, positions,
        prompts, z.stride(0), *shape.dt_limits,
        INNER=inner, DEPTH=min(depth, columns), HEADS=_HEADS, num_warps=4, **sizes,
    )  # fmt: skip
    kind, kept = norm_kind(shape), segments.kept_slots
    rows = min(most_rows, _STATE // columns, max(16, triton.next_power_of_2(shape.head_dim)))
    scan_blocks[heads * triton.cdiv(shape.head_dim, rows), prompts](
        mixed, z, scores, decays, weights.d, state, out, segments.cu_seqlens, positions, segments.slots,
        segments.slots if kept is None else kept, segments.rows, prompts, z.stride(0), state.stride(0),
        P=shape.head_dim, GATED=kind != NORM_BEFORE_GATE.value, ROWS=rows, COLUMNS=columns,
        STAGES=_stages(columns, out), KEEPS=kept is not None, num_warps=8, **sizes,
    )  # fmt: skip
    if shape.eps is not None:
        normalize_tokens[tokens, groups](
            out, z, weights.norm, z.stride(0), shape.eps,
            INNER=inner, G=groups, BLOCK=group_block(shape), NORM=kind, num_warps=4,
        )  # fmt: skip
