"""State that the warp roles of the Blackwell prefill share: constants, buffers, mbarriers and work items.

    full and empty mbarriers    of the rings of queries, keys, values and items, as in `hopper.pipeline`
    s_full                      completes when the scores of a softmax group's next tile are in tensor memory
    p_full                      completes when the group has replaced them by weights and rescaled its output
    o_full                      completes when the group's weights have been multiplied with the values

Tensor memory has 512 columns: the scores of two groups, then their outputs. Weights lie over the scores that they are
made of, in half of their columns. Each of these buffers is used by one instruction after the other, so that no empty
mbarriers are needed: a group's scores are overwritten after its weights were multiplied, and its output after it has
made the weights of the next item.

Work items and the rest of the algorithm's tiles are those of the Hopper kernel.
"""
# `aggregate` evaluates the annotations when the class is defined, so this module cannot postpone them.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tensor_memory_descriptor,
)
from triton.language.core import _aggregate as aggregate

from kernels.attention.hopper.pipeline import make_tiles, range_of_rows, rows_of_token

ROWS = gl.constexpr(128)
"""Query rows of a softmax group: the M dimension of a tcgen05 product, and the lanes of tensor memory."""
GROUPS = gl.constexpr(2)
"""Softmax groups of a thread block."""
OUT_COLUMNS = gl.constexpr(64)
"""Columns of an output tile that are stored together: 64 two-byte elements are a swizzled row."""
FIELDS = gl.constexpr(5)
"""Fields of an item: head, first row, first query token, query tokens, keys."""
_ITEM_WORDS = gl.constexpr(8)
"""Integers of a posted item, as `hopper.pipeline.post` writes them."""
_ITEM_READERS = gl.constexpr(3)
"""Roles that read items: the softmax groups and the multiplying warp."""


@gluon.constexpr_function
def tensor_memory(columns):
    """Return the layout in tensor memory of a tile with `columns` columns."""
    return TensorMemoryLayout((ROWS.value, columns), col_stride=1)


@gluon.constexpr_function
def row_layout(columns):
    """Return the register layout of a tile of tensor memory: each thread of a group holds a row."""
    return get_tmem_reg_layout(gl.float32, [ROWS.value, columns], tensor_memory(columns), 4)


@aggregate
class Constants:
    """Compile-time constants of the kernel; sizes are in elements. Names are those of `hopper.pipeline.Constants`.

    Attributes:
        S_LAYOUT: register layout of a tile of scores.
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
    OPERAND_BYTES: gl.constexpr
    S_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEADS, GROUP, KEY_SHARES, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, STAGES, PAGED, CAUSAL, WINDOW,
        SOFTCAP, LSE,
    ) -> None:  # fmt: skip
        assert GROUPS.value * ROWS.value == BLOCK_M
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.KEY_SHARES = gl.constexpr(KEY_SHARES)
        self.BOX = gl.constexpr(rows_of_token(GROUP))
        self.D = gl.constexpr(HEAD_DIM)
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
        self.OPERAND_BYTES = gl.constexpr(2)
        self.S_LAYOUT = gl.constexpr(row_layout(BLOCK_N))


@aggregate
class Pipeline:
    """Buffers in shared and in tensor memory, and their mbarriers.

    Attributes:
        q: [GROUPS, ROWS, D] queries of an item, a part for each softmax group.
        k: [STAGES, BLOCK_N, D] ring of key tiles; `v` of value tiles.
        o: [GROUPS, ROWS, OUT_COLUMNS] staging buffers of the outputs.
        items: [2 * _ITEM_WORDS, 1] int32, ring of two posted items.
        votes: [GROUPS, 4] int32, whether a warp of a group has a row whose maximum has grown.
        scores: [GROUPS, ROWS, BLOCK_N] float32 in tensor memory.
        outputs: [GROUPS, ROWS, D] float32 in tensor memory.
        s_full: mbarriers, one per group, as are `p_full` and `o_full`.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    votes: gl.shared_memory_descriptor
    scores: tensor_memory_descriptor
    outputs: tensor_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor
    s_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, o, items, votes, scores, outputs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        item_full, item_empty, s_full, p_full, o_full,
    ) -> None:  # fmt: skip
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.items = items
        self.votes = votes
        self.scores = scores
        self.outputs = outputs
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.item_full = item_full
        self.item_empty = item_empty
        self.s_full = s_full
        self.p_full = p_full
        self.o_full = o_full


