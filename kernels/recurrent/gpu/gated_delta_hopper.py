"""The gated delta rule for prompts on Hopper: what carries the state from block to block, its products in flight.

The chain of a block is two products: the new values from the state, and the state from the new values. The two products
of the results run beside them, and while they run, the results of the block before are stored and the block after the
next one is copied. `kernels.recurrent.gpu.gated_delta_carry` does the same on other GPUs, where each product is waited
for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.recurrent.gpu.gated_delta_blocks import INDICES


@gluon.jit(do_not_specialize=["rows", "num_prompts"], do_not_specialize_on_alignment=INDICES)
def carry_in_flight(
    keys_desc, values_desc, scores_desc, decays, projected, conv_state, state, cu_seqlens, positions, slots, kept_slots,
    out, rows, num_prompts, projected_stride, conv_stride, state_stride,
    H: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, W: gl.constexpr, BK: gl.constexpr,
    BV: gl.constexpr, SLICE: gl.constexpr, CHUNK: gl.constexpr, SEQS: gl.constexpr, CHANNELS: gl.constexpr,
    STAGES: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """Compute SLICE values of one head of a prompt, block after block; program (slice, head, prompt).

    The arguments are those of `carry_states`, but for

    Args:
        keys_desc: [N * H * 3 * CHUNK, BK] in boxes of [CHUNK, BK].
        values_desc: [N * H * BV, CHUNK] in boxes of [SLICE, CHUNK].
        scores_desc: [N * H * CHUNK, CHUNK] in boxes of [CHUNK, CHUNK].
        SLICE: 64.
        STAGES: blocks in shared memory, at least 2.
    """
    dtype: gl.constexpr = keys_desc.dtype
    by_token: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BK], dtype)
    square_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    w = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], keys_layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], keys_layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], keys_layout)
    u = gl.allocate_shared_memory(dtype, [STAGES, SLICE, CHUNK], square_layout)
    scores = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], square_layout)
    results = gl.allocate_shared_memory(dtype, [CHUNK, SLICE], square_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    # The copies' proxy must see the barriers initialized.
    fence_async_shared()
    gl.thread_barrier()
    part = gl.program_id(0)
    head = gl.program_id(1)
    prompt = gl.program_id(2)
    first, length, begin, count, number = find_prompt(
        cu_seqlens, positions, num_prompts, prompt, CHUNK, SEQS
    )
    stages = (w, q, k, u, scores, full)
    it = number * H + head
    for s in gl.static_range(STAGES):
        copy_block(keys_desc, values_desc, scores_desc, stages, s, it + s * H, part, BV, s < count)
    read = gl.load(slots + 2 * (rows + prompt)).to(gl.int64)
    write = gl.load(slots + 2 * (rows + prompt) + 1).to(gl.int64)
    left_operand: gl.constexpr = gl.DotOperandLayout(0, by_token, 2)
    for_state: gl.constexpr = gl.DotOperandLayout(0, by_key, 2)
    at_state = head * (DK * DV) + part * SLICE
    left = DV - part * SLICE
    carried = load_state(state + read * state_stride + at_state, left, read >= 0, DK, DV, BK, SLICE)
    carried = gl.convert_layout(gl.permute(carried, (1, 0)), by_key)
    zeros = gl.zeros([SLICE, CHUNK], gl.float32, layout=by_token)
    head_out = out + (first.to(gl.int64) * H + head) * DV + part * SLICE
    decay_of = decays + it
    decay = gl.load(decay_of, mask=count > 0, other=0.0)
    kept = gl.to_tensor(-1).to(gl.int64)
    for block in range(count):
        stage = block % STAGES
        then = block + 1
        next_decay = gl.load(decay_of + gl.minimum(then, count - 1) * H)
        mbarrier.wait(full.index(stage), block // STAGES & 1)
        start = u.index(stage).load(by_token).to(gl.float32)
        if KEEPS:
            if kept >= 0:
                store_state(state + kept * state_stride + at_state, carried, left, DK, DV)
            last = gl.minimum(then * CHUNK - begin, length) - 1
            kept = gl.load(kept_slots + first + last).to(gl.int64)
        rounded = gl.convert_layout(carried.to(w.dtype), left_operand, assert_trivial=True)
        # Not while products run, for which the compiler would wait before it writes an accumulator.
        carried = carried * decay
        decay = next_decay
        new = warpgroup_mma(rounded, w.index(stage).permute((1, 0)), start, is_async=True)
        o = warpgroup_mma(
            rounded, q.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        following = block - 1 + STAGES
        # All warps have waited for the products of the block before, whose stage is filled again. No branch: the
        # compiler would wait for the products in flight.
        gl.thread_barrier()
        copy_block(
            keys_desc, values_desc, scores_desc, stages, following % STAGES, it + following * H, part, BV,
            (block > 0) & (following < count),
        )  # fmt: skip
        new = warpgroup_mma_wait(1, deps=(new,)).to(w.dtype)
        written = gl.convert_layout(new, left_operand, assert_trivial=True)
        o = warpgroup_mma(written, scores.index(stage).permute((1, 0)), o, is_async=True)
        written = gl.convert_layout(new, for_state, assert_trivial=True)
        carried = warpgroup_mma(written, k.index(stage), carried, is_async=True)
        o = warpgroup_mma_wait(1, deps=(o,))
        store_results(head_out, results, o.to(w.dtype), begin, length, block, left, H * DV)
        # Nothing is in flight between blocks, where the compiler moves accumulators to other registers.
        carried = warpgroup_mma_wait(0, deps=(carried,))
    if (count > 0) & (write >= 0):
        store_state(state + write * state_stride + at_state, carried, left, DK, DV)
        share = head * gl.num_programs(0) + part
        replace_last_inputs(
            projected + first.to(gl.int64) * projected_stride, projected_stride, length,
            conv_state + read * conv_stride, conv_state + write * conv_stride, read >= 0, share * CHANNELS,
            2 * G * DK + H * DV, W, CHANNELS,
        )  # fmt: skip


@gluon.jit
def find_prompt(
    cu_seqlens, positions, num_prompts, prompt, CHUNK: gl.constexpr, SEQS: gl.constexpr
):
    """Do what `kernels.recurrent.gpu.tiles.find_prompt` does."""
    it = gl.arange(0, SEQS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    start = gl.load(cu_seqlens + it, mask=it < num_prompts, other=0)
    length = gl.load(cu_seqlens + it + 1, mask=it < num_prompts, other=0) - start
    begin = (gl.load(positions + start, mask=length > 0, other=0) % CHUNK).to(gl.int32)
    count = gl.where(length > 0, (begin + length + CHUNK - 1) // CHUNK, 0)
    mine = it == prompt
    first = gl.sum(gl.where(mine, start, 0), 0)
    tokens = gl.sum(gl.where(mine, length, 0), 0)
    place = gl.sum(gl.where(mine, begin, 0), 0)
    blocks = gl.sum(gl.where(mine, count, 0), 0)
    return first, tokens, place, blocks, gl.sum(gl.where(it < prompt, count, 0), 0)


@gluon.jit
def copy_block(
    keys_desc, values_desc, scores_desc, stages, stage, it, part, BV: gl.constexpr, pred
):
    """Start to copy what a block and head, number `it` of all, need to shared memory."""
    w, q, k, u, scores, full = stages
    CHUNK: gl.constexpr = w.shape[1]
    BK: gl.constexpr = w.shape[2]
    SLICE: gl.constexpr = u.shape[1]
    bits: gl.constexpr = (
        3 * CHUNK * BK + SLICE * CHUNK + CHUNK * CHUNK
    ) * keys_desc.dtype.primitive_bitwidth
    barrier = full.index(stage)
    mbarrier.expect(barrier, bits // 8, pred=pred)
    row = it * (3 * CHUNK)
    tma.async_copy_global_to_shared(keys_desc, [row, 0], barrier, w.index(stage), pred=pred)
    tma.async_copy_global_to_shared(
        values_desc, [it * BV + part * SLICE, 0], barrier, u.index(stage), pred=pred
    )
    tma.async_copy_global_to_shared(keys_desc, [row + CHUNK, 0], barrier, q.index(stage), pred=pred)
    tma.async_copy_global_to_shared(
        keys_desc, [row + 2 * CHUNK, 0], barrier, k.index(stage), pred=pred
    )
    tma.async_copy_global_to_shared(
        scores_desc, [it * CHUNK, 0], barrier, scores.index(stage), pred=pred
    )


@gluon.jit
def places(left, DK: gl.constexpr, DV: gl.constexpr, BK: gl.constexpr, SLICE: gl.constexpr):
    """Return the places of the elements of a state, [keys, values], and which of them exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))[:, None]
    value = gl.arange(0, SLICE, layout=gl.SliceLayout(0, layout))[None, :]
    return key * DV + value, (key < DK) & (value < left)


