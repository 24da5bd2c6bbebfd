"""Attention of several sequences in the whole-step kernel: the merge of the splits.

A program attends one split of one key-value head of one sequence, as in a step of one (`kernels.step.gpu.attend`). All
programs then merge the splits of all heads of all sequences. Splits without keys have results too, so the merge does
not depend on the lengths of the sequences.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import received, received_log
from kernels.step.gpu.products_of_rows import WIDTH, chunk_of_rows
from kernels.step.gpu.ring import CONSUMER_WARPS, stages_of


@gluon.constexpr_function
def block_layout(batch, size):
    """Return the register layout of [batch, WIDTH / size, size]: 8 warps divide the sequences, then the blocks."""
    lanes = min(32, size // 8)
    warps = CONSUMER_WARPS.value // batch
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [batch, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def log_layout(batch):
    """Return the register layout of a split's log-sum-exps [batch, blocks]: each is loaded by one lane."""
    return gl.BlockedLayout([1, 1], [1, 32], [batch, CONSUMER_WARPS.value // batch], [1, 0])


@gluon.jit
def combine_rows(ring, parts, logs, parity, c):
    """Load the splits of all heads of all sequences, merge them and store the result in shared memory.

    A head is D / BLOCK_D blocks, so that all sizes are powers of two.
    """
    QUERIES: gl.constexpr = c.HEADS * c.D
    PER_HEAD: gl.constexpr = c.D // c.BLOCK_D
    BLOCKS: gl.constexpr = WIDTH // c.BLOCK_D
    layout: gl.constexpr = block_layout(c.BATCH, c.BLOCK_D)
    lines: gl.constexpr = gl.SliceLayout(2, layout)
    few: gl.constexpr = log_layout(c.BATCH)
    row = gl.arange(0, c.BATCH, layout=gl.SliceLayout(1, lines))[:, None]
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, lines))[None, :]
    within = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    row_of_few = gl.arange(0, c.BATCH, layout=gl.SliceLayout(1, few))[:, None]
    block_of_few = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, few))[None, :]
    first = parity * c.SPLITS
    for i in gl.static_range(stages_of(QUERIES)):
        # Blocks behind the last one have its log-sum-exps, but no numbers: they become zeros.
        head = gl.minimum(i * BLOCKS + block_of_few, c.HEADS * PER_HEAD - 1) // PER_HEAD
        number = i * BLOCKS + block
        exists = gl.expand_dims((number < c.HEADS * PER_HEAD) & (row >= 0), 2)
        exists = gl.max_constancy(exists & (within >= 0)[None, None, :], [1, 1, 8])
        all_logs = ()
        loaded = ()
        for s in gl.static_range(c.SPLITS):
            line = (first + s) * c.BATCH
            place = logs + ((line + row_of_few) * c.HEADS + head)
            all_logs = all_logs + (gl.load(place, cache_modifier=".cg"),)  # type: ignore[assignment]
            place = block_places(parts, (line + row) * QUERIES + number * c.BLOCK_D, within)
            loaded = loaded + (gl.load(place, mask=exists, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        arrived = ()
        highest = gl.full([c.BATCH, BLOCKS], float("-inf"), gl.float32, layout=few)
        for s in gl.static_range(c.SPLITS):
            place = logs + (((first + s) * c.BATCH + row_of_few) * c.HEADS + head)
            log = received_log(all_logs[s], place, c)
            highest = gl.maximum(highest, log)
            arrived = arrived + (log,)  # type: ignore[assignment]
        total = gl.zeros([c.BATCH, BLOCKS], gl.float32, layout=few)
        for s in gl.static_range(c.SPLITS):
            total += gl.exp2(arrived[s] - highest)
        mixed = gl.zeros([c.BATCH, BLOCKS, c.BLOCK_D], gl.float32, layout=layout)
        for s in gl.static_range(c.SPLITS):
            weight = gl.convert_layout(gl.exp2(arrived[s] - highest) / total, lines)
            line = (first + s) * c.BATCH
            place = block_places(parts, (line + row) * QUERIES + number * c.BLOCK_D, within)
            part = received(loaded[s], place, 4, c).to(gl.float32)
            mixed += part * gl.expand_dims(weight, 2)
        wide = gl.reshape(mixed.to(ring.x.dtype), [c.BATCH, WIDTH])
        chunk_of_rows(ring, i, c).store(wide)
    gl.thread_barrier()


@gluon.jit
def block_places(parts, first, within):
    """Return the addresses of blocks' elements, for loads of 16 bytes; `first` is [BATCH, blocks]."""
    place = parts + (gl.expand_dims(first, 2) + within[None, None, :])
    return gl.multiple_of(gl.max_contiguous(place, [1, 1, 8]), [1, 1, 16])
