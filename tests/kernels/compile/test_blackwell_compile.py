"""The instructions of the Blackwell prefill, for both compute capabilities: no such GPU has run it.

Counts follow from the shape of a tile: a product instruction multiplies 16 columns of its inner dimension, a TMA copy
moves 64 columns of the rows of one cache block.
"""

from __future__ import annotations

import pytest

from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import Phase
from tests.kernels.compile.cross_compile_jobs import Job, arch_of, problem
from tests.kernels.compile.test_cross_compile import faults
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

ROWS = 128
"""Query rows of a softmax group; a thread block has two groups."""


def job(sm, head_dim, **more):
    asked = problem(Phase.PREFILL, head_dim=head_dim, unmeasured=True, **more)
    return Job(sm, "blackwell_prefill", "run", asked, LaunchConfig(2 * ROWS, 128, 4, 2))


JOBS = [
    job(sm, head_dim, block_size=block_size)
    for sm in (100, 103)
    # Of smaller bodies than these, the compiler copies a loop's first turn, and instructions are no longer countable.
    for head_dim, block_size in ((64, 16), (128, 16), (128, 64))
]
COMMON = JOBS[1], JOBS[4]


@pytest.mark.parametrize("job", slow_except(COMMON, JOBS))
def test_the_products_copies_and_exponentials_are_those_of_the_tiles(job, compile_job):
    facts = compile_job(job)
    found = faults(job, facts)

    assert not found, f"{job}: {'; '.join(found)}"
    ptx, head_dim = facts["ptx"], job.problem.head_dim
    keys = job.launch.block_n
    assert ptx["tcgen05.mma"] == 2 * (head_dim // 16 + keys // 16)
    # Each product tells its softmax group, and three commits free keys, values and queries.
    assert ptx["tcgen05.commit"] == 2 * 2 + 3
    pieces = head_dim // 64
    copies = pieces * keys // min(job.problem.block_size, keys)
    assert ptx["cp.async.bulk.tensor.2d.shared"] == 2 * copies
    assert ptx["cp.async.bulk.tensor.3d.shared"] == 2 * pieces
    assert ptx["cp.async.bulk.tensor.3d.global"] == 2 * pieces
    # Three quarters of the exponentials of a tile are the hardware's; one more rescales a row.
    assert ptx["ex2.approx"] == 2 * (keys * 3 // 4 + 1)
    assert facts["shared"] <= arch_of(job.sm).shared_memory_bytes


@pytest.mark.parametrize("job", slow_except(COMMON[:1], JOBS))
def test_accesses_to_tensor_memory_are_ordered_with_the_tensor_cores(job, compile_job):
    ptx = compile_job(job)["ptx"]

    # Before a group's weights are multiplied; after its scores, an output to rescale, and the whole output.
    assert ptx["tcgen05.fence::before"] == 2
    assert ptx["tcgen05.fence::after"] == 2 * 3 + 2


def test_both_compute_capabilities_have_the_same_code(compile_job):
    facts = [
        {name: it for name, it in compile_job(job).items() if name != "seconds"} for job in COMMON
    ]

    assert facts[0] == facts[1]
