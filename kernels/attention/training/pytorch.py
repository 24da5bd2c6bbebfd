"""Attention for training in PyTorch, tile by tile: memory grows linearly with the length.

It defines what the kernels compute, and runs anywhere. Numbers are accumulated in float32, in float64 for float64.

Source: Dao et al., "FlashAttention", 2022, algorithms 1 and 4.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kernels.attention.training.philox import drop_below, random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.attention.training.registry import Grads, Saved, TrainingBatch, TrainingProblem

_TILE: Final = 256
"""Queries and keys of a tile without a block mask."""


class _Sequence(NamedTuple):
    """One sequence: its number, and the first and last + 1 of its rows among queries and keys."""

    number: int
    first_q: int
    end_q: int
    first_k: int
    end_k: int


class _Tile(NamedTuple):
    """What the passes need of one tile: [K, G, m, n] each, or broadcast to it.

    Attributes:
        scores: scaled, capped and biased; -inf where a query does not see a key.
        slope: derivative of the scores by the products; None for the scale.
        keep: factor of the dropout, 0 or 1 / (1 - p); None for none.
    """

    scores: Tensor
    slope: Tensor | None
    keep: Tensor | None


class TiledTraining:
    """See `TrainingKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """See `TrainingKernel.forward`."""
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=_accumulator(q), device=q.device)
        for sequence in _sequences(batch):
            for queries, ranges in _visible(sequence, batch, problem):
                rows = slice(sequence.first_q + queries.start, sequence.first_q + queries.stop)
                tile = _grouped(q[rows], k.shape[1])
                total, best, sum_ = None, None, None
                for keys in ranges:
                    columns = slice(sequence.first_k + keys.start, sequence.first_k + keys.stop)
                    found = _tile(tile, k[columns], sequence, queries, keys, batch, problem)
                    values = v[columns].to(tile.dtype).transpose(0, 1)[:, None]
                    top = found.scores.amax(-1, keepdim=True)
                    new = top if best is None else torch.maximum(best, top)
                    safe = new.masked_fill(new == -torch.inf, 0.0)
                    weights = torch.exp(found.scores - safe)
                    kept = weights if found.keep is None else weights * found.keep
                    if best is None or total is None or sum_ is None:
                        total, sum_ = kept @ values, weights.sum(-1, keepdim=True)
                    else:
                        factor = torch.exp(best - safe)
                        total = total * factor + kept @ values
                        sum_ = sum_ * factor + weights.sum(-1, keepdim=True)
                    best = new
                if total is None or sum_ is None or best is None:
                    continue
                out[rows] = _flat(total / sum_.masked_fill(sum_ == 0, 1.0)).to(q.dtype)
                lse[rows] = _flat(best + sum_.log())[..., 0]
        return out, lse

    def backward(
        self, grads: Grads, saved: Saved, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TrainingKernel.backward`."""
        q, k, v, out, lse = saved
        kind = _accumulator(q)
        delta = (grads[0].to(kind) * out.to(kind)).sum(-1) - grads[1].to(kind)
        dq, dk, dv = (torch.zeros(it.shape, dtype=kind, device=it.device) for it in (q, k, v))
        for sequence in _sequences(batch):
            for queries, ranges in _visible(sequence, batch, problem):
                rows = slice(sequence.first_q + queries.start, sequence.first_q + queries.stop)
                tile, dout = (_grouped(it[rows], k.shape[1]) for it in (q, grads[0]))
                log_sum, mean = (_grouped(it[rows, :, None], k.shape[1]) for it in (lse, delta))
                # Rows that see nothing have weights exp(-inf - 0).
                log_sum = log_sum.masked_fill(log_sum == -torch.inf, 0.0)
                gradient = torch.zeros_like(tile)
                for keys in ranges:
                    columns = slice(sequence.first_k + keys.start, sequence.first_k + keys.stop)
                    found = _tile(tile, k[columns], sequence, queries, keys, batch, problem)
                    key, value = (it[columns].to(kind).transpose(0, 1)[:, None] for it in (k, v))
                    weights = torch.exp(found.scores - log_sum)
                    kept = weights if found.keep is None else weights * found.keep
                    dv[columns] += (kept.mT @ dout).sum(1).transpose(0, 1)
                    dweights = dout @ value.mT
                    if found.keep is not None:
                        dweights = dweights * found.keep
                    dscores = weights * (dweights - mean)
                    dscores = dscores * (
                        problem.softmax_scale if found.slope is None else found.slope
                    )
                    gradient += dscores @ key
                    dk[columns] += (dscores.mT @ tile).sum(1).transpose(0, 1)
                dq[rows] = _flat(gradient)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


TILED: Final = TiledTraining()


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return x, [m, H, D], as [K, G, m, D] in the accumulator's dtype."""
    count, heads, size = x.shape
    grouped = x.to(_accumulator(x)).view(count, num_kv_heads, heads // num_kv_heads, size)
    return grouped.permute(1, 2, 0, 3)


def _flat(x: Tensor) -> Tensor:
    """Return x, [K, G, m, D], as [m, H, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _sequences(batch: TrainingBatch) -> Iterator[_Sequence]:
    ends_q, ends_k = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()
    for index in range(len(ends_q) - 1):
        yield _Sequence(index, ends_q[index], ends_q[index + 1], ends_k[index], ends_k[index + 1])


def _visible(
    sequence: _Sequence, batch: TrainingBatch, problem: TrainingProblem
) -> Iterator[tuple[range, list[range]]]:
    """Yield each tile of queries of a sequence and the tiles of keys of which it may see some."""
    num_q, num_k = sequence.end_q - sequence.first_q, sequence.end_k - sequence.first_k
    height, width = problem.mask_tile if batch.mask else (_TILE, _TILE)
    listed = None
    if batch.mask is not None:
        starts, columns = (it.tolist() for it in batch.mask[:2])
        listed = [columns[i:j] for i, j in itertools.pairwise(starts)]
    for number, first in enumerate(range(0, num_q, height)):
        queries = range(first, min(first + height, num_q))
        low, high = 0, num_k
        if problem.causal:
            high = min(num_k, num_k - num_q + queries.stop)
        if problem.sliding_window is not None:
            low = max(0, num_k - num_q + queries.start - problem.sliding_window + 1)
        if listed is None:
            tiles = list(range(low // width, -(-high // width))) if high > low else []
        else:
            tiles = listed[number] if number < len(listed) else []
        ranges = (range(max(low, j * width), min(high, (j + 1) * width)) for j in tiles)
        yield queries, [it for it in ranges if len(it)]


def _tile(
    q: Tensor,
    k: Tensor,
    sequence: _Sequence,
    queries: range,
    keys: range,
    batch: TrainingBatch,
    problem: TrainingProblem,
) -> _Tile:
    """Compute the scores of a tile.

    Args:
        q: [K, G, m, D] in the accumulator's dtype.
        k: [n, K, D].
        sequence: the sequence.
        queries: indices of the queries in the sequence.
        keys: indices of the keys.
        batch: as for the kernel.
        problem: as for the kernel.
    """
    scores = q @ k.to(q.dtype).permute(1, 2, 0)[:, None] * problem.softmax_scale
    slope = None
    if problem.softcap is not None:
        capped = torch.tanh(scores / problem.softcap)
        scores, slope = capped * problem.softcap, (1 - capped**2) * problem.softmax_scale
    rows = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    columns = torch.arange(keys.start, keys.stop, device=q.device)
    num_q, num_k = sequence.end_q - sequence.first_q, sequence.end_k - sequence.first_k
    distance = rows + (num_k - num_q) - columns
    if batch.alibi_slopes is not None:
        slopes = batch.alibi_slopes[sequence.number].to(q.dtype).view(*q.shape[:2], 1, 1)
        scores = scores - slopes * distance.abs()
    if problem.causal:
        unseen = distance < 0
        if problem.sliding_window is not None:
            unseen |= distance >= problem.sliding_window
        scores = scores.masked_fill(unseen, -torch.inf)
    keep = None
    if problem.dropout_p:
        heads = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1)
        bits = random_bits(problem.dropout_seed, columns, rows, heads, sequence.number)
        keep = (bits >= drop_below(problem.dropout_p)).to(q.dtype) / (1 - problem.dropout_p)
    return _Tile(scores, slope, keep)
