"""State that the warp roles of the one-pass backward share: constants, buffers, mbarriers, and which tiles they visit.

A thread block has one tile of keys and values and visits the tiles of queries that see some of them, for all query
heads of its key-value head. `full` mbarriers complete when the bytes of a stage have arrived; use n of a ring of S
stages has stage n % S and phase (n // S) & 1. The consumers release a stage at a named barrier of its own.
"""
# `aggregate` evaluates the annotations when the class is defined, so this module cannot postpone them.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from kernels.attention.hopper.pipeline import make_tiles

WARPS = gl.constexpr(8)
"""Warps of the consumers: two warp groups, which divide the rows of a product, or the columns if it has 64 rows."""
THREADS = gl.constexpr(32 * WARPS.value)
STATS = gl.constexpr(2)
"""Numbers of a query: log-sum-exp in units of log2, and rowsum(dO * O) - d lse."""
STATS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
"""Of the numbers of a tile, one after the other."""


@gluon.constexpr_function
def product_layout(rows, columns):
    """Return the register layout of a WGMMA accumulator, [rows, columns], in both warp groups of the consumers.

    With 64 rows the groups share the columns.
    """
    across = max(1, 128 // rows)
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[WARPS.value // across, across],
        instr_shape=[16, columns // across, 16],
    )


@aggregate
class BackwardConstants:
    """Compile-time constants of the one-pass backward.

    Attributes:
        HEADS: query heads.
        GROUP: query heads of a key-value head.
        D: head dim.
        BLOCK_M: queries of a tile.
        BLOCK_N: keys of a tile.
        STAGES: tiles of queries in flight.
        S_LAYOUT: of scores and weights, [BLOCK_N, BLOCK_M]: keys are rows.
        KV_LAYOUT: of the gradients of keys and values, [BLOCK_N, D].
        Q_LAYOUT: of a tile's part of the gradient of queries, [BLOCK_M, D].
        P_LAYOUT: of weights as the first operand of a product.
    """

    HEADS: gl.constexpr
    GROUP: gl.constexpr
    D: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    S_LAYOUT: gl.constexpr
    KV_LAYOUT: gl.constexpr
    Q_LAYOUT: gl.constexpr
    P_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, GROUP, D, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW) -> None:
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.D = gl.constexpr(D)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOW = gl.constexpr(WINDOW)
        self.S_LAYOUT = gl.constexpr(product_layout(BLOCK_N, BLOCK_M))
        self.KV_LAYOUT = gl.constexpr(product_layout(BLOCK_N, D))
        self.Q_LAYOUT = gl.constexpr(product_layout(BLOCK_M, D))
        self.P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, product_layout(BLOCK_N, D), 2))


@aggregate
class Tile:
    """The tile of keys of a thread block, and the lengths of its sequence.

    Attributes:
        first: its first key in the sequence.
        kv_head: the key-value head.
        start_q: first query of the sequence in the batch.
        num_q: queries of the sequence.
        start_k: its first key in the batch.
        num_k: keys of the sequence.
        scratch: index of the sequence's first tile of queries in the scratch memory.
    """

    first: gl.tensor
    kv_head: gl.tensor
    start_q: gl.tensor
    num_q: gl.tensor
    start_k: gl.tensor
    num_k: gl.tensor
    scratch: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, kv_head, start_q, num_q, start_k, num_k, scratch) -> None:
        self.first = first
        self.kv_head = kv_head
        self.start_q = start_q
        self.num_q = num_q
        self.start_k = start_k
        self.num_k = num_k
        self.scratch = scratch


@gluon.jit
def tile_of_program(cu_seqlens_q, cu_seqlens_k, c):
    """Return the tile of a program (tile of keys, key-value head, sequence)."""
    sequence = gl.program_id(2)
    start_q = gl.load(cu_seqlens_q + sequence)
    start_k = gl.load(cu_seqlens_k + sequence)
    num_q = gl.load(cu_seqlens_q + sequence + 1) - start_q
    num_k = gl.load(cu_seqlens_k + sequence + 1) - start_k
    scratch = (start_q + sequence * c.BLOCK_M) // c.BLOCK_M
    return Tile(
        gl.program_id(0) * c.BLOCK_N, gl.program_id(1), start_q, num_q, start_k, num_k, scratch
    )


@gluon.jit
def seeing_tiles(tile, window, c):
    """Return the tiles of queries that see some keys of a tile.

    Returns:
        (index of the first one, number of tiles, number of tiles at the start that need masks, number of tiles before
        those that the lower edge of a window masks).
    """
    offset = tile.num_k - tile.num_q
    begin = tile.first * 0
    stop = tile.num_q
    whole = begin
    if c.CAUSAL:
        begin = gl.maximum(tile.first - offset, 0) // c.BLOCK_M
        last = gl.maximum(tile.first + c.BLOCK_N - 1 - offset, 0)
        whole = (last + c.BLOCK_M - 1) // c.BLOCK_M
    if c.WINDOW:
        last = gl.minimum(tile.first + c.BLOCK_N, tile.num_k) - 1
        stop = gl.minimum(stop, gl.maximum(last + window - offset, 0))
    count = gl.maximum((stop + c.BLOCK_M - 1) // c.BLOCK_M - begin, 0)
    edge = gl.minimum(whole - begin, count)
    if tile.first + c.BLOCK_N > tile.num_k:
        edge = count
    inside = count
    if c.WINDOW:
        clear = gl.maximum(tile.first + window - offset, 0) // c.BLOCK_M
        inside = gl.minimum(gl.maximum(clear - begin, 0), count)
    return begin, count, edge, inside


@aggregate
class BackwardBuffers:
    """Shared-memory buffers and their mbarriers.

    Attributes:
        k: [1, BLOCK_N, D] keys; in the end the staging buffer of their gradient.
        v: [1, BLOCK_N, D] values, likewise.
        q: [STAGES, BLOCK_M, D] ring of tiles of queries.
        do: [STAGES, BLOCK_M, D] ring of the gradients of their outputs.
        stats: [STAGES, STATS * BLOCK_M] float32, ring of log-sum-exps and means.
        ds: [1, BLOCK_N, BLOCK_M] gradient of the scores of the present tile.
        kv_full: 2 mbarriers, of keys and values.
        q_full: mbarriers, one per stage, of queries and their stats.
        do_full: likewise of the gradients of outputs.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, stats, ds, kv_full, q_full, do_full) -> None:
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.stats = stats
        self.ds = ds
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full


@gluon.jit
def make_buffers(dtype: gl.constexpr, c):
    """Allocate all buffers and initialize their mbarriers; `dtype` is that of the operands."""
    k = make_tiles(dtype, 1, c.BLOCK_N, c.D)
    v = make_tiles(dtype, 1, c.BLOCK_N, c.D)
    q = make_tiles(dtype, c.STAGES, c.BLOCK_M, c.D)
    do = make_tiles(dtype, c.STAGES, c.BLOCK_M, c.D)
    ds = make_tiles(dtype, 1, c.BLOCK_N, c.BLOCK_M)
    stats = gl.allocate_shared_memory(gl.float32, [c.STAGES, STATS * c.BLOCK_M], STATS_LAYOUT)
    kv_full = _make_barriers(2)
    q_full = _make_barriers(c.STAGES)
    do_full = _make_barriers(c.STAGES)
    fence_async_shared()
    return BackwardBuffers(k, v, q, do, stats, ds, kv_full, q_full, do_full)


@gluon.jit
def _make_barriers(count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=1)
    return barriers
