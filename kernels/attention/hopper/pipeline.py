"""State that the warp roles of a Hopper prefill kernel share: constants, buffers, mbarriers and work items.

Each stage of a ring of buffers has two mbarriers: `full` completes when the stage's bytes have arrived, `empty` when
every consumer has released it. Each role counts its uses of a ring; the count gives the stage and the phase:

    use n of a ring of S stages    stage n % S, phase (n // S) & 1

The key tiles of an item are visited from last to first, so that the tiles that need masks come first.
"""
# `aggregate` evaluates the annotations when the class is defined, so this module cannot postpone them.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)
"""Query rows of a consumer: the M dimension of a WGMMA."""
PART_COLUMNS = gl.constexpr(64)
"""Width of a swizzled row: 64 two-byte elements are 128 bytes. Eight such rows form one contiguous swizzle atom."""
_ITEM_WORDS = gl.constexpr(8)
"""Integers of a posted item: its fields, rounded up to a power of two."""
_WIDEST_OWN_RANGE = 128
"""Largest head dim for which `OWN_RANGE` is set."""


@gluon.constexpr_function
def accumulator_layout(columns, operand_bytes=2):
    """Return the register layout of a WGMMA accumulator with `columns` columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32 // operand_bytes]
    )


@gluon.constexpr_function
def rows_of_token(group):
    """Return the tile rows of a query token with `group` heads per key-value head, a power of two."""
    return 1 << (group - 1).bit_length()


@gluon.constexpr_function
def heads_of_tile(group):
    """Return how many query heads of a key-value head share a tile, of a group of them.

    All, if they leave at most an eighth of the rows of `rows_of_token` unused; else as many as divide the group into
    powers of two. Tiles of the same key-value head then read the same keys, from the second-level cache.
    """
    return group if 8 * group >= 7 * rows_of_token(group) else group & -group


@gluon.constexpr_function
def padded_dim(head_dim):
    """Return the head dim rounded up to 64, 128 or 256; the hardware fills copies up with zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


