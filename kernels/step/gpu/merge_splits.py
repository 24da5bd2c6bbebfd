"""The merge of the splits of the keys in the whole-step kernel.

All programs merge the splits of one row, which are a few KB. Of several rows, each program merges a share and publishes
it. The order of the sums is the same.

Source: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import publish, received, received_log
from kernels.step.gpu.products_of_rows import WIDTH, chunk_of_rows
from kernels.step.gpu.step_constants import CONSUMER_WARPS, MIXED, key_range
from kernels.step.gpu.tensor_products import store_vector


@gluon.jit
def weights_of_splits(logs):
    """Return the weights of splits, from their log-sum-exps in units of log2, and the inverse of their sum.

    The order of all operations is that of the splits, wherever they are merged.
    """
    highest = logs[0]
    for s in gl.static_range(1, len(logs)):
        highest = gl.maximum(highest, logs[s])
    weights = ()
    total = gl.zeros_like(highest)
    for s in gl.static_range(len(logs)):
        weight = gl.exp2(logs[s] - highest)
        total += weight
        weights = weights + (weight,)  # type: ignore[assignment]
    return weights, 1.0 / total


@gluon.constexpr_function
def block_layout(size):
    """Return the register layout of WIDTH elements as [WIDTH / size, size]: 8 warps divide the blocks."""
    lanes = min(32, size // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [CONSUMER_WARPS.value, 1], [1, 0])


@gluon.jit
def combine(ring, parts, logs, parity, seen, position, c):
    """Load the splits of all heads of one row, merge them and store the result in shared memory.

    A head is D / BLOCK_D blocks, so that all sizes are powers of two.
    """
    PER_HEAD: gl.constexpr = c.D // c.BLOCK_D
    ALL: gl.constexpr = c.HEADS * PER_HEAD
    BLOCKS: gl.constexpr = WIDTH // c.BLOCK_D
    CHUNKS: gl.constexpr = (c.HEADS * c.D + WIDTH - 1) // WIDTH
    layout: gl.constexpr = block_layout(c.BLOCK_D)
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    splits, _, _ = key_range(seen, position, 0, c)
    block = gl.arange(0, BLOCKS, layout=lines)
    within = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(0, layout))[None, :]
    # A warp loads the log-sum-exps of few splits: all programs read the same few cache lines at once.
    few: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [CONSUMER_WARPS, 1], [1, 0])
    split = gl.arange(0, c.SPLITS, layout=gl.SliceLayout(1, few))[:, None]
    block_of_few = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, few))[None, :]
    plane = ring.sums._reinterpret(
        gl.float32, [c.SPLITS, BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    rows = ring.sums._reinterpret(
        gl.float32, [c.SPLITS, BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    for i in gl.static_range(CHUNKS):
        # Blocks behind the last one have its log-sum-exps, but no numbers: they become zeros.
        head = gl.minimum(i * BLOCKS + block_of_few, ALL - 1) // PER_HEAD
        place_of_log = logs + ((parity * c.SPLITS + split) * c.HEADS + head)
        is_split = (split < splits) & (head >= 0)
        log = gl.load(place_of_log, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        number = i * BLOCKS + block
        loaded = ()
        for s in gl.static_range(c.SPLITS):
            place = part_places(parts, (parity * c.SPLITS + s) * ALL + number, within, c)
            exists = gl.expand_dims((number < ALL) & (s < splits), 1) & (within >= 0)
            exists = gl.max_constancy(exists, [1, 4])
            part = gl.load(place, mask=exists, other=0.0, cache_modifier=".cg")
            loaded = loaded + (part,)  # type: ignore[assignment]
        if i > 0:
            # All have read those before.
            gl.thread_barrier()
        plane.store(received_log(log, place_of_log, c))
        gl.thread_barrier()
        arrived = ()
        for s in gl.static_range(c.SPLITS):
            arrived = arrived + (rows.index(s).load(lines),)  # type: ignore[assignment]
        weights, inverse = weights_of_splits(arrived)
        mixed = gl.zeros([BLOCKS, c.BLOCK_D], gl.float32, layout=layout)
        for s in gl.static_range(c.SPLITS):
            place = part_places(parts, (parity * c.SPLITS + s) * ALL + number, within, c)
            part = received(loaded[s], place, 4, c).to(gl.float32)
            mixed = gl.fma(part, gl.expand_dims(weights[s], 1), mixed)
        mixed *= gl.expand_dims(inverse, 1)
        if c.OF_ROWS:
            wide = gl.reshape(mixed.to(ring.x.dtype), [1, WIDTH])
            chunk_of_rows(ring, i, c).store(wide)
        else:
            store_vector(ring, i, gl.reshape(mixed, [WIDTH]), c.FP8_WEIGHTS, c)
    gl.thread_barrier()


@gluon.jit
def part_places(parts, block, within, c):
    """Return the addresses of the elements of blocks of parts."""
    place = parts + (gl.expand_dims(block * c.BLOCK_D, 1) + within)
    return gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 16])


@gluon.constexpr_function
def mixed_layout(size):
    """Return the register layout of MIXED elements as [MIXED / size, size], of which a thread has 2."""
    lanes = min(32, size // 2)
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [CONSUMER_WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def mixed_tiles(size):
    """Return how many tiles of MIXED elements `size` elements are."""
    return -(-size // MIXED.value)


@gluon.jit
def mix_rows(parts, logs, mixed, parity, c):
    """Merge this program's share of the splits of several rows, and publish it.

    If each program merged all, as it does for one row, it would load the splits of all rows.
    """
    PER_HEAD: gl.constexpr = c.D // c.BLOCK_D
    BLOCKS: gl.constexpr = MIXED // c.BLOCK_D
    ALL: gl.constexpr = c.BATCH * c.HEADS * PER_HEAD
    layout: gl.constexpr = mixed_layout(c.BLOCK_D)
    of_block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, layout))
    within = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(0, layout))[None, :]
    for tile in range(gl.program_id(0), (ALL + BLOCKS - 1) // BLOCKS, gl.num_programs(0)):
        block = tile * BLOCKS + of_block
        exists = gl.expand_dims(block < ALL, 1) & (within >= 0)
        head = gl.minimum(block, ALL - 1) // PER_HEAD
        all_logs = ()
        loaded = ()
        for s in gl.static_range(c.SPLITS):
            first = parity * c.SPLITS + s
            place = logs + (first * c.BATCH * c.HEADS + head)
            all_logs = all_logs + (gl.load(place, cache_modifier=".cg"),)  # type: ignore[assignment]
            place = part_places(parts, first * ALL + block, within, c)
            part = gl.load(place, mask=exists, other=0.0, cache_modifier=".cg")
            loaded = loaded + (part,)  # type: ignore[assignment]
        arrived = ()
        for s in gl.static_range(c.SPLITS):
            place = logs + ((parity * c.SPLITS + s) * c.BATCH * c.HEADS + head)
            arrived = arrived + (received_log(all_logs[s], place, c),)  # type: ignore[assignment]
        weights, inverse = weights_of_splits(arrived)
        found = gl.zeros([BLOCKS, c.BLOCK_D], gl.float32, layout=layout)
        for s in gl.static_range(c.SPLITS):
            place = part_places(parts, (parity * c.SPLITS + s) * ALL + block, within, c)
            part = received(loaded[s], place, 2, c).to(gl.float32)
            found = gl.fma(part, gl.expand_dims(weights[s], 1), found)
        found *= gl.expand_dims(inverse, 1)
        place = gl.expand_dims(block * c.BLOCK_D, 1) + within
        publish(mixed, ALL * c.BLOCK_D, parity, place, found, exists, c)