@gluon.jit
def load_state(
    address,
    left,
    has_state,
    DK: gl.constexpr,
    DV: gl.constexpr,
    BK: gl.constexpr,
    SLICE: gl.constexpr,
):
    """Load a slice of a head's state, [BK, SLICE], of whose values the first `left` exist; zeros without a state."""
    place, exists = places(left, DK, DV, BK, SLICE)
    return gl.load(address + place, mask=exists & has_state, other=0.0)


@gluon.jit
def store_state(address, carried, left, DK: gl.constexpr, DV: gl.constexpr):
    """Store a slice of a head's state, given as [SLICE, BK] in the layout of products."""
    place, exists = places(left, DK, DV, carried.shape[1], carried.shape[0])
    gl.store(
        address + place,
        gl.convert_layout(gl.permute(carried, (1, 0)), place.type.layout),
        mask=exists,
    )


@gluon.jit
def store_results(to, results, o, begin, length, block, left, stride: gl.constexpr):
    """Store a block's results [values, tokens] in the layout of products; block -1 stores nothing.

    Args:
        to: the first value of the prompt's first token.
        left: number of values that exist.
        stride: distance of tokens.
    """
    SLICE: gl.constexpr = o.shape[0]
    CHUNK: gl.constexpr = o.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    results.permute((1, 0)).store(o)
    gl.thread_barrier()
    o = results.load(layout)
    token = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))[:, None]
    value = gl.arange(0, SLICE, layout=gl.SliceLayout(0, layout))[None, :]
    start = gl.maximum(block * CHUNK - begin, 0)
    tokens = gl.minimum((block + 1) * CHUNK - begin, length) - start
    to += start.to(gl.int64) * stride
    gl.store(to + (token * stride + value), o, mask=(token < tokens) & (value < left))


@gluon.jit
def replace_last_inputs(
    x,
    x_stride,
    length,
    before,
    after,
    has_state,
    first,
    C: gl.constexpr,
    W: gl.constexpr,
    CHANNELS: gl.constexpr,
):
    """Do what `kernels.recurrent.gpu.gated_delta_blocks.replace_last_inputs` does, for CHANNELS of C channels."""
    channel = first + gl.arange(0, CHANNELS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    exists = channel < C
    for tap in gl.static_range(W - 1):
        at = length - (W - 1) + tap
        value = gl.load(
            x + at.to(gl.int64) * x_stride + channel, mask=exists & (at >= 0), other=0.0
        )
        kept = gl.load(
            before + (at + W - 1) * C + channel, mask=exists & (at < 0) & has_state, other=0.0
        )
        # All threads have loaded what is replaced here: the inputs kept move forward.
        gl.thread_barrier()
        gl.store(after + tap * C + channel, value.to(gl.float32) + kept, mask=exists)
