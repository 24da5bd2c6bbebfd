"""Samples tokens by the kernels, with given tile sizes, by the host, and by a plain implementation of the rules.

A GPU rounds exponentials differently from NumPy. `by_rule` uses the weights of the GPU, so that filters keep the same
tokens; noise differs by the rounding of its logarithms.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.sampling.gpu.sample_tiles import weights_of
from kernels.sampling.gpu.sample_tokens import sample_tokens
from kernels.sampling.rows import (
    FILTERED,
    SAMPLE_SIZES,
    SampleRow,
    SampleSizes,
    candidate_bounds,
)
from model.sampling.device import kernel_table
from model.sampling.host import HostSampler
from model.sampling.mask import build_masks
from model.sampling.rows import SamplingRow
from tests.kernels.sampling import plain

UNTOUCHED = -7


def by_kernel(
    logits: torch.Tensor, rows: list[SamplingRow], sizes: SampleSizes = SAMPLE_SIZES, *, pdl=False
) -> list[int | None]:
    """Sample by the kernels; None for a row that is not finite."""
    size, device = logits.shape[1], logits.device
    masks = build_masks(rows, size)
    every = range(len(rows))
    columns, kinds = kernel_table(rows, every, every, masks.of_rows, size)
    for i, row in enumerate(columns):
        entry = SampleRow(*row)
        if entry.kind == FILTERED:
            bounds = candidate_bounds(size, int(entry.top_k), entry.top_p, sizes)
            columns[i, -2:] = bounds
    table = torch.from_numpy(columns).to(device)
    bits = torch.from_numpy(masks.bits).to(device)
    tokens = torch.full((len(rows),), UNTOUCHED, device=device)
    checked = tokens.clone()
    sample_tokens(logits, table, bits, kinds, tokens, checked, pdl=pdl, sizes=sizes)
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
    """Return the weights that the kernels on a device give distances [V] float32; the interpreter uses NumPy's exp."""
    if device.type == "cpu":
        return plain.weights_of(distances)
    source = torch.from_numpy(distances).to(device)
    weights = torch.empty(source.shape, dtype=torch.int64, device=device)
    weigh[(triton.cdiv(len(source), 1024),)](source, weights, SIZE=len(source), BLOCK=1024)
    return weights.cpu().numpy()


def by_rule(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """Sample by a plain implementation of the rules, with the weights of the logits' device."""
    size = logits.shape[1]
    masks = build_masks(rows, size)
    every = range(len(rows))
    columns, kinds = kernel_table(rows, every, every, masks.of_rows, size)
    checked = torch.empty(len(rows), dtype=torch.int64)
    plain.sample_tokens(
        logits.cpu(), torch.from_numpy(columns), kinds, torch.from_numpy(masks.bits), checked.clone(), checked,
        weigh=functools.partial(weights_on, logits.device),
    )  # fmt: skip
    return [None if answer < 0 else answer for answer in checked.tolist()]
