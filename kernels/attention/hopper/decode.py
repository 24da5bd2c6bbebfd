"""Decode attention for Hopper in Gluon: split-KV with TMA copies, merged in the same launch.

The speed of a decode depends on how early its loads are issued and how many bytes are in flight. Before it computes,
a thread block issues TMA copies of its first key and value tiles to all stages, as many as fit in shared memory.
Its four warps then process tile by tile, and each stage is refilled once it is free. The 64 rows of the WGMMA are
the query heads of one key-value head, for one token or for several, so that speculation reads each key once.

`split_list` defines the splits and their partial results; the last split to finish merges them (`merge`).

Source: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.hopper import keys_on_m
from kernels.attention.hopper.merge import (
    DecodeConstants,
    merge_parts,
    queries_on_n,
    store_part,
    store_rows,
)
from kernels.attention.hopper.ping_pong import keep_rows
from kernels.attention.hopper.pipeline import (
    PART_COLUMNS,
    ROWS,
    first_kept,
    padded_dim,
    rows_of_token,
)
from kernels.attention.hopper.prefill import bulk_strides, exponents
from kernels.attention.hopper.producer import copy_tile, copy_tiles, rows_of_tile
from kernels.attention.hopper.scores import cap_scores, mask_scores, softmax_step
from kernels.attention.portable.split_list import SPLIT_FIELDS, SplitList
from kernels.attention.portable.tile import window_argument
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
from kernels.gpu.dependent_launch import dependent_launch, may_depend

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.select import Selection

FEW_ROWS = gl.constexpr(8)


@gluon.jit(do_not_specialize=["table_stride", "window"])
def decode(
    q_desc, k_desc, v_desc, out, lse, splits, arrivals, partial_out, partial_lse, block_table, table_stride,
    scale, window, softcap,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ROW_TILES: gl.constexpr, MERGE_ROWS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LSE: gl.constexpr, FEW: gl.constexpr, KEYS_ON_M: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute attention of one row tile over one split; program (split, key-value head, row tile).

    The heads of a split are adjacent programs, since they read adjacent bytes of the same blocks. If EARLY, copies of
    tiles without keys of the query tokens are issued before the wait for the preceding kernel, which writes those keys.
    """
    c = DecodeConstants(
        HEADS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_N, STAGES, ROW_TILES, MERGE_ROWS,
        WINDOW, SOFTCAP, LSE, FEW, KEYS_ON_M,
    )  # fmt: skip
    TILES: gl.constexpr = KV_HEADS * ROW_TILES
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    program = gl.program_id(0)
    tile = program % TILES
    kv_head = tile // ROW_TILES
    first_row = tile % ROW_TILES * ROWS
    record = splits + program // TILES * SPLIT_FIELDS
    seq = gl.load(record)
    q_start = gl.load(record + 1)
    q_len = gl.load(record + 2)
    num_keys = gl.load(record + 3)
    begin = gl.load(record + 4)
    end = gl.load(record + 5)
    number = gl.load(record + 6)
    count = gl.load(record + 7)
    if seq >= 0:
        counter = arrivals + seq * TILES + tile
        # The atomic add on the counter is faster if its line is already in the L2 cache.
        fetch_ahead(counter)
        acc, log_sum = attend_split(
            q_desc, k_desc, v_desc, block_table + seq.to(gl.int64) * table_stride, kv_head,
            first_row, q_start, q_len, num_keys, begin, end, scale, window, softcap, c, EARLY, PDL,
        )  # fmt: skip
        if count == 1:
            store_rows(out, lse, acc, log_sum, kv_head, first_row, q_start, q_len, c)
        else:
            store_part(partial_out, partial_lse, program, acc, log_sum, first_row, q_len, c)
            # The stores of all threads of this program must precede its arrival.
            gl.thread_barrier()
            if gl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                gl.store(counter, 0)  # for the next layer
                merge_parts(
                    out, lse, partial_out, partial_lse, program - number * TILES, count,
                    kv_head, first_row, q_start, q_len, c,
                )  # fmt: skip
    elif EARLY and PDL:
        gdc_wait()


