"""The rules of the sampling kernels in plain NumPy, from the same table of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.sampling.rows import ENTROPY_SCALE, FILTERED, GREEDY, WEIGHT_SCALE, SampleRow
from tests.model.sampling.torch_noise import gumbel_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Set


def weights_of(distances: np.ndarray) -> np.ndarray:
    """Return the weights of distances [n] float32, int64."""
    return (np.exp(-distances) * np.float32(WEIGHT_SCALE)).astype(np.int64)


def sample_tokens(
    logits: torch.Tensor,
    table: torch.Tensor,
    kinds: Set[int],
    masks: torch.Tensor,
    tokens: torch.Tensor,
    checked: torch.Tensor,
    *,
    weigh: Callable[[np.ndarray], np.ndarray] = weights_of,
) -> None:
    """Sample as `kernels.sampling.tokens.sample_tokens` does, with the weights of `weigh`; tensors on the CPU."""
    values, bits = logits.float().numpy(), masks.numpy()
    rows = [SampleRow(*columns) for columns in table.tolist()]
    assert {row.kind for row in rows} == set(kinds)
    for row in rows:
        token = _sample(values[int(row.source)].copy(), row, bits, weigh)
        tokens[int(row.target)] = max(token, 0)
        checked[int(row.target)] = token


def _sample(
    values: np.ndarray, row: SampleRow, bits: np.ndarray, weigh: Callable[[np.ndarray], np.ndarray]
) -> int:
    if row.mask >= 0:
        words = bits[int(row.mask)].view(np.uint8)
        allowed = np.unpackbits(words, count=len(values), bitorder="little").astype(bool)
        values[~allowed & (values < math.inf)] = -math.inf
    peak = values.max()
    if not math.isfinite(peak):
        return -1
    if row.kind == GREEDY:
        return int(values.argmax())
    with np.errstate(over="ignore"):
        distances = (peak - values) * np.float32(row.inverse_temperature)
    order = np.arange(len(values))
    if row.kind == FILTERED:
        order = _filter(distances, row, weigh(distances))
    order.sort()
    low, high = (torch.full((1, 1), half, dtype=torch.float64) for half in row[4:6])
    noise = gumbel_noise(torch.from_numpy(order), low, high)[0].numpy()
    return int(order[(noise - distances[order]).argmax()])


def _filter(distances: np.ndarray, row: SampleRow, weights: np.ndarray) -> np.ndarray:
    """Return the ids that the filters keep."""
    order = np.lexsort((np.arange(len(distances)), distances))
    if row.top_k > 0:
        order = order[distances[order] <= distances[order[int(row.top_k) - 1]]]
    if row.top_p < 1.0:
        above = np.cumsum(weights[order]) - weights[order]
        order = order[above < math.ceil(row.top_p * int(weights[order].sum()))]
    order = order[distances[order] <= np.float32(row.min_p_distance)]
    if row.typical_p < 1.0:
        order = order[weights[order] > 0]
        total, near = int(weights[order].sum()), distances[order]
        terms = (np.exp(-near) * near * np.float32(ENTROPY_SCALE)).astype(np.int64)
        mean = int(terms.sum()) * (WEIGHT_SCALE / ENTROPY_SCALE) / total
        surprise = np.abs(near - np.float32(mean))
        typical = surprise.argsort(kind="stable")
        held = np.cumsum(weights[order][typical])
        last = min(int(held.searchsorted(math.ceil(row.typical_p * total))), len(order) - 1)
        order = order[surprise <= surprise[typical[last]]]
    return order