@aggregate
class Constants:
    """Compile-time constants of a prefill kernel; sizes are in elements.

    Attributes:
        GROUP: query heads of a tile, `heads_of_tile`.
        KEY_SHARES: tiles of a query token for a key-value head, which attend the same keys.
        BOX: `GROUP` rounded up to a power of two: the tile rows of one query token.
        D: columns of a tile, `padded_dim`.
        HEAD_DIM: of those, the elements of a head.
        PAGE: keys of one TMA copy.
        OWN_OUTPUT: whether outputs are not staged in the queries' buffer: they have a staging buffer of their own, or
            are not staged.
        OPERAND_BYTES: bytes of an element of a WGMMA operand; 1 for FP8, whose values are transposed.
        QUERY_STAGES: stages of the query ring. Two in FP8, which need the memory of one in half precision, and with
            OWN_OUTPUT in the batch-invariant kernel: an item of a decode has so few keys that it would wait for its
            queries.
        CONSUMERS: consumer warp groups. The output of a single one, which has only decodes, is not staged.
        OWN_RANGE: whether a consumer skips tiles that none of its rows sees; larger head dims lack the registers.
        PART_TILES: key tiles of a part in the batch-invariant kernel, 0 in others. The multiplications and additions
            to fuse are then explicit, because the compiler's choice depends on the code around.
    """

    HEADS: gl.constexpr
    GROUP: gl.constexpr
    KEY_SHARES: gl.constexpr
    BOX: gl.constexpr
    D: gl.constexpr
    HEAD_DIM: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    PAGE: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    PAGED: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    LSE: gl.constexpr
    OWN_OUTPUT: gl.constexpr
    OPERAND_BYTES: gl.constexpr
    QUERY_STAGES: gl.constexpr
    OWN_RANGE: gl.constexpr
    CONSUMERS: gl.constexpr
    PART_TILES: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    P_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEADS, GROUP, KEY_SHARES, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, STAGES, PAGED, CAUSAL, WINDOW,
        SOFTCAP, LSE, OWN_OUTPUT, OPERAND_BYTES, PART_TILES=0,
    ) -> None:  # fmt: skip
        self.HEADS = gl.constexpr(HEADS)
        D = padded_dim(HEAD_DIM)
        self.GROUP = gl.constexpr(GROUP)
        self.KEY_SHARES = gl.constexpr(KEY_SHARES)
        self.BOX = gl.constexpr(rows_of_token(GROUP))
        self.D = gl.constexpr(D)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.PAGE = gl.constexpr(PAGE)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.PAGED = gl.constexpr(PAGED)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOW = gl.constexpr(WINDOW)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.LSE = gl.constexpr(LSE)
        self.OWN_OUTPUT = gl.constexpr(OWN_OUTPUT)
        self.CONSUMERS = gl.constexpr(BLOCK_M // ROWS.value)
        self.OPERAND_BYTES = gl.constexpr(OPERAND_BYTES)
        two = OPERAND_BYTES == 1 or (PART_TILES > 0 and OWN_OUTPUT)
        self.QUERY_STAGES = gl.constexpr(2 if two else 1)
        self.PART_TILES = gl.constexpr(PART_TILES)
        self.OWN_RANGE = gl.constexpr(D <= _WIDEST_OWN_RANGE)
        self.S_LAYOUT = gl.constexpr(accumulator_layout(BLOCK_N, OPERAND_BYTES))
        self.O_LAYOUT = gl.constexpr(accumulator_layout(D, OPERAND_BYTES))
        self.P_LAYOUT = gl.constexpr(
            gl.DotOperandLayout(0, accumulator_layout(D, OPERAND_BYTES), 4 // OPERAND_BYTES)
        )


@aggregate
class Pipeline:
    """Shared-memory buffers and their mbarriers.

    Attributes:
        q: [QUERY_STAGES * (1, 2 or 4), ROWS, D] ring of items' queries, a part for each consumer.
        k: [STAGES, BLOCK_N, D] ring of key tiles.
        v: [STAGES, BLOCK_N, D] ring of value tiles; [STAGES, D, BLOCK_N] in FP8.
        o: [2 or 4, ROWS, D] staging buffer of the outputs; `q` itself if both do not fit or nothing is staged.
        items: [2 * _ITEM_WORDS, 1] int32, ring of two posted items.
        q_full: mbarriers, one per stage, as are the other attributes that end in _full or _empty.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, o, items, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full,
        item_empty,
    ) -> None:  # fmt: skip
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.items = items
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.item_full = item_full
        self.item_empty = item_empty


@gluon.jit
def make_pipeline(operand: gl.constexpr, output: gl.constexpr, c):
    """Allocate all buffers and initialize their mbarriers; `operand` and `output` are element types."""
    parts: gl.constexpr = 4 if c.CONSUMERS == 3 else c.CONSUMERS
    q = make_tiles(operand, c.QUERY_STAGES * parts, ROWS, c.D)
    k = make_tiles(operand, c.STAGES, c.BLOCK_N, c.D)
    if c.OPERAND_BYTES == 1:
        v = make_tiles(operand, c.STAGES, c.D, c.BLOCK_N)
    else:
        v = make_tiles(operand, c.STAGES, c.BLOCK_N, c.D)
    o = q
    if c.OWN_OUTPUT and c.CONSUMERS > 1:
        o = make_tiles(output, parts, ROWS, c.D)
    item_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    items = gl.allocate_shared_memory(gl.int32, [2 * _ITEM_WORDS, 1], item_layout)
    q_full, q_empty = make_barriers(c.QUERY_STAGES, c)
    k_full, k_empty = make_barriers(c.STAGES, c)
    v_full, v_empty = make_barriers(c.STAGES, c)
    item_full, item_empty = make_barriers(2, c)
    fence_async_shared()
    return Pipeline(
        q, k, v, o, items, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty
    )


@gluon.jit
def make_tiles(dtype: gl.constexpr, tiles: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Allocate tiles in the swizzled layout that WGMMA reads and TMA writes."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [tiles, rows, columns], layout)


@gluon.jit
def make_barriers(buffers: gl.constexpr, c):
    """Initialize the full and the empty mbarrier of each stage of a ring."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [buffers, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [buffers, 1], layout)
    for i in gl.static_range(buffers):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=c.CONSUMERS)
    return full, empty


@gluon.jit
def post(pipe, done, fields):
    """Post item number `done` to the consumers; a head of -1 stops them.

    The fields are head, first row, first query token, query tokens, keys, and those that only some kernels have.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = done % 2
    mbarrier.wait(pipe.item_empty.index(slot), ((done // 2) & 1) ^ 1)
    zero = gl.zeros([1], gl.int32, layout=layout)
    for i in gl.static_range(len(fields)):
        pipe.items.index(slot * _ITEM_WORDS + i).store(zero + fields[i])
    gl.thread_barrier()
    mbarrier.arrive(pipe.item_full.index(slot), count=1)


@gluon.jit
def next_item(pipe, done, FIELDS: gl.constexpr):
    """Wait for item number `done` of the producer, read its fields, and release them."""
    fields = peek_item(pipe, done, FIELDS)
    release_item(pipe, done)
    return fields


@gluon.jit
def peek_item(pipe, done, FIELDS: gl.constexpr):
    """Wait for item number `done` of the producer, and read its fields; `release_item` must follow."""
    slot = done % 2
    mbarrier.wait(pipe.item_full.index(slot), (done // 2) & 1)
    fields = ()
    for i in gl.static_range(FIELDS):
        field = _read(pipe.items.index(slot * _ITEM_WORDS + i))
        fields = fields + (field,)  # type: ignore[assignment]  # Gluon cannot unpack
    return fields


@gluon.jit
def release_item(pipe, done):
    """Let the producer overwrite the fields of item number `done`."""
    gl.thread_barrier()
    mbarrier.arrive(pipe.item_empty.index(done % 2), count=1)


@gluon.jit
def _read(field):
    """Read one field of an item."""
    return gl.max(field.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def first_kept(q_len, num_keys, window):
    """Return the first key of a sequence in any query's window; blocks before it may have been freed."""
    return gl.maximum(num_keys - q_len - window + 1, 0)


@gluon.jit
def key_range(first_row, q_len, num_keys, window, c):
    """Return the key tiles of a row tile, counted from the last to the first.

    Returns:
        (index of the last tile + 1, number of tiles, number of tiles at the end that need masks, number of tiles
        before those that the window's lower edge masks).
    """
    return range_of_rows(first_row, c.BLOCK_M, q_len, num_keys, window, c)


@gluon.jit
def range_of_rows(first_row, rows: gl.constexpr, q_len, num_keys, window, c):
    """Return the key tiles of some rows, as `key_range` does for all rows of a tile."""
    history = num_keys - q_len
    lowest = history + first_row // c.BOX
    highest = history + gl.minimum((first_row + rows - 1) // c.BOX, q_len - 1)
    stop = num_keys
    seen_by_all = num_keys
    if c.CAUSAL:
        stop = gl.maximum(gl.minimum(highest + 1, num_keys), 0)
        seen_by_all = gl.maximum(gl.minimum(lowest + 1, num_keys), 0)
    last = (stop + c.BLOCK_N - 1) // c.BLOCK_N
    first = last * 0
    clear = first
    if c.WINDOW:
        first = gl.maximum(lowest - window + 1, 0) // c.BLOCK_N
        clear = (gl.maximum(highest - window + 1, 0) + c.BLOCK_N - 1) // c.BLOCK_N
    count = gl.maximum(last - first, 0)
    edge = gl.minimum(gl.maximum(last - seen_by_all // c.BLOCK_N, 1), count)
    inside = gl.maximum(gl.minimum(last - clear, count), edge)
    return last, count, edge, inside


@gluon.jit
def own_tiles(tiles, my_row, q_len, num_keys, window, c):
    """Return the key tiles of an item that one consumer's rows see.

    Returns:
        (number of tiles to skip at the end of the keys, number of tiles to skip at their start, and the four results
        of `key_range` for the tiles between them).
    """
    last, count, edge, inside = tiles
    passed = 0
    left = 0
    if c.OWN_RANGE:
        all_tiles = count
        end = last
        last, count, edge, inside = range_of_rows(my_row, ROWS, q_len, num_keys, window, c)
        count = gl.where(my_row < q_len * c.BOX, count, 0)
        passed = gl.where(count > 0, end - last, 0)
        left = all_tiles - passed - count
    return passed, left, last, count, edge, inside


@gluon.jit
def output_row(row, q_start, head, c):
    """Return the output row of a tile row of a sequence."""
    return (q_start + row // c.BOX).to(gl.int64) * c.HEADS + head * c.GROUP + row % c.BOX


@gluon.jit
def row_exists(row, q_len, c):
    """Whether a tile row belongs to a query head of the sequence."""
    exists = row // c.BOX < q_len
    if c.BOX != c.GROUP:
        exists = exists & (row % c.BOX < c.GROUP)
    return exists
