"""Warp-specialized prefill attention for Hopper in Gluon.

    producer    one warp: fetches the next work item and issues TMA copies of its queries, keys and values to
                shared memory, a few stages ahead of the consumers (`producer`)
    consumers   two or three warp groups of 64 query rows each, in ping-pong: the softmax of one overlaps the
                WGMMAs of another; each issues the score WGMMA of the next tile before the output WGMMA of the
                current one (`consumer`)

Thread blocks are persistent and fetch items from a global counter (a dynamic tile scheduler). Short items come last,
so that ragged batches end evenly, and the start of an item overlaps the end of the item before it. Items are the
tiles of `work_items`, listed once per step, times the groups of query heads that share tiles.

This module launches the kernel; `pipeline` defines the state that the warp roles share.

Source: Shah et al., "FlashAttention-3", 2024, for the warp roles, the ping-pong and the overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.hopper.consumer import consume
from kernels.attention.hopper.pipeline import (
    PART_COLUMNS,
    ROWS,
    Constants,
    heads_of_tile,
    make_pipeline,
    padded_dim,
    rows_of_token,
)
from kernels.attention.hopper.producer import produce
from kernels.attention.hopper.work_items import Items, plan_items
from kernels.attention.portable.tile import window_argument
from kernels.errors import ShapeError

if TYPE_CHECKING:
    from kernels.attention.launch import LaunchConfig
    from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
    from kernels.attention.select import Selection

_MOST_ITEMS = 1 << 30
"""Most items: the counter has 32 bits, and each thread block increments it once past the end."""
_ALIGNMENT = 16
"""Bytes; TMA addresses and strides must be multiples of it."""
_LARGEST_INT32 = (1 << 31) - 1


@gluon.jit(do_not_specialize=["num_entries", "late_heads", "num_items", "table_stride", "window"])
def prefill(
    q_desc, k_desc, v_desc, o_desc, out, lse, tiles, block_table, counter, table_stride, num_entries,
    late_heads, num_items, k_head_stride, scale, window, softcap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, KEY_SHARES: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, LSE: gl.constexpr, OWN_OUTPUT: gl.constexpr,
):  # fmt: skip
    """Process all items; one program per SM.

    Shapes as in `kernels.prefill_attention`; `scale` and `softcap` as `exponents` returns them, `tiles` as in
    `work_items.list_items`, `counter` as in `producer.produce`.
    """
    c = Constants(
        HEADS, GROUP, KEY_SHARES, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, STAGES, PAGED, CAUSAL, WINDOW,
        SOFTCAP, LSE, OWN_OUTPUT, q_desc.dtype.primitive_bitwidth // 8,
    )  # fmt: skip
    pipe = make_pipeline(q_desc.dtype, o_desc.dtype, c)
    supply = (
        pipe, q_desc, k_desc, v_desc, tiles, block_table, table_stride, counter, num_entries,
        late_heads, num_items, k_head_stride, window, c,
    )  # fmt: skip
    # Registers per thread (setmaxnreg): 64 Ki per SM divided over the warp groups, in steps of 8.
    if c.CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(0), c)),
            (consume, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(1), c)),
            (produce, supply),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(0), c)),
            (consume, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(1), c)),
            (consume, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(2), c)),
            (produce, supply),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


class HopperPrefill:
    """Prefill attention of one step on Hopper; shapes as in `kernels.prefill_attention`."""

    _BOX: ClassVar[tuple[int, int | None]] = ROWS.value, None
    """As for `TileBoxes`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        group = heads_of_tile(problem.group_size)
        self._problem = problem
        self._work = plan_work(problem, batch, group, launch.block_m, selection.arch.num_sms)
        self._scale, self._softcap = exponents(problem)
        self._boxes = TileBoxes(problem, group, launch.block_n, *self._BOX)
        self._constants = {
            **shape_constants(problem, group, launch),
            "PAGED": problem.block_size is not None,
            "CAUSAL": problem.causal,
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "LSE": problem.lse,
            "num_warps": launch.num_warps,
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: an address or a stride is not a multiple of 16 bytes, or the key-value heads are too far apart.
        """
        if attends_nothing(q, kv, out, lse):
            return
        *descriptors, head_stride = self._boxes.describe(q, kv, out)
        work = self._work
        self._kernel()[work.grid](
            *descriptors, out, out if lse is None else lse, work.items.tiles, work.items.table, work.counter,
            work.items.table.stride(0), work.items.num_entries, work.items.late_heads, work.num_items,
            head_stride, self._scale, window_argument(self._problem), self._softcap,
            **self._constants,
        )  # fmt: skip

    def _kernel(self) -> Any:  # noqa: ANN401 - of Triton
        return prefill


def shape_constants(problem: AttentionProblem, group: int, launch: LaunchConfig) -> dict[str, Any]:
    """Return the constants of a kernel that follow from its shapes; a tile has `group` heads of a key-value head."""
    return {
        "HEADS": problem.num_heads,
        "GROUP": group,
        "KEY_SHARES": problem.group_size // group,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_SIZE": problem.block_size or 1,
        "PAGE": _page(problem, launch.block_n),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "STAGES": launch.num_stages,
        # With a head dim of 256, shared memory cannot hold queries, output and two stages of keys and values. A single
        # consumer stages no output.
        "OWN_OUTPUT": padded_dim(problem.head_dim) <= 128 or launch.block_m == ROWS.value,
    }


def _page(problem: AttentionProblem, block_n: int) -> int:
    """Return the keys of one TMA copy."""
    return min(problem.block_size or block_n, block_n)


class TileBoxes:
    """The boxes that TMA copies: rows of queries or output, and the keys of a block of the cache or of a tile."""

    def __init__(
        self,
        problem: AttentionProblem,
        group: int,
        block_n: int,
        rows: int = ROWS.value,
        out_columns: int | None = None,
    ) -> None:
        """Describe the boxes of a problem.

        Args:
            problem: heads, head dim, dtype and block size.
            group: as in `shape_constants`.
            block_n: keys of a tile.
            rows: of queries or output.
            out_columns: of output; None for all.
        """
        box, columns = rows_of_token(group), padded_dim(problem.head_dim)
        page = _page(problem, block_n)
        self._is_padded = columns > problem.head_dim
        dtype = getattr(gl, problem.dtype)
        q_box = [rows // box, box, columns]
        out_box = [rows // box, box, out_columns or columns]
        k_box = [page, 1, PART_COLUMNS.value] if self._is_padded else [page, columns]
        self._q_box = q_box, gl.NVMMASharedLayout.get_default_for(q_box, dtype)
        self._k_box = k_box, gl.NVMMASharedLayout.get_default_for(k_box, dtype)
        self._out_box = out_box, gl.NVMMASharedLayout.get_default_for(out_box, dtype)

    def describe(self, q: Tensor, kv: Tensor, out: Tensor) -> tuple[Any, ...]:
        """Return the descriptors of queries, keys, values and output, and the stride of key-value heads.

        Raises:
            ShapeError: an address or a stride is not a multiple of 16 bytes, or the key-value heads are too far apart.
        """
        cache = describe_cache(kv)
        head_stride = cache.head_stride
        kv_shape, kv_strides = [cache.num_rows, cache.width], [cache.token_stride, 1]
        if self._is_padded:
            heads, head_dim = cache.keys.shape[-2:]
            kv_shape = [cache.num_rows, heads, head_dim]
            kv_strides = [cache.token_stride, head_stride, 1]
            head_stride = 1
        q_strides = [*bulk_strides("q", q, q.stride()[:2]), 1]
        out_strides = [*bulk_strides("out", out, out.stride()[:2]), 1]
        return (
            TensorDescriptor(q, list(q.shape), q_strides, *self._q_box),
            TensorDescriptor(cache.keys, kv_shape, kv_strides, *self._k_box),
            TensorDescriptor(cache.values, kv_shape, kv_strides, *self._k_box),
            TensorDescriptor(out, list(out.shape), out_strides, *self._out_box),
            head_stride,
        )


@dataclass(frozen=True, slots=True)
class WorkList:
    """The work items of a step and the counter of the tile scheduler.

    Attributes:
        items: the list.
        counter: [2] int32, items fetched and thread blocks finished; 0 before and after a launch.
        num_items: entries times the tiles of a query token.
        grid: thread blocks.
    """

    items: Items
    counter: Tensor
    num_items: int
    grid: tuple[int]


def plan_work(
    problem: AttentionProblem,
    batch: PagedBatch | PackedBatch,
    group: int,
    block_m: int,
    num_sms: int,
) -> WorkList:
    """List a step's work in tiles of `block_m` rows, for one thread block per SM.

    A tile has `group` query heads of a key-value head.

    Raises:
        ShapeError: there are more items than a 32-bit counter holds.
    """
    items = plan_items(
        batch,
        rows_of_token(group),
        block_m,
        num_heads=problem.num_heads // group,
        num_sms=num_sms,
        causal=problem.causal,
        window=problem.sliding_window,
    )
    num_items = items.num_entries * (problem.num_heads // group)
    if num_items > _MOST_ITEMS:
        raise ShapeError(
            f"{batch.num_tokens} tokens of {batch.num_seqs} sequences are {num_items} tiles; at most "
            f"{_MOST_ITEMS} can be listed"
        )
    counter = torch.zeros(2, dtype=torch.int32, device=items.tiles.device)
    return WorkList(items, counter, num_items, (min(num_sms, num_items),))


def attends_nothing(q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None) -> bool:
    """Whether a step has no queries or no keys and needs no launch; if so, write `out` and `lse`."""
    if q.shape[0] and kv.numel():
        return False
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    return True


class CacheRows(NamedTuple):
    """Keys and values of a cache, or packed ones, as TMA addresses them: rows of all heads of a token.

    Attributes:
        keys: the keys; `values` the values, of the same shape and strides.
        num_rows: tokens.
        width: elements from the start of a token's first head to the end of its last.
        token_stride: elements between tokens.
        head_stride: elements between heads.
    """

    keys: Tensor
    values: Tensor
    num_rows: int
    width: int
    token_stride: int
    head_stride: int


def describe_cache(kv: Tensor) -> CacheRows:
    """Describe keys and values, [2, N, S, K, D] or [2, tokens, K, D], for TMA.

    Raises:
        ShapeError: an address or a stride is not a multiple of 16 bytes, or the key-value heads are too far apart.
    """
    keys, values = kv.unbind(0)
    token_stride, head_stride = bulk_strides("keys", keys, keys.stride()[-3:-1])
    bulk_strides("values", values, values.stride()[-3:-1])
    heads, head_dim = keys.shape[-2:]
    width = (heads - 1) * head_stride + head_dim
    if width > _LARGEST_INT32:
        raise ShapeError(
            f"the {heads} heads of kv lie {head_stride} elements apart; the last may end at most "
            f"{_LARGEST_INT32} behind the start of the first"
        )
    num_rows = keys.numel() // (heads * head_dim)
    return CacheRows(keys, values, num_rows, width, token_stride, head_stride)


def exponents(problem: AttentionProblem) -> tuple[float, float]:
    """Return the kernel's scale and softcap arguments, in units of log2.

        without a softcap    s * scale
        with a softcap       softcap - 2 * softcap / (exp2(s * scale) + 1)

    The second form is softcap * tanh, computed with the hardware's base-2 exponential.
    """
    scale, softcap = problem.softmax_scale * math.log2(math.e), 0.0
    if problem.softcap is not None:
        scale, softcap = 2 * scale / problem.softcap, problem.softcap * math.log2(math.e)
    return scale, softcap


def bulk_strides(name: str, tensor: Tensor, strides: tuple[int, ...]) -> tuple[int, int]:
    """Check that TMA can address a tensor.

    Args:
        name: for the message.
        tensor: [tokens, heads, D], or blocks of such.
        strides: of tokens and heads, elements; the stride of a dimension of size 1 may be any.

    Returns:
        The strides for its descriptor.

    Raises:
        ShapeError: its address or a stride is not a multiple of 16 bytes.
    """
    tokens, heads = tensor.shape[-3:-1]
    head_stride = strides[1] if heads > 1 else tensor.shape[-1]
    token_stride = strides[0] if tokens > 1 else heads * head_stride
    size = tensor.element_size()
    wrong = (tensor.data_ptr() % _ALIGNMENT, token_stride * size % _ALIGNMENT)
    if any(wrong) or head_stride * size % _ALIGNMENT:
        raise ShapeError(
            f"{name} is at address {tensor.data_ptr():#x} with strides {list(tensor.stride())} of "
            f"{size} bytes; this kernel takes addresses and strides that are multiples of "
            f"{_ALIGNMENT} bytes"
        )
    return token_stride, head_stride