@gluon.jit
def make_pipeline(dtype: gl.constexpr, c):
    """Allocate all buffers and initialize their mbarriers."""
    q = make_tiles(dtype, GROUPS, ROWS, c.D)
    k = make_tiles(dtype, c.STAGES, c.BLOCK_N, c.D)
    v = make_tiles(dtype, c.STAGES, c.BLOCK_N, c.D)
    o = make_tiles(dtype, GROUPS, ROWS, OUT_COLUMNS)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    items = gl.allocate_shared_memory(gl.int32, [2 * _ITEM_WORDS, 1], words)
    votes = gl.allocate_shared_memory(gl.int32, [GROUPS, 4], words)
    scores = allocate_tensor_memory(gl.float32, [GROUPS, ROWS, c.BLOCK_N], tensor_memory(c.BLOCK_N))
    outputs = allocate_tensor_memory(gl.float32, [GROUPS, ROWS, c.D], tensor_memory(c.D))
    q_full, q_empty = _barriers(1, 1), _barriers(1, 1)
    k_full, k_empty = _barriers(c.STAGES, 1), _barriers(c.STAGES, 1)
    v_full, v_empty = _barriers(c.STAGES, 1), _barriers(c.STAGES, 1)
    item_full, item_empty = _barriers(2, 1), _barriers(2, _ITEM_READERS)
    s_full, p_full, o_full = _barriers(GROUPS, 1), _barriers(GROUPS, 1), _barriers(GROUPS, 1)
    fence_async_shared()
    gl.thread_barrier()
    return Pipeline(
        q, k, v, o, items, votes, scores, outputs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        item_full, item_empty, s_full, p_full, o_full,
    )  # fmt: skip


@gluon.jit
def _barriers(buffers: gl.constexpr, arrivals: gl.constexpr):
    """Initialize mbarriers that complete after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [buffers, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(buffers):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def weights_of(scores, dtype: gl.constexpr):
    """Return the weights [ROWS, BLOCK_N] that lie over a group's scores in tensor memory."""
    columns: gl.constexpr = scores.shape[1]
    both = scores._reinterpret(dtype, [ROWS, 2 * columns], tensor_memory(columns))
    return both.slice(0, columns)


@gluon.jit
def next_item(pipe, done, WARPS: gl.constexpr):
    """Wait for item number `done` of the loading warp, and read its fields with all `WARPS` warps of a role."""
    slot = done % 2
    mbarrier.wait(pipe.item_full.index(slot), (done // 2) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    fields = ()
    for i in gl.static_range(FIELDS):
        field = gl.max(pipe.items.index(slot * _ITEM_WORDS + i).load(layout), 0)
        fields = fields + (field,)  # type: ignore[assignment]  # Gluon cannot unpack
    gl.thread_barrier()
    mbarrier.arrive(pipe.item_empty.index(slot), count=1)
    return fields


@gluon.jit
def tiles_of_group(tiles, my_row, q_len, num_keys, window, c):
    """Return the key tiles that one softmax group's rows see, of the tiles of an item from last to first.

    Args:
        tiles: of the item, from `hopper.pipeline.key_range`.
        my_row: the group's first row.

    Returns:
        (number of the item's tiles to pass over first, and the four results of `range_of_rows`).
    """
    last, count, edge, inside = range_of_rows(my_row, ROWS, q_len, num_keys, window, c)
    count = gl.where(my_row < q_len * c.BOX, count, 0)
    passed = gl.where(count > 0, tiles[0] - last, 0)
    return passed, last, count, edge, inside


@gluon.jit
def fence_before_arrival():
    """Order this thread's accesses to tensor memory before its next arrival, which lets the tensor cores proceed."""
    code: gl.constexpr = "tcgen05.fence::before_thread_sync; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_after_wait():
    """Order this thread's next accesses to tensor memory after the mbarrier that it has waited for."""
    code: gl.constexpr = "tcgen05.fence::after_thread_sync; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
