"""Compiles short convolutions and Mamba-2 for absent GPUs, and checks registers, shared memory and instructions."""

from __future__ import annotations

import pytest

from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.compile.fused_compile_worker import FusedJob
from tests.kernels.compile.recurrent_launches import MAMBA2
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

REGISTERS = 64 * 1024
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
MOST_SPILLED = 768
"""Bytes of registers that a thread may store in memory in float32, which is multiplied in registers."""
STEPS = ("step_mamba2", "convolve_prompts", "prepare_blocks")
BLOCKS = ("carry_states", "scan_blocks")
MOST_SPILLED_KEEPING = 8
"""The same for kept states of 256 columns on sm_90, two registers."""


def kernels(around):
    """Return the kernels that a mixer launches."""
    if "divided norm" in around:
        return "add_squares", "normalize_part"
    return *STEPS, *BLOCKS, *(() if "no norm" in around else ("normalize_tokens",))


def jobs_for(sm):
    """List all kernels of all shapes, those with products in other dtypes too."""
    every = [((), name) for name in kernels(())]
    every += [(around, name) for around in list(MAMBA2)[1:] for name in kernels(around)]
    every += [(("float16",), name) for name in BLOCKS]
    every += [(("float32",), name) for name in ("prepare_blocks", *BLOCKS)]
    every += [((*around, "keeps"), "carry_states") for around in list(MAMBA2)[:2]]
    every += [(("keeps",), "convolve_prompts")]
    every += [((*around, "drafts"), "step_drafts") for around in MAMBA2]
    every += [(("drafts",), "convolve_drafts")]
    return [
        *(FusedJob(sm, "mamba2", around=it, tokens=64, function=name) for it, name in every),
        *(
            FusedJob(sm, "short_conv", tokens=64, function=name)
            for name in ("convolve_rows", "convolve_prompts")
        ),
        FusedJob(sm, "short_conv", around=("drafts",), tokens=64, function="convolve_drafts"),
    ]


JOBS = [job for sm in PRODUCTS for job in jobs_for(sm)]
FAST = [FusedJob(90, "mamba2", tokens=64, function=name) for name in (STEPS[0], *BLOCKS)]


@pytest.mark.parametrize("job", slow_except(FAST, JOBS))
def test_a_kernel_fits_the_gpu_and_uses_tensor_cores(job, compile_job):
    facts = compile_job(job)

    assert "error" not in facts, facts["error"]
    assert facts["function"] == job.function
    assert facts["shared"] <= ARCHES[job.sm].shared_memory_bytes
    assert facts["registers"] * facts["threads"] <= REGISTERS
    assert facts["warnings"] == []
    is_wide = "float32" in job.around
    keeps = job.sm == 90 and {"keeps", "states of 256"} <= set(job.around)
    most = MOST_SPILLED if is_wide else MOST_SPILLED_KEEPING * keeps
    assert facts["spill_stores"] <= most, facts
    used = {name for name in PRODUCTS.values() if facts["ptx"].get(name)}
    if job.function not in BLOCKS or is_wide:
        assert not used
    else:
        # Products of fewer than 64 rows, those of small states, are not for wgmma and tcgen05.
        assert used - {"mma.sync"} <= {PRODUCTS[job.sm]}
        assert used
