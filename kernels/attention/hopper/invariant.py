"""Attention whose result for a query has the same bits in every step, on Hopper: the prefill kernel, in parts.

One kernel computes prompts and decodes. Its warp roles are those of `prefill`, and its keys are cut into parts of
PART_TOKENS from a multiple of PART_TOKENS on:

    prompts    a tile of query rows visits all of its parts, and merges each into those before
    decodes    a sequence whose queries are a single tile has an item for each part; the last one to finish merges them

Both are the same operations in the same order, so which of the two it is may depend on the batch. The tensor cores
compute 64 rows of a decode at the cost of one, which does not matter, since a decode waits for its keys.

Decodes have a launch of their own, with a single consumer: a second one would pass over every key tile. The memory of
its queries and of the outputs holds more stages of keys. The key tiles and the code for a row are the same.

`invariant_roles` says why the bits of a row do not depend on other rows.

Source: Shah et al., "FlashAttention-3", 2024; Dao et al., "Flash-Decoding", 2023; fixed parts as in He et al.,
"Defeating Nondeterminism in LLM Inference", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.attention.hopper.invariant_roles import consume_parts, produce_parts
from kernels.attention.hopper.pipeline import (
    ROWS,
    Constants,
    heads_of_tile,
    make_pipeline,
    padded_dim,
    rows_of_token,
)
from kernels.attention.hopper.prefill import TileBoxes, attends_nothing, exponents, shape_constants
from kernels.attention.portable.part_list import PartList
from kernels.attention.portable.tile import window_argument
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
from kernels.gpu.dependent_launch import dependent_launch, may_depend

if TYPE_CHECKING:
    from kernels.attention.select import Selection

PART_TOKENS: Final = 1024
"""Keys of a part. Longer ones leave SMs idle while few sequences decode; shorter ones are merged more often."""

_DECODE_REGISTERS: Final = 168
"""Registers per thread of a launch with a single consumer, on average: it has 256, and the producer's warps have 80."""


@gluon.jit(do_not_specialize=["block_table", "table_stride", "window"])
def invariant(
    q_desc, k_desc, v_desc, o_desc, k_head_stride, out, running, partial_out, partial_sums, records, arrivals,
    block_table, counter, table_stride, scale, window, softcap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, KEY_SHARES: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    OWN_OUTPUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Process all items; one program per SM.

    Shapes as in `kernels.prefill_attention`; `scale` and `softcap` as `exponents` returns them, `records` and
    `arrivals` as in `part_list.list_parts`, `counter` as in `producer.produce`, the buffers as in `consume_parts`.
    The block table may begin anywhere and is not specialized, so that all steps run the same code.
    """
    c = Constants(
        HEADS, GROUP, KEY_SHARES, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, STAGES, True, True, WINDOW, SOFTCAP,
        False, OWN_OUTPUT, q_desc.dtype.primitive_bitwidth // 8, PART // BLOCK_N,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    pipe = make_pipeline(q_desc.dtype, o_desc.dtype, c)
    results = (running, partial_out, partial_sums, records, arrivals)
    supply = (
        pipe, q_desc, k_desc, v_desc, records, block_table, table_stride, counter, k_head_stride,
        window, PDL, c,
    )  # fmt: skip
    # Registers per thread (setmaxnreg), as in `prefill`.
    if c.CONSUMERS == 1:
        gl.warp_specialize([
            (consume_parts, (pipe, o_desc, out, results, scale, window, softcap, gl.constexpr(0), c)),
            (produce_parts, supply),
        ], [1], [80])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_parts, (pipe, o_desc, out, results, scale, window, softcap, gl.constexpr(0), c)),
            (consume_parts, (pipe, o_desc, out, results, scale, window, softcap, gl.constexpr(1), c)),
            (produce_parts, supply),
        ], [4, 1], [232, 40])  # fmt: skip


class HopperInvariant:
    """Attention of one step on Hopper, of prompts or of decodes; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "the rows of the registry read a paged cache alone"
        # The key tiles must not depend on the step, else neither would the order of the sums.
        launch = selection.launches[-1].launch
        assert PART_TOKENS % launch.block_n == 0
        group = heads_of_tile(problem.group_size)
        heads, consumers = problem.num_heads // group, launch.block_m // ROWS.value
        self._list = PartList(
            problem,
            batch,
            group=rows_of_token(group),
            block_m=launch.block_m,
            part_tokens=PART_TOKENS,
            counters=heads * consumers,
            shares=problem.group_size // group,
        )
        device = batch.seq_lens.device
        programs = min(selection.arch.num_sms, self._list.num_entries * heads)
        # Each program writes and reads its own rows, which stay in the L2 cache.
        own = programs if self._list.visits_parts else 0
        shape = (own, launch.block_m, padded_dim(problem.head_dim) + 4)
        lines = (self._list.most_parts, heads, self._list.part_rows)
        self._running = torch.empty(shape, device=device)
        self._partial_out = torch.empty((*lines, problem.head_dim), device=device)
        self._partial_sums = torch.empty((*lines, 2), device=device)
        self._counter = torch.zeros(2, dtype=torch.int32, device=device)
        self._grid = (programs,)
        self._table = batch.block_table
        self._problem = problem
        self._boxes = TileBoxes(problem, group, launch.block_n)
        self._scale, self._softcap = exponents(problem)
        self._constants: dict[str, Any] = {
            **shape_constants(problem, group, launch),
            "PART": PART_TOKENS,
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "num_warps": launch.num_warps,
            **({"maxnreg": _DECODE_REGISTERS} if launch.block_m == ROWS.value else {}),
            **dependent_launch(may_depend(selection.arch, device)),
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: an address or a stride is not a multiple of 16 bytes, or the key-value heads are too far apart.
        """
        assert lse is None, "the rows of the registry write no log-sum-exp"
        if attends_nothing(q, kv, out, lse):
            return
        *descriptors, head_stride = self._boxes.describe(q, kv, out)
        invariant[self._grid](
            *descriptors, head_stride, out, self._running, self._partial_out, self._partial_sums,
            self._list.records, self._list.arrivals, self._table, self._counter, self._table.stride(0),
            self._scale, window_argument(self._problem), self._softcap,
            **self._constants,
        )  # fmt: skip
