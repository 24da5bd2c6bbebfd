"""Launches of recurrent mixers, which `fused_compile_worker` compiles for absent GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from kernels.collective.communicator import AbsentRanks
from kernels.recurrent.gpu import gated_delta
from kernels.recurrent.gpu.divided_norm import DividedNorm
from kernels.recurrent.gpu.mamba2 import Mamba2
from kernels.recurrent.gpu.short_conv import ShortConv
from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentWeights,
    ShortConvShape,
)
from kernels.recurrent.segments import Segments
from tests.kernels.compile.cross_compile_jobs import ARCHES

GATED_DELTA = {
    (): (16, 16, 128, 128),
    ("groups of 2",): (32, 16, 128, 128),
    ("groups of 4",): (32, 8, 128, 128),
    ("heads of 64",): (8, 8, 64, 64),
    ("heads of 256",): (4, 4, 256, 256),
    ("heads of 96 and 192",): (6, 6, 96, 192),
}
"""Heads of values and of keys, and their sizes, by the features of a job."""

MAMBA2 = {
    (): Mamba2Shape(64, 64, 128, 1, 4, 1e-5),
    ("states of 256", "no norm"): Mamba2Shape(48, 64, 256, 1, 4, None),
    ("8 groups",): Mamba2Shape(64, 64, 128, 8, 4, 1e-5),
    ("norm before the gate",): Mamba2Shape(64, 64, 64, 1, 4, 1e-5, norm_before_gate=True),
    ("heads of 32", "states of 16"): Mamba2Shape(24, 32, 16, 1, 4, 1e-5, conv_bias=False),
    ("divided norm", "no norm"): Mamba2Shape(32, 64, 128, 1, 4, None),
}
"""Shapes of Mamba-2 by the features of a job."""


def launch_gated_delta(job: Any, _pdl: bool) -> None:
    """Launch one decode row and one prompt; "float32" or "float16" in a job's features is the dtype.

    Or, if "drafts" is among them, one decode row with a draft.
    """
    dtype = next((it for it in ("float32", "float16") if it in job.around), "bfloat16")
    sizes = GATED_DELTA[tuple(it for it in job.around if it not in (dtype, "drafts"))]
    shape = GatedDeltaShape(*sizes, 4, 1e-6)

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=getattr(torch, dtype))

    heads = torch.empty(shape.num_heads)
    weights = RecurrentWeights(
        empty(shape.channels, shape.width), a_log=heads, dt_bias=heads, norm=empty(shape.value_dim)
    )
    with mock.patch.object(gated_delta, "detect", return_value=ARCHES[job.sm]):
        kernel = gated_delta.GatedDelta(shape, weights)
    states = (
        torch.empty(2, shape.width - 1, shape.channels),
        torch.empty(2, shape.num_heads, shape.key_dim, shape.value_dim),
    )
    tokens = 1 + job.tokens
    kernel(
        empty(tokens, shape.channels + shape.inner),
        empty(tokens, 2 * shape.num_heads),
        states,
        _segments(job, keeps=True),
    )


def launch_mamba2(job: Any, _pdl: bool) -> None:
    """Launch one decode row and one prompt of Mamba-2; the dtype and drafts are as of `launch_gated_delta`."""
    dtype = next((it for it in ("float32", "float16") if it in job.around), "bfloat16")
    shape = MAMBA2[tuple(it for it in job.around if it not in (dtype, "keeps", "drafts"))]
    numbers = getattr(torch, dtype)
    heads = torch.empty(shape.num_heads)
    weights = RecurrentWeights(
        torch.empty((shape.channels, shape.width), dtype=numbers),
        torch.empty(shape.channels, dtype=numbers) if shape.conv_bias else None,
        heads,
        heads,
        heads,
        None if shape.eps is None else torch.empty(shape.inner, dtype=numbers),
    )
    states = (
        torch.empty(2, shape.width - 1, shape.channels),
        torch.empty(2, shape.num_heads, shape.head_dim, shape.state_dim),
    )
    projected = torch.empty(
        (1 + job.tokens, shape.inner + shape.channels + shape.num_heads), dtype=numbers
    )
    y = Mamba2(shape, weights)(projected, None, states, _segments(job))
    if "divided norm" in job.around:
        DividedNorm(torch.empty(shape.inner, dtype=numbers), 1e-5, 2, AbsentRanks(2))(y)


def launch_short_conv(job: Any, _pdl: bool) -> None:
    """Launch one decode row and one prompt of a gated short convolution in bfloat16, or a row with a draft."""
    shape = ShortConvShape(2048, 3)
    weights = RecurrentWeights(torch.empty((2048, 3), dtype=torch.bfloat16))
    projected = torch.empty((1 + job.tokens, 3 * 2048), dtype=torch.bfloat16)
    states = (torch.empty(2, 2, 2048),)
    ShortConv(shape, weights)(projected, None, states, _segments(job))


def _segments(job: Any, *, keeps: bool = False) -> Segments:
    """Return one decode row and one prompt; states are kept within it if "keeps" is in a job's features.

    Or, if "drafts" is among them, one decode row with a draft.
    """
    drafts = "drafts" in job.around
    tokens = job.tokens + (not drafts)
    keeps = keeps or drafts or "keeps" in job.around
    return Segments(
        0 if drafts else 1,
        torch.empty(2, dtype=torch.int32),
        torch.empty(tokens, dtype=torch.int64),
        torch.empty((1 if drafts else 2, 2), dtype=torch.int32),
        torch.empty(job.tokens, dtype=torch.int32) if keeps else None,
        by_token=drafts,
    )
