"""The drawing kernels asked by sampling rows, with sizes of a test's choice; and what they should answer.

A GPU rounds exponentials otherwise than NumPy does. `by_rule` takes its weights, so that the rest is held to the bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.sampling.gpu.sample_tiles import weights_of
from kernels.sampling.gpu.sample_tokens import draw_tokens
from kernels.sampling.rows import (
    DRAW_SIZES,
    FILTERED,
    WEIGHT_SCALE,
    DrawRow,
    DrawSizes,
    candidate_bounds,
)
from model.sampling.device import draw_row
from model.sampling.host import HostSampler
from model.sampling.parameters import SamplingRow, uniform

UNTOUCHED = -7


def by_kernel(
    logits: torch.Tensor, rows: list[SamplingRow], sizes: DrawSizes = DRAW_SIZES, *, pdl=False
) -> list[int | None]:
    """Draw by the kernels; None for a row that is not finite."""
    size = logits.shape[1]
    draws: list[DrawRow] = []
    for i, row in enumerate(rows):
        draw = draw_row(row, i, i, size)
        if draw.kind == FILTERED:
            reach, least = candidate_bounds(size, draw.top_k, draw.top_p, sizes)
            draw = draw._replace(reach=reach, least=least)
        draws.append(draw)
    table = torch.tensor(draws, dtype=torch.float64, device=logits.device)
    tokens = torch.full((len(rows),), UNTOUCHED, device=logits.device)
    checked = tokens.clone()
    draw_tokens(logits, table, {draw.kind for draw in draws}, tokens, checked, pdl=pdl, sizes=sizes)
    told, ids = checked.tolist(), tokens.tolist()
    assert all(0 <= token < size for token in ids)
    assert all(answer in (token, -1) for answer, token in zip(told, ids, strict=True))
    return [None if answer < 0 else answer for answer in told]


def by_host(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int | None]:
    sampled = HostSampler().sample(logits.float().cpu().contiguous(), rows)
    return [token.token_id for token in sampled]


@triton.jit
def weigh(distances, weights, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803 - as in all kernels
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(weights + at, weights_of(tl.load(distances + at, mask=at < SIZE)), mask=at < SIZE)


def weights_on(device: torch.device, distances: np.ndarray) -> np.ndarray:
    """Weigh distances [V] float32 as the kernels on a device do; NumPy's exponential is the interpreter's too."""
    if device.type == "cpu":
        return (np.exp(-distances) * np.float32(WEIGHT_SCALE)).astype(np.int64)
    source = torch.from_numpy(distances).to(device)
    weights = torch.empty(source.shape, dtype=torch.int64, device=device)
    weigh[(triton.cdiv(len(source), 1024),)](source, weights, SIZE=len(source), BLOCK=1024)
    return weights.cpu().numpy()


def by_rule(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """Draw as the rules say, in the plainest way, from the weights of the logits' device."""
    values = logits.float().cpu().numpy()
    return [_by_rule(line, row, logits.device) for line, row in zip(values, rows, strict=True)]


def _by_rule(values: np.ndarray, row: SamplingRow, device: torch.device) -> int | None:
    peak = values.max()
    if not math.isfinite(peak):
        return None
    if row.temperature == 0.0:
        return int(values.argmax())
    with np.errstate(over="ignore"):
        distances = (peak - values) * np.float32(row.inverse_temperature)
    weights = weights_on(device, distances)
    order = np.arange(len(values))
    if row.is_filtered:
        order = np.lexsort((order, distances))
        if 0 < row.top_k < len(order):
            order = order[distances[order] <= distances[order[row.top_k - 1]]]
        if row.top_p < 1.0:
            above = np.cumsum(weights[order]) - weights[order]
            order = order[above < math.ceil(row.top_p * int(weights[order].sum()))]
        order = order[distances[order] <= np.float32(row.min_p_distance)]
    sums = np.cumsum(weights[order])
    total = int(sums[-1])
    target = min(int(uniform(row.seed, row.position) * total), total - 1)
    return int(order[np.searchsorted(sums, target, side="right")])
