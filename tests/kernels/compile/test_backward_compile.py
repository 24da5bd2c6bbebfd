"""The instructions of Hopper's one-pass backward, which no GPU has run: registers, products, copies and additions.

Counts follow from the shape of a tile: a product instruction multiplies 16 columns of its inner dimension for 64 rows
of a warp group, an addition instruction adds four numbers of a thread.
"""

from __future__ import annotations

import pytest

from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.compile.fused_compile_worker import FusedJob
from tests.kernels.compile.products_in_flight import faults
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

KEYS, QUERIES, THREADS = 128, 64, 256
MOST_SPILLED = 32
"""Bytes of registers that a thread may store in memory, outside of the loop, with a window or groups of heads."""


def job(*around, head_dim=128, function="backward"):
    return FusedJob(90, "training", around=around, head_dim=head_dim, function=function)


MAIN = [job(*mask, "one head a group", head_dim=size) for size in (128, 64) for mask in ((), ("all",))]  # fmt: skip
JOBS = [
    *MAIN,
    *(
        job(*around, head_dim=size)
        for size in (128, 64)
        for around in ((), ("all",), ("window",), ("float16",), ("window", "float16"))
    ),
]


@pytest.mark.parametrize("job", slow_except(MAIN[:1], JOBS))
def test_the_loop_has_the_instructions_of_a_tile_and_no_spills(job, compile_job):
    facts = compile_job(job)
    head_dim, loop = job.head_dim, facts["sass"]

    assert facts["shared"] <= ARCHES[90].shared_memory_bytes
    assert not facts["warnings"], facts
    assert facts["spill_stores"] <= (0 if job in MAIN else MOST_SPILLED), facts
    # Scores and their gradients, gradients of values and keys, gradient of queries.
    products = 2 * head_dim // 16 + 2 * QUERIES // 16 + KEYS // 16
    assert loop["loop HGMMA"] == facts["ptx"]["wgmma.mma_async"] == products
    assert loop["loop MUFU.EX2"] == KEYS * QUERIES // THREADS
    assert loop["loop REDG.E.ADD.F32x4"] == QUERIES * head_dim // THREADS // 4
    assert loop["loop WARPGROUP.DEPBAR"] == 3
    assert loop["loop BAR.ARV"] == 1
    assert "loop LDL" not in loop or job not in MAIN or not loop["loop LDL"]


@pytest.mark.parametrize("job", slow_except(MAIN[:1], JOBS))
def test_no_instruction_touches_the_registers_of_a_product_in_flight(job, compile_job):
    assert compile_job(job)["sass"]["faults of products in flight"] == 0


@pytest.mark.parametrize(
    "job",
    [job(head_dim=size, function=name) for size in (64, 128) for name in ("prepare", "finish")],
)
def test_the_scratch_memory_is_read_and_written_in_whole_lines(job, compile_job):
    facts = compile_job(job)

    assert not facts["spill_stores"]
    numbers = QUERIES * job.head_dim // 128 // 4
    assert facts["sass"]["LDG.128"] == numbers
    assert facts["sass"]["STG.128"] == numbers // (1 if job.function == "prepare" else 2)


LOOP = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0020*/                   {before}
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/                   {after}
        /*0050*/              @P0 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("instruction", "is_fault"),
    [
        ("FADD R24, R60, R61 ;", True),
        ("FADD R60, R55, R61 ;", True),
        ("F2FP.BF16.F32.PACK_AB R11, R60, R61 ;", True),
        ("LDS.64 R10, [R60+0x100] ;", True),
        ("STSM.16.M88.4 [R60], R52 ;", True),
        ("STSM.16.M88.4 [R60], R8 ;", False),
        ("FADD R60, R8, R61 ;", False),
        ("LDS.64 R56, [R60+0x100] ;", False),
    ],
)
def test_an_instruction_between_a_product_and_its_wait_is_found(instruction, is_fault):
    nothing = "NOP ;"

    assert bool(faults(LOOP.format(before=instruction, after=nothing))) is is_fault
    assert not faults(LOOP.format(before=nothing, after=instruction))
