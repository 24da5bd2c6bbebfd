"""Launches of recurrent mixers, which `fused_compile_worker` compiles for absent GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from kernels.recurrent.gpu import gated_delta
from kernels.recurrent.problem import GatedDeltaShape, RecurrentWeights
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


def launch_gated_delta(job: Any, _pdl: bool) -> None:
    """Launch one decode row and one prompt; "float32" or "float16" in a job's features is the dtype."""
    dtype = next((it for it in ("float32", "float16") if it in job.around), "bfloat16")
    sizes = GATED_DELTA[tuple(it for it in job.around if it != dtype)]
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
    segments = Segments(
        1,
        torch.empty(2, dtype=torch.int32),
        torch.empty(tokens, dtype=torch.int64),
        torch.empty((2, 2), dtype=torch.int32),
    )
    kernel(
        empty(tokens, shape.channels + shape.inner),
        empty(tokens, 2 * shape.num_heads),
        states,
        segments,
    )
