"""Compiles every launch in the tables for every architecture, without such a GPU.

The compiler is the one that is used with the GPU, so registers, memory and instructions are the same there.
Whether a result is correct, or fast, is not tested.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import Phase
from tests.kernels.compile.cross_compile_jobs import (
    Job,
    arch_of,
    distinct_jobs,
    problem,
    representative_jobs,
)
from tests.kernels.compile.cross_compile_pool import Worker
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

REGISTERS = 64 * 1024
"""32-bit registers of an SM, the same on all architectures here."""
FAMILIES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
BULK_COPIES = {
    "blackwell_prefill": ("cp.async.bulk.tensor", "setmaxnreg"),
    "hopper_fp8_prefill": ("cp.async.bulk.tensor", "setmaxnreg"),
    "hopper_invariant_decode": ("cp.async.bulk.tensor", "setmaxnreg"),
    "hopper_invariant_prefill": ("cp.async.bulk.tensor", "setmaxnreg"),
    "hopper_prefill": ("cp.async.bulk.tensor", "setmaxnreg"),
    "hopper_decode": ("cp.async.bulk.tensor",),
    "hopper_keys_on_m_decode": ("cp.async.bulk.tensor",),
}
"""Required instructions of the rows that load by the tensor memory accelerator, some of them in a separate warp."""
FEWEST_WIDE_ROWS = 64
"""Rows of the smallest tile that wgmma and tcgen05 multiply."""
WIDEST_OF_WIDE_ROWS = 256
"""The widest heads of which the smallest such tile spills no register on every architecture."""
ROW_SHUFFLES = 32
"""Shuffles for maxima and sums of rows. Moving FP8 weights to other threads would take hundreds more."""
JOBS = distinct_jobs()


def family(job: Job) -> str | None:
    """Return the tensor core instruction that a launch must use; None if it must use none."""
    if (
        job.kernel in ("write_kv", "combine_parts")
        or job.stage == "plan"
        or job.problem.dtype == "float32"
        or job.function in ("quantize_queries", "copy_tiles", "unpack_rows")
    ):
        return None
    if job.kernel in BULK_COPIES:
        return "tcgen05.mma" if job.kernel == "blackwell_prefill" else "wgmma.mma_async"
    wide = job.problem.phase is Phase.PREFILL or job.kernel.endswith("prefix")
    if job.problem.batch_invariant and job.launch.block_m < FEWEST_WIDE_ROWS:
        wide = False
    if wide and job.name != "safe default":
        return {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(job.sm, "mma.sync")
    return "mma.sync"


def faults(job: Job, facts: dict[str, Any]) -> list[str]:
    """List the faults of a compilation."""
    if "error" in facts:
        return [facts["error"]]
    frame = ("stack", "spill_stores", "spill_loads")
    found = [f"{name}: {facts[name]} bytes" for name in frame if facts[name]]
    found += facts["warnings"]
    limit = arch_of(job.sm).shared_memory_bytes
    if facts["shared"] > limit:
        found.append(f"{facts['shared']} bytes of shared memory, the limit is {limit}")
    if facts["registers"] * facts["threads"] > REGISTERS:
        found.append(f"{facts['registers']} registers for each of {facts['threads']} threads")
    wanted = family(job)
    used = [name for name in FAMILIES if facts["ptx"].get(name)]
    if used != ([wanted] if wanted else []):
        found.append(f"multiplies with {used or 'no tensor cores'}, wanted {wanted}")
    pipelined = wanted is not None and job.launch.num_stages > 1
    bulk = job.kernel in BULK_COPIES
    if pipelined and not bulk and not facts["ptx"].get("cp.async.cg"):
        found.append("loads nothing ahead with cp.async")
    if wanted is not None and bulk:
        found += [
            f"has no {name}" for name in BULK_COPIES[job.kernel] if not facts["ptx"].get(name)
        ]
    return found + (_fp8_faults(facts) if job.function == "prefill" else [])


def _fp8_faults(facts: dict[str, Any]) -> list[str]:
    """List the faults of a kernel that must multiply in FP8 and not move weights between threads."""
    ptx = facts["ptx"]
    found = [] if ptx.get("e4m3.e4m3") else ["has no product in e4m3"]
    if ptx.get("shfl.sync", 0) > ROW_SHUFFLES or ptx.get("prmt.b32"):
        moves = {name: ptx.get(name, 0) for name in ("shfl.sync", "prmt.b32")}
        found.append(f"moves weights between threads or bytes: {moves}")
    return found


def is_small_tile(job: Job) -> bool:
    """Whether a launch for wide heads has a tile of too few rows for wgmma and tcgen05."""
    is_wide = job.problem.head_dim > WIDEST_OF_WIDE_ROWS
    return is_wide and job.launch.block_m < FEWEST_WIDE_ROWS


SMALL_TILES = [job for job in JOBS if is_small_tile(job)]


@pytest.mark.parametrize(
    "job", slow_except(representative_jobs(), [it for it in JOBS if not is_small_tile(it)])
)
def test_a_launch_compiles_to_the_expected_instructions_without_spills(job, compile_job):
    found = faults(job, compile_job(job))

    assert not found, f"{job}: {'; '.join(found)}"


@pytest.mark.parametrize("job", slow_except(SMALL_TILES[:1], SMALL_TILES))
def test_a_launch_for_wide_heads_compiles_without_spills(job, compile_job):
    # As a safe default, which multiplies tiles of any number of rows.
    found = faults(dataclasses.replace(job, name="safe default"), compile_job(job))

    assert not found, f"{job}: {'; '.join(found)}"


@pytest.mark.parametrize(("group", "columns"), [(3, 8), (12, 16)])
def test_products_with_keys_on_m_have_the_columns_of_the_group(group, columns, compile_job):
    asked = problem(Phase.DECODE, head_dim=64, num_heads=8 * group, unmeasured=True)
    job = Job(90, "hopper_keys_on_m_decode", "run", asked, LaunchConfig(16, 64, 4, 2))
    old = dataclasses.replace(job, kernel="hopper_decode", launch=LaunchConfig(64, 64, 4, 2))
    facts, before = compile_job(job), compile_job(old)

    assert not faults(job, facts)
    # Four steps of 16 for each product of a tile of 64 keys with head dim 64.
    assert facts["ptx"][f"m64n{columns}k16"] == facts["ptx"]["wgmma.mma_async"] == 8
    assert facts["ptx"]["ex2.approx"] < before["ptx"]["ex2.approx"]
    assert facts["registers"] < before["registers"]


GOOD = {
    "registers": 128, "threads": 256, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 1024,
    "warnings": [], "ptx": {"wgmma.mma_async": 24, "cp.async.cg": 8},
}  # fmt: skip
PORTABLE, HOPPER = (
    next(
        job for job in JOBS
        if job.kernel == name and family(job) == "wgmma.mma_async" and job.launch.num_stages > 1
    )
    for name in ("portable_prefill", "hopper_prefill")
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"error": "the compiler ended the process"}, "the compiler ended the process"),
        ({"stack": 8}, "stack: 8 bytes"),
        ({"spill_loads": 4}, "spill_loads: 4 bytes"),
        ({"shared": 228 * 1024}, "233472 bytes of shared memory, the limit is 232448"),
        ({"threads": 1024}, "128 registers for each of 1024 threads"),
        ({"warnings": ["C7510"]}, "C7510"),
        ({"ptx": {"mma.sync": 4, "cp.async.cg": 8}}, "multiplies with ['mma.sync'], wanted wgmma"),
        ({"ptx": {"wgmma.mma_async": 24}}, "loads nothing ahead with cp.async"),
    ],
    ids=str,
)  # fmt: skip
def test_each_fault_is_found(change, fault):
    found = faults(PORTABLE, GOOD | change)

    assert found == [] if fault is None else fault in "; ".join(found)


@pytest.mark.parametrize("missing", ["cp.async.bulk.tensor", "setmaxnreg", None])
def test_a_row_with_bulk_copies_must_use_them_and_redistribute_registers(missing):
    instructions = {"wgmma.mma_async": 24, "cp.async.bulk.tensor": 8, "setmaxnreg": 3}
    instructions.pop(missing, None)

    found = faults(HOPPER, GOOD | {"ptx": instructions})

    assert found == ([f"has no {missing}"] if missing else [])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"e4m3.e4m3": 0}, ["has no product in e4m3"]),
        ({"shfl.sync": 160}, ["moves weights between threads or bytes: {'shfl.sync': 160, 'prmt.b32': 0}"]),
        ({"prmt.b32": 64}, ["moves weights between threads or bytes: {'shfl.sync': 24, 'prmt.b32': 64}"]),
    ],
    ids=str,
)  # fmt: skip
def test_an_fp8_row_must_multiply_in_e4m3_without_moving_weights(change, fault):
    job = next(job for job in JOBS if job.function == "prefill")
    instructions = {"wgmma.mma_async": 24, "cp.async.bulk.tensor": 8, "setmaxnreg": 3}
    instructions |= {"e4m3.e4m3": 24, "shfl.sync": 24}

    assert faults(job, GOOD | {"ptx": instructions | change}) == fault


def test_a_compiler_crash_is_a_fault_of_its_job_only(tmp_path):
    job = next(job for job in JOBS if job.kernel == "write_kv")
    worker = Worker(tmp_path, "tests.kernels.compile.cross_compile_worker")
    worker.answer(job)
    worker._process.kill()

    killed = worker.answer(job)
    after = worker.answer(job)
    worker.close()

    assert "the compiler ended the process" in killed["error"]
    assert faults(job, after) == []
