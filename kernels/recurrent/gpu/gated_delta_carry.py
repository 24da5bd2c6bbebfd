"""The gated delta rule for prompts: what carries the state from block to block, and the gated norm after it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent.gpu.gated_delta_blocks import INDICES, PRECISION, replace_last_inputs
from kernels.recurrent.gpu.tiles import find_prompt


@triton.jit(do_not_specialize=["rows", "num_prompts"], do_not_specialize_on_alignment=INDICES)
def carry_states(
    keys, values, scores, decays, projected, conv_state, state, cu_seqlens, positions, slots, kept_slots, out, rows,
    num_prompts, projected_stride, conv_stride, state_stride,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr, CHANNELS: tl.constexpr,
    STAGES: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Compute SLICE values of one head of a prompt, block after block; program (slice, head, prompt).

    The state and the new values are transposed, [values, keys] and [values, tokens]: so they are the left operands of
    the products that use them, which Hopper's tensor cores read from the registers that hold them.

    Each program writes CHANNELS channels of the convolution's state too, which `solve_blocks` has read.

    Args:
        projected: [T, q | k | v | z], of the tokens of prompts.
        conv_state, state, slots, cu_seqlens, positions, keys, values, scores, decays: as of `solve_blocks`.
        kept_slots: [T], of the tokens of prompts, where KEEPS; see `Segments`.
        state: [S, H, DK, DV] float32, of any distance between slots.
        out: [T, H, DV], of the tokens of prompts, before the norm.
        rows, num_prompts: R and Q of the step.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    part = tl.program_id(0)
    head = tl.program_id(1)
    prompt = tl.program_id(2)
    first, length, begin, count, number = find_prompt(
        cu_seqlens, positions, num_prompts, prompt, CHUNK, SEQS
    )
    read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
    write = tl.load(slots + 2 * (rows + prompt) + 1).to(tl.int64)
    dtype: tl.constexpr = keys.dtype.element_ty
    token = tl.arange(0, CHUNK)
    key = tl.arange(0, BK)
    value = part * SLICE + tl.arange(0, SLICE)
    at_state = head * (DK * DV) + key[None, :] * DV + value[:, None]
    exists = (key < DK)[None, :] & (value < DV)[:, None]
    carried = tl.load(state + read * state_stride + at_state, mask=exists & (read >= 0), other=0.0)
    at_key = token[:, None] * BK + key[None, :]
    at_score = token[:, None] * CHUNK + token[None, :]
    at_value = value[:, None] * CHUNK + token[None, :]
    it = (number * H + head).to(tl.int64)
    key_of = keys + it * (3 * CHUNK * BK)
    score_of = scores + it * (CHUNK * CHUNK)
    value_of = values + it * (BV * CHUNK)
    decay_of = decays + it
    for block in tl.range(0, count, num_stages=STAGES):
        w = tl.load(key_of + at_key)
        u = tl.load(value_of + at_value)
        q = tl.load(key_of + CHUNK * BK + at_key)
        k = tl.load(key_of + 2 * CHUNK * BK + at_key)
        score = tl.load(score_of + at_score)
        decay = tl.load(decay_of)
        rounded = carried.to(dtype)
        new = tl.dot(rounded, tl.trans(w), u.to(tl.float32), input_precision=PRECISION)
        o = tl.dot(rounded, tl.trans(q), input_precision=PRECISION)
        new = new.to(dtype)
        carried = tl.dot(new, k, carried * decay, input_precision=PRECISION)
        o = tl.dot(new, tl.trans(score), o, input_precision=PRECISION)
        place = tl.maximum(block * CHUNK - begin, 0) + token
        end = tl.minimum((block + 1) * CHUNK - begin, length)
        at_out = ((first + place).to(tl.int64)[None, :] * H + head) * DV + value[:, None]
        tl.store(out + at_out, o.to(dtype), mask=(place < end)[None, :] & (value < DV)[:, None])
        if KEEPS:
            kept = tl.load(kept_slots + first + end - 1).to(tl.int64)
            if kept >= 0:
                tl.store(state + kept * state_stride + at_state, carried, mask=exists)
        key_of += H * (3 * CHUNK * BK)
        score_of += H * (CHUNK * CHUNK)
        value_of += H * (BV * CHUNK)
        decay_of += H
    if (count > 0) & (write >= 0):
        tl.store(state + write * state_stride + at_state, carried, mask=exists)
        share = head * tl.num_programs(0) + part
        channel = share * CHANNELS + tl.arange(0, CHANNELS)
        replace_last_inputs(
            projected + first.to(tl.int64) * projected_stride, projected_stride, length,
            conv_state + read * conv_stride, conv_state + write * conv_stride, read >= 0, channel, channel < C, C, W,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_vectors"])
def gated_norm(
    out, z, norm, num_vectors, z_stride, eps,
    H: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Normalize vectors in place and multiply them by the SiLU of their gates; program (vectors).

    Args:
        out: [num_vectors, DV], the H heads of tokens.
        z: [T, H * DV].
        norm: [DV].
        num_vectors: T * H.
        eps: of the norm.
        BV: a power of two, at least DV.
    """
    vector = (tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)).to(tl.int64)[:, None]
    value = tl.arange(0, BV)[None, :]
    exists = (vector < num_vectors) & (value < DV)
    o = tl.load(out + vector * DV + value, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(z + vector // H * z_stride + vector % H * DV + value, mask=exists, other=0.0).to(
        tl.float32
    )
    weight = tl.load(norm + value, mask=value < DV, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(o * o, 1)[:, None] / DV + eps)
    tl.store(
        out + vector * DV + value,
        (o * scale * weight * silu(gate)).to(out.dtype.element_ty),
        mask=exists,
    )
