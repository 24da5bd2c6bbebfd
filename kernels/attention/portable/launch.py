"""Launches of the portable attention kernel, bound to the work of a step: the targets of the registry's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kernels.attention.portable.attention import attention
from kernels.attention.portable.part_list import PartList
from kernels.attention.portable.split_list import SplitList
from kernels.attention.portable.tile import (
    check_head_stride,
    scale_arguments,
    split_head_dim,
    window_argument,
)
from kernels.attention.portable.tile_fp8 import takes_pairs
from kernels.attention.portable.tile_list import plan_tiles
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
from kernels.attention.splits import prefix_parts, splits_wanted
from kernels.gpu.dependent_launch import dependent_launch, may_depend

if TYPE_CHECKING:
    from kernels.attention.launch import LaunchConfig
    from kernels.attention.select import Selection

PART_TOKENS: Final = 512
_MERGE_ELEMENTS: Final = 8192
"""Elements of partial results that a merge holds at once: 64 registers per thread with 4 warps."""
_NO_LIST: Final[dict[str, Any]] = {
    "arrivals": None, "partial_out": None, "partial_lse": None, "num_seqs": 0, "num_keys": 0, "num_parts": 0,
    "row_tiles": 0, "lines": 0, "k_stride": None, "v_stride": None, "kv_head_stride": None,
}  # fmt: skip


class _Launch:
    """The launches of one step; shapes as in `kernels.prefill_attention` and `kernels.decode_attention`.

    Args:
        kind: of work, see `kernels.attention.portable.attention`.
        problem: of all layers of the step.
        launch: tile sizes.
        grid: programs.
        arguments: of the kernel, other than those of `__call__` and those that follow from problem and launch.
    """

    def __init__(
        self,
        kind: str,
        problem: AttentionProblem,
        launch: LaunchConfig,
        grid: tuple[int, ...],
        **arguments: Any,  # noqa: ANN401 - tensors, numbers and options
    ) -> None:
        d1, d2 = split_head_dim(problem.head_dim)
        self._grid = grid
        self._arguments = {
            **_NO_LIST,
            "table_stride": arguments["table"].stride(0),
            "scale": problem.softmax_scale,
            "window": window_argument(problem),
            "softcap": problem.softcap or 0.0,
            "KIND": kind,
            "HEADS": problem.num_heads,
            "KV_HEADS": problem.num_kv_heads,
            "GROUP": problem.group_size,
            "D1": d1,
            "D2": d2,
            "BLOCK_SIZE": problem.block_size or 1,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "PAGED": problem.block_size is not None,
            "CAUSAL": problem.causal,
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "LSE": problem.lse,
            "ONE_LOOP": launch.one_loop,
            "FP8": problem.kv_dtype is not None,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            **arguments,
        }

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`, and its log-sum-exp to `lse` if the problem has one."""
        if q.shape[0] == 0:
            return
        check_head_stride(q)
        arguments = self._arguments
        keys, values = kv.unbind(0)
        if arguments.get("PAIRS"):
            values = values.view(torch.int16)
        if arguments["KIND"] == "tiles":
            token_stride, head_stride = kv.stride()[-3:-1]
            if arguments["PAGED"]:
                # A dimension of size 1, as for blocks of one token, may have any stride.
                head_stride = kv.shape[-1]
                token_stride = kv.shape[-2] * head_stride
            arguments |= {
                "k_stride": token_stride,
                "v_stride": token_stride,
                "kv_head_stride": head_stride,
            }
        attention[self._grid](
            q, keys, values, *scale_arguments(kv, kv_scale), out, lse, q_stride=q.stride(0),
            q_head_stride=q.stride(1), **arguments,
        )  # fmt: skip


class PortablePrefill(_Launch):
    """Attention of prompts: a program for each row tile and key-value head."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        tiles, table = plan_tiles(batch, problem.group_size, launch.block_m)
        grid = (len(tiles), problem.num_kv_heads)
        super().__init__("tiles", problem, launch, grid, work=tiles, table=table)


class PortableDecode(_Launch):
    """Attention of decodes: split-KV, merged in the same launch."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a decode's problem has a block size"
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        made = SplitList(problem, batch, selection, problem.max_query_tokens * problem.group_size)
        d1, d2 = split_head_dim(problem.head_dim)
        super().__init__(
            "splits", problem, launch, (made.num_programs,),
            work=made.splits, arrivals=made.arrivals, partial_out=made.partial_out, partial_lse=made.partial_lse,
            table=batch.block_table, CAUSAL=True, ONE_LOOP=True,
            PAIRS=problem.kv_dtype is not None and takes_pairs(d1, d2), ROW_TILES=made.row_tiles,
            MERGE_ROWS=made.merge_rows, MERGE_PARTS=max(1, min(16, _MERGE_ELEMENTS // (made.merge_rows * d1))),
            **dependent_launch(may_depend(selection.arch, batch.seq_lens.device)),
        )  # fmt: skip


class PortablePrefix(_Launch):
    """Attention of every query token of a decode to the tokens that all sequences share: the first launch of a cascade.

    All query tokens of the batch are rows of one problem, so a tile of keys is read once per tile of rows instead of
    once per sequence. The keys are split over programs until the GPU is full; the number of parts depends only on
    values that the host knows, so the device makes no list. There is no causal mask, since the shared tokens come
    before every query.

    Of a call `out` is [P, L, D] float32 contiguous, L at least T * H, with row h of token t at t * H + h, and `lse` is
    [P, L] float32 contiguous, natural logarithm.

    Attributes:
        num_parts: P, the number of partial results per row.
    """

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a shared prefix needs a paged cache"
        assert batch.shared_prefix > 0
        launch = selection.launch_for(batch.shared_prefix, batch.num_seqs)
        row_tiles = -(-batch.num_tokens * problem.group_size // launch.block_m)
        tiles = problem.num_kv_heads * row_tiles
        wanted = splits_wanted(selection.arch.num_sms, launch.programs_per_sm, max(1, tiles))
        self.num_parts = prefix_parts(batch.shared_prefix, launch.block_n, wanted)
        super().__init__(
            "prefix", problem, launch, (self.num_parts * tiles,), work=batch.cu_seqlens_q, table=batch.block_table,
            num_seqs=batch.num_seqs, num_keys=batch.shared_prefix, num_parts=self.num_parts, row_tiles=row_tiles,
        )  # fmt: skip

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write P partial results for every row."""
        assert lse is not None, "parts cannot be merged without their log-sum-exp"
        self._arguments["lines"] = lse.shape[1]
        super().__call__(q, kv, out, lse, kv_scale=kv_scale)


class InvariantAttention(_Launch):
    """Attention of prompts or decodes with equal bits in every step."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "the rows of the registry read a paged cache alone"
        # The launch must not depend on the step, else neither would the order of the sums.
        launch = selection.launches[-1].launch
        assert PART_TOKENS % launch.block_n == 0
        heads, device = problem.num_kv_heads, batch.seq_lens.device
        made = PartList(
            problem, batch, group=problem.group_size, block_m=launch.block_m, part_tokens=PART_TOKENS, counters=heads
        )  # fmt: skip
        shape = (made.most_parts, heads, made.part_rows)
        super().__init__(
            "parts", problem, launch, (heads, made.num_entries),
            work=made.records, arrivals=made.arrivals,
            partial_out=torch.empty((*shape, problem.head_dim), device=device),
            partial_lse=torch.empty(shape, device=device), table=batch.block_table, lines=made.part_rows,
            CAUSAL=True, ONE_LOOP=True, PART=PART_TOKENS,
        )  # fmt: skip
