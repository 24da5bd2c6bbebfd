"""Compiles the gated delta rule for absent GPUs, and checks registers, shared memory and tensor cores."""

from __future__ import annotations

import pytest

from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.compile.fused_compile_worker import FusedJob
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

KERNELS = ("gated_delta_step", "solve_blocks", "carry_states", "gated_norm")
ON_HOPPER = tuple(it.replace("carry_states", "carry_in_flight") for it in KERNELS)
"""But for heads of more than 128 and float32."""
DRAFTS = ("apply_rule_to_drafts", "normalize_drafts", "convolve_drafts")
PRODUCTS = {"solve_blocks": 14, "carry_states": 4, "carry_in_flight": 16}
"""Products of tiles, each at least one instruction of the tensor cores."""
INSTRUCTIONS = {
    80: "mma.sync",
    89: "mma.sync",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    120: "mma.sync",
}
SIZES = (("groups of 2",), ("groups of 4",), ("heads of 64",), ("heads of 96 and 192",))
LARGE = ("heads of 256",)
MOST_SPILLED = {LARGE: 256, ("heads of 96 and 192",): 96, ("float32",): 8192}
"""Bytes of registers that a thread may store in memory, by the features of a job; none for others.

Float32 is multiplied by three products of the tensor cores, whose operands do not fit. Few models are computed in it.
"""
FEW_REGISTERS_SPILLED = 192
"""Likewise, of `solve_blocks` on Hopper, whose registers are limited for the sake of more programs."""
MOST_REGISTERS = {"gated_delta_step": 160, "solve_blocks": 168}
"""On an H100, for heads of 128: its programs are limited by memory, and need others beside them."""


def job(sm, function, around=()):
    return FusedJob(sm, "gated_delta", around=around, tokens=4096, function=function)


JOBS = [
    *(job(sm, name) for sm in INSTRUCTIONS for name in (ON_HOPPER if sm == 90 else KERNELS)),
    *(job(90, name, around) for around in SIZES for name in ON_HOPPER),
    *(job(sm, name, LARGE) for sm in (80, 89, 90, 100) for name in KERNELS),
    *(job(90, name, ("float16",)) for name in ("solve_blocks", "carry_in_flight")),
    *(
        job(sm, name, ("float32",))
        for sm in (80, 90)
        for name in ("gated_delta_step", "solve_blocks", "carry_states")
    ),
    *(job(sm, name, ("drafts",)) for sm in (80, 89, 90, 100) for name in DRAFTS),
    *(job(90, name, (*around, "drafts")) for around in (*SIZES, LARGE) for name in DRAFTS[:2]),
]


def most_spilled(job):
    most = MOST_SPILLED.get(job.around, 0)
    return max(most, FEW_REGISTERS_SPILLED) if job.function == "solve_blocks" else most


@pytest.mark.parametrize("job", slow_except([job(90, "gated_delta_step")], JOBS))
def test_a_kernel_of_the_gated_delta_rule_fits_the_gpu_and_uses_tensor_cores(job, compile_job):
    facts = compile_job(job)

    assert "error" not in facts, facts
    assert facts["function"] == job.function
    assert facts["shared"] <= ARCHES[job.sm].shared_memory_bytes
    assert facts["spill_stores"] <= most_spilled(job), facts
    if job.sm == 90 and not job.around and job.function in MOST_REGISTERS:
        assert facts["registers"] <= MOST_REGISTERS[job.function]
    if job.function in PRODUCTS:
        assert facts["ptx"][INSTRUCTIONS[job.sm]] >= PRODUCTS[job.function]