@gluon.jit
def fetch_ahead(pointer):
    """Prefetch the cache line of an address into the L2 cache."""
    code: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    address = pointer.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(code, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend_split(
    q_desc, k_desc, v_desc, table, kv_head, first_row, q_start, q_len, num_keys, begin, end,
    scale, window, softcap, c, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute attention of a row tile over keys `begin` to `end`.

    If EARLY, the wait for the preceding kernel comes after the first copies.

    Returns:
        ([QUERIES, D], [QUERIES]): output of the split, and its log-sum-exp in units of log2.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.QUERIES, c.D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.BLOCK_N, c.D], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [c.QUERIES, c.D], q_layout)
    k = gl.allocate_shared_memory(dtype, [c.STAGES, c.BLOCK_N, c.D], kv_layout)
    v = gl.allocate_shared_memory(dtype, [c.STAGES, c.BLOCK_N, c.D], kv_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    mbarrier.init(q_full, count=1)
    for j in gl.static_range(c.STAGES):
        mbarrier.init(k_full.index(j), count=1)
        mbarrier.init(v_full.index(j), count=1)
    # The copies' proxy must see the barriers initialized.
    fence_async_shared()
    gl.thread_barrier()

    column = kv_head
    if c.HEAD_DIM == c.D:
        column = kv_head * c.D
    tiles = (end - begin + c.BLOCK_N - 1) // c.BLOCK_N
    kept = 0
    if c.WINDOW:
        kept = first_kept(q_len, num_keys, window)
    rows = ()
    for j in gl.static_range(c.STAGES):
        rows = rows + (rows_of_tile(table, 0, begin + j * c.BLOCK_N, kept, end, c),)  # type: ignore[assignment]
    # The first `early` tiles hold no key of the query tokens, so the preceding kernel does not write to them.
    early = 0
    if EARLY:
        early = gl.minimum(gl.maximum(num_keys - q_len - begin, 0) // c.BLOCK_N, tiles)
        for j in gl.static_range(c.STAGES):
            if j < early:
                copy_stage(k_desc, v_desc, rows[j], column, k_full, v_full, k, v, j, c)
        if PDL:
            gdc_wait()
    copy_queries(q_desc, q_start + first_row // c.BOX, kv_head, q_full, q, c)
    for j in gl.static_range(c.STAGES):
        if (early <= j) & (j < tiles):
            copy_stage(k_desc, v_desc, rows[j], column, k_full, v_full, k, v, j, c)

    scratch = ()
    if c.KEYS_ON_M:
        last_seen = num_keys - 1
        state = keys_on_m.initial_state(c)
        scratch = keys_on_m.make_scratch(dtype, c)
    else:
        row_layout: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
        token = (first_row + gl.arange(0, ROWS, layout=row_layout)) // c.BOX
        last_seen = num_keys - q_len + gl.minimum(token, q_len - 1)
        acc = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
        total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
        state = (m, total, acc)
    mbarrier.wait(q_full, 0)
    for i in range(tiles):
        start = begin + i * c.BLOCK_N
        stage = i % c.STAGES
        following = rows_of_tile(table, 0, start + c.STAGES * c.BLOCK_N, kept, end, c)
        tile = (k.index(stage), v.index(stage), k_full.index(stage), v_full.index(stage))
        phase = (i // c.STAGES) & 1
        if c.KEYS_ON_M:
            state = keys_on_m.attend_tile(
                state, q, tile, scratch, phase, start, last_seen, kept, scale, window, softcap, c
            )
        else:
            state = attend_tile(
                state, q, tile, phase, start, last_seen, kept, num_keys, scale, window, softcap, c
            )
        if i + c.STAGES < tiles:
            gl.thread_barrier()
            copy_stage(k_desc, v_desc, following, column, k_full, v_full, k, v, stage, c)
    m, total, acc = state
    if c.KEYS_ON_M:
        total, acc = keys_on_m.by_query(total, acc)
    saw_nothing = total == 0.0
    total = gl.where(saw_nothing, 1.0, total)
    inverse = gl.where(saw_nothing, 0.0, 1.0 / total)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return acc * inverse[:, None], gl.where(saw_nothing, float("-inf"), m + gl.log2(total))


@gluon.jit
def copy_queries(q_desc, token, kv_head, full, q, c):
    """Issue the copy of a tile's query rows; if FEW, of the first swizzle atom (8 rows) only.

    The other rows of shared memory then stay uninitialized, which affects only rows that are never stored.
    """
    dtype: gl.constexpr = q_desc.dtype
    if c.FEW or c.KEYS_ON_M:
        rows: gl.constexpr = c.QUERIES if c.KEYS_ON_M else FEW_ROWS
        mbarrier.expect(full, rows * c.D * c.OPERAND_BYTES)
        groups: gl.constexpr = c.QUERIES // rows
        parts: gl.constexpr = c.D // PART_COLUMNS
        boxes = q._reinterpret(dtype, [parts * groups, 1, rows, PART_COLUMNS], q_desc.layout)
        for part in gl.static_range(parts):
            where = [token, kv_head * c.GROUP, part * PART_COLUMNS]
            tma.async_copy_global_to_shared(q_desc, where, full, boxes.index(part * groups))
    else:
        mbarrier.expect(full, ROWS * c.D * c.OPERAND_BYTES)
        tokens: gl.constexpr = ROWS // c.BOX
        box = q._reinterpret(dtype, [tokens, c.BOX, c.D], q_desc.layout)
        tma.async_copy_global_to_shared(q_desc, [token, kv_head * c.GROUP, 0], full, box)


@gluon.jit
def copy_stage(k_desc, v_desc, rows, column, k_full, v_full, k, v, stage, c):
    """Issue the copies of a tile of keys and one of values to a stage."""
    k_full, v_full = k_full.index(stage), v_full.index(stage)
    if c.KEYS_ON_M:
        copy_tiles(k_desc, v_desc, rows, column, k_full, v_full, k.index(stage), v.index(stage), c)
    else:
        copy_tile(k_desc, rows, column, k_full, k.index(stage), c)
        copy_tile(v_desc, rows, column, v_full, v.index(stage), c)


@gluon.jit
def attend_tile(
    state, q, tile, phase, start, last_seen, kept, num_keys, scale, window, softcap, c
):  # fmt: skip
    """Process one tile of keys and values, (K, V, mbarrier of K, mbarrier of V), once its mbarriers complete."""
    k, v, k_full, v_full = tile
    dtype: gl.constexpr = q.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, c.O_LAYOUT, 2)
    m, total, acc = state
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    mbarrier.wait(k_full, phase)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    s = cap_scores(s, scale, softcap, c)
    s = mask_scores(s, start, last_seen, num_keys, window, c)
    e, fade, m = softmax_step(s, m, factor)
    total = total * fade + gl.sum(e, 1)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, c.O_LAYOUT), assert_trivial=True)
    acc = acc * fade[:, None]
    p = gl.convert_layout(e.to(dtype), p_layout, assert_trivial=True)
    mbarrier.wait(v_full, phase)
    if (start + c.BLOCK_N > num_keys) | (start < kept):
        keep_rows(v, kept - start, num_keys - start, c)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return m, total, acc


class HopperDecode:
    """Decode attention of one step on Hopper; shapes as in `kernels.decode_attention`.

    Attributes:
        keys_on_m: whether the products have keys on their M dimension instead of queries.
    """

    keys_on_m: ClassVar = False

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a decode's problem has a block size"
        assert problem.block_size is not None
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        box = rows_of_token(problem.group_size)
        self._problem = problem
        self._list = SplitList(problem, batch, selection, problem.max_query_tokens * box)
        self._table = batch.block_table
        self._scale, self._softcap = exponents(problem)
        dtype = getattr(gl, problem.dtype)
        page = min(problem.block_size, launch.block_n)
        few = problem.max_query_tokens == 1 and box <= FEW_ROWS.value
        columns = padded_dim(problem.head_dim)
        self._is_padded = columns > problem.head_dim
        q_box = [ROWS.value // box, box, columns]
        if self.keys_on_m:
            q_box = [1, queries_on_n(problem.group_size), PART_COLUMNS.value]
        elif few:
            q_box = [1, FEW_ROWS.value, PART_COLUMNS.value]
        k_box = [page, 1, PART_COLUMNS.value] if self._is_padded else [page, columns]
        self._q_box = q_box, gl.NVMMASharedLayout.get_default_for(q_box, dtype)
        self._k_box = k_box, gl.NVMMASharedLayout.get_default_for(k_box, dtype)
        self._constants: dict[str, Any] = {
            "HEADS": problem.num_heads,
            "KV_HEADS": problem.num_kv_heads,
            "GROUP": problem.group_size,
            "HEAD_DIM": problem.head_dim,
            "BLOCK_SIZE": problem.block_size,
            "PAGE": page,
            "BLOCK_N": launch.block_n,
            "STAGES": launch.num_stages,
            "ROW_TILES": self._list.row_tiles,
            "MERGE_ROWS": self._list.merge_rows,
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "LSE": problem.lse,
            "FEW": few,
            "KEYS_ON_M": self.keys_on_m,
            "EARLY": batch.keys_settled,
            "num_warps": launch.num_warps,
            **dependent_launch(may_depend(selection.arch, batch.seq_lens.device)),
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: an address or a stride of `q` is not a multiple of 16 bytes.
        """
        if q.shape[0] == 0:
            return
        if kv.numel() == 0:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
            return
        keys, values = kv.unbind(0)
        heads, head_dim = keys.shape[-2:]
        width = heads * head_dim
        kv_shape, kv_strides = [keys.numel() // width, width], [width, 1]
        if self._is_padded:
            kv_shape, kv_strides = [kv_shape[0], heads, head_dim], [width, head_dim, 1]
        q_strides = [*bulk_strides("q", q, q.stride()[:2]), 1]
        bulk_strides("kv", keys, (width, head_dim))
        decode[(self._list.num_programs,)](
            TensorDescriptor(q, list(q.shape), q_strides, *self._q_box),
            TensorDescriptor(keys, kv_shape, kv_strides, *self._k_box),
            TensorDescriptor(values, kv_shape, kv_strides, *self._k_box), out, out if lse is None else lse,
            self._list.splits, self._list.arrivals, self._list.partial_out, self._list.partial_lse,
            self._table, self._table.stride(0), self._scale, window_argument(self._problem), self._softcap,
            **self._constants,
        )  # fmt: skip


class KeysOnMDecode(HopperDecode):
    """The same for one query token of at most 16 heads a group, with keys on the M dimension of the products."""

    keys_on_m: ClassVar = True
