"""Causal prefill attention over the paged cache in PyTorch: the kernel for the CPU, and the fallback for every GPU.

Each sequence is computed in one of three ways:

    folded    few queries, long history: the query heads of a key-value head are rows of one matrix
    tiled     many queries on a CPU: matrix products of whole tiles, up to the diagonal
    shared    other sequences: query heads stay a dimension; a stride of 0 repeats the keys of their key-value head

Source: docs/decisions/0003-cpu-decode-attention.md for the choice and its measurements.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.arch import has_bfloat16_gemm
from kernels.attention.pytorch.common import RunView, check_blocks, dense_attention, read_views
from kernels.attention.pytorch.paged_host import HostSequence, blocks_needed, host_sequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.attention.problem import AttentionProblem, PagedBatch
    from kernels.attention.select import Selection

_FOLDED_QUERIES = 16
"""Up to this many queries, folding is 10 to 30 % faster; its mask has a row for every query head."""
_TILED_QUERIES = 64
"""From this many queries on, whole tiles are faster: by 0 to 40 % in float32, 1.3 to 3.5 times in bfloat16."""
_TILE_ELEMENTS = 4 * 1024 * 1024
"""Most scores of a tile over all heads, 16 MiB in float32."""


class TorchPrefill:
    """Prefill attention of one step; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, selection: Selection | None = None
    ) -> None:
        del selection
        sequences = host_sequences(problem, batch)
        self._blocks_needed = blocks_needed(sequences, problem)
        device = batch.seq_lens.device
        self._work = [
            (
                slice(item.row, item.row + item.num_queries),
                tuple(RunView.of(run, problem) for run in item.runs),
                _way(item, problem, device),
            )
            for item in sequences
        ]

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        assert lse is None, "the row does not support it"
        assert kv_scale is None, "this kernel reads no quantized cache"
        check_blocks(kv, self._blocks_needed)
        for rows, views, attend in self._work:
            keys, values = read_views(kv, views)
            attend(q[rows], keys, values, out[rows])


def _way(
    sequence: HostSequence, problem: AttentionProblem, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Choose the function that computes attention of q [m, H, D] over k and v [1, K, n, D] into out [m, H, D]."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    window = problem.sliding_window
    if window is not None and window >= sequence.num_keys:
        window = None
    plain = window is None and problem.softcap is None
    has_gemm = device.type == "cpu" and (
        dtype is torch.float32 or (dtype is torch.bfloat16 and has_bfloat16_gemm())
    )
    if plain and has_gemm and sequence.num_queries >= _TILED_QUERIES:
        most = max(16, _TILE_ELEMENTS // (problem.num_heads * sequence.num_keys))
        tile = min(64 if dtype is torch.float32 else 128, most, sequence.num_queries)
        diagonal = torch.full((tile, tile), float("-inf"), dtype=dtype).triu_(1)
        return functools.partial(_tiled, problem, sequence.history, diagonal)
    if plain and sequence.history == 0 and sequence.num_queries > 1:
        return functools.partial(_shared, problem, None)
    mask = None
    if sequence.num_queries > 1:
        mask = _mask(sequence, window, dtype, device)
    if sequence.num_queries <= _FOLDED_QUERIES:
        if mask is not None:
            mask = mask.repeat_interleave(problem.group_size, 0)
        return functools.partial(_folded, problem, mask)
    return functools.partial(_shared, problem, mask)


def _mask(
    sequence: HostSequence, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Build the additive mask [m, n] that aligns queries to the bottom right of the keys."""
    query = torch.arange(sequence.history, sequence.num_keys, device=device)[:, None]
    key = torch.arange(sequence.num_keys, device=device)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return bias.masked_fill_(hidden, float("-inf"))


def _folded(
    problem: AttentionProblem, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> None:
    shape = (q.shape[0], problem.num_kv_heads, problem.group_size, problem.head_dim)
    rows = q.shape[0] * problem.group_size
    query = q.view(shape).transpose(0, 1).reshape(1, -1, rows, problem.head_dim)
    result = dense_attention(query, k, v, problem, mask)
    result = result.view(problem.num_kv_heads, q.shape[0], problem.group_size, -1)
    out.view(shape).copy_(result.transpose(0, 1))


def _shared(
    problem: AttentionProblem, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> None:
    shape = (q.shape[0], problem.num_kv_heads, problem.group_size, problem.head_dim)
    query = q.view(shape).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1).expand(-1, problem.group_size, -1, -1)
    values = v.transpose(0, 1).expand(-1, problem.group_size, -1, -1)
    result = dense_attention(query, keys, values, problem, mask, is_causal=mask is None)
    out.view(shape).copy_(result.permute(2, 0, 1, 3))


def _tiled(
    problem: AttentionProblem,
    history: int,
    diagonal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
) -> None:
    """Compute attention tile by tile; a tile of queries i to j reads only keys 0 to history + j.

    `diagonal` is the causal mask of a whole tile, [tile, tile].
    """
    groups, group, head_dim = problem.num_kv_heads, problem.group_size, problem.head_dim
    keys, values = k[0].transpose(1, 2), v[0]
    tile = diagonal.shape[0]
    for start in range(0, q.shape[0], tile):
        rows = min(tile, q.shape[0] - start)
        seen = history + start + rows
        shape = (rows, groups, group, head_dim)
        query = q[start : start + rows].view(shape).permute(1, 2, 0, 3)
        query = query.reshape(groups, group * rows, head_dim)
        scores = torch.bmm(query, keys[:, :, :seen]).mul_(problem.softmax_scale)
        edge = scores.view(groups, group, rows, seen)[..., seen - rows :]
        edge += diagonal[:rows, :rows]
        result = torch.bmm(scores.softmax(-1), values[:, :seen]).view(groups, group, rows, head_dim)
        out[start : start + rows].view(shape).copy_(result.permute(2, 0, 1, 3))
