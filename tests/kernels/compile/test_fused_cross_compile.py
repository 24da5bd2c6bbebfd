"""Compiles the fused kernels for absent GPUs, and checks registers, tensor cores and the width of loads.

The memory bandwidth that a kernel reaches depends on how many wide loads it issues and how early; both are counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.linear.problem import LinearProblem
from kernels.linear.registry import VECTOR as VECTOR_ROW
from kernels.linear.select import LinearChoice, select_linear
from kernels.linear.tuned import find, linear_table
from kernels.sampling.rows import SAMPLE_SIZES
from kernels.step.single_launch import ROW_COUNTS, unsupported
from kernels.weight_format import FP8_ROWS, WeightFormat, unquantized
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.compile.fused_compile_worker import MATRICES, STEPS, WEIGHT_FORMATS, FusedJob
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

REGISTERS = 64 * 1024
SUM_REGISTERS = 64
"""Of a thread that waits for other GPUs; its program runs at once with as many as `one_shot` counts on."""
ADA = 89
HOPPER = 90
FEW_TOKENS = 64
COMPUTE_CAPABILITIES = (80, 89, 90, 100)
QKV, OUTPUT, GATE_UP, DOWN, HEAD = (
    ((4096, 1024, False), ("norm",)),
    ((1024, 2048, False), ("residual",)),
    ((3072, 1024, True), ("norm",)),
    ((1024, 3072, False), ("residual",)),
    ((151936, 1024, False), ("norm", "best")),
)
WIDE = (((14336, 4096, True), ("norm",)), ((4096, 14336, False), ("residual",)))
BLACKWELL_STEPS = ((), ("bias",), ("groups of 3",), ("groups of 8",))
"""Of `STEPS`: those that fit into the shared memory of sm_120, and without a spill on sm_100."""
STEPS_OF_ROWS = {
    around: most
    for around, shape in STEPS.items()
    for weight_format in (
        next((WEIGHT_FORMATS[it] for it in around if it in WEIGHT_FORMATS), None),
    )
    for most in ROW_COUNTS
    if "gemma" not in around
    and not unsupported(shape, torch.bfloat16, ARCHES[HOPPER], most, weight_format)
}
"""Of `STEPS`: those that a step of several sequences supports, and the largest number of sequences."""
SAMPLING = ("rank_tiles", "set_limits", "weigh_tiles", "sample_filtered")
SMALL_VOCABULARIES = (512, SAMPLE_SIZES.capacity, SAMPLE_SIZES.capacity + 1)
"""Sizes of rows that a list of candidates holds, just holds and just does not hold."""
NARROW_HEADS = (16, 8, 24, 48)
NARROW_ROPES = [
    (around, tokens)
    for around in ((), ("norm",), ("norm", "fp8"))
    for tokens in (4096, 600, 100, 1)
] + [(("norm", *it, "invariant"), 256) for it in ((), ("fp8",), ("float32",))]
"""Features of rotations of narrow heads, and a number of tokens for each tile of `rotation_launch`."""
ODD = (((1001, 576, False), ("bias", "best")), ((1536, 576, True), ("bias", "norm")))


def layer(
    sm: int,
    shape: tuple[int, int, bool],
    around: tuple[str, ...],
    rows: int,
    dtype: str,
    form: WeightFormat | None = None,
) -> FusedJob:
    outputs, inputs, gated = shape
    problem = LinearProblem(rows, outputs, inputs, dtype, gated, form or unquantized(dtype))
    choice = select_linear(problem, ARCHES[sm])
    assert choice.spec is VECTOR_ROW
    return FusedJob(sm, "linear", choice, around)


def timed(sm: int) -> list[FusedJob]:
    """List the measured launches of a compute capability, for one row and for four."""
    rows = [row for row in linear_table(sm) if row["launch"] and row["max_rows"] in (1, 4)]
    found = []
    for row in rows:
        shape = (row["max_rows"], row["outputs"], row["inputs"])
        problem = LinearProblem(*shape, gated=row["gated"])
        choice = select_linear(problem, ARCHES[sm], lambda asked, _arch: find(asked, rows))
        assert choice.measured
        found.append(FusedJob(sm, "linear", choice, ("norm",) if row["gated"] else ("residual",)))
    return found


def fp8_cases(sm: int) -> list[tuple[tuple[tuple[int, int, bool], tuple[str, ...]], int]]:
    """List layers with FP8 weights, and their numbers of rows."""
    cases = [(QKV, 1), (DOWN, 4)]
    if sm == HOPPER:
        cases += [(case, rows) for case in (OUTPUT, GATE_UP) for rows in (1, 4)]
        cases += [(case, rows) for case in (*WIDE, *ODD) for rows in (1, 2)]
    return cases


def jobs_for(sm: int) -> list[FusedJob]:
    """List the selected kernels for layers of common models, the measured launches, and the small operations."""
    cases = [(case, rows) for case in (QKV, DOWN) for rows in (1, 4)]
    if sm == HOPPER:
        cases = [(case, rows) for case in (QKV, OUTPUT, GATE_UP, DOWN, HEAD) for rows in (1, 4)]
        cases += [(case, rows) for case in (*WIDE, *ODD) for rows in (1, 2)]
    linears = [layer(sm, *case, rows, "bfloat16") for case, rows in cases]
    linears.append(layer(sm, *GATE_UP, 2, "float16"))
    linears.append(layer(sm, *QKV, 1, "float32"))
    linears += timed(sm)
    linears += [layer(sm, *case, rows, "bfloat16", FP8_ROWS) for case, rows in fp8_cases(sm)]
    quantizing = [FusedJob(sm, "quantize", around=("norm",), tokens=64), FusedJob(sm, "quantize")]
    return [
        *linears,
        *(quantizing if sm >= ADA else ()),
        FusedJob(sm, "add_norm", tokens=64),
        FusedJob(sm, "gate", tokens=64),
        FusedJob(sm, "add_norm", around=("parts",), tokens=64),
        FusedJob(sm, "add_norm", around=("bias", "parts"), tokens=64),
        FusedJob(sm, "add_norm", around=("float32",), tokens=64),
        *(FusedJob(sm, "gate", around=("plain", name), tokens=64) for name in ("relu", "relu2")),
        *(FusedJob(sm, "gate", around=(name,), tokens=64) for name in ("gelu", "gelu_tanh")),
        *(
            FusedJob(sm, "matrix", around=(*around, *fp8), tokens=rows)
            for around in MATRICES
            for fp8, most in (((), 1000), (("fp8",), 256))
            for rows in (5, 64, 128, 256, 1000)
            if sm == HOPPER and rows <= most
        ),
        *(
            FusedJob(sm, "matrix", around=(*around, form), tokens=rows, function="matrix_linear")
            for around in (("wide",), ("gated",), ("parts",))
            for form in ("int4", "fp8 blocks")
            for rows in (16, 64, 256)
            if sm == HOPPER
        ),
        *(
            FusedJob(sm, "groups", around=(*around, *form), tokens=rows)
            for around in (("wide",), ("gated", "wide"), ("parts", "long"))
            for form in ((), ("fp8 blocks",))
            for rows in (1, 16)
        ),
        *(
            FusedJob(sm, "persistent", around=(*around, *invariant), tokens=rows)
            for around in MATRICES
            for invariant in ((), ("invariant",))
            for rows in (128, 256, 1024, 4096)
            if sm == HOPPER
        ),
        *(
            FusedJob(sm, "invariant", around=around, tokens=64)
            for around in ((), ("parts",), ("fp8", "parts"), ("float32",))
        ),
        FusedJob(sm, "embed", tokens=64),
        *(
            FusedJob(sm, "lora", around=around, tokens=rows, function=name)
            for around in ((), ("long",), ("rank 64",), ("rank 256",), ("float32",))
            for rows in (64, 1024)
            for name in ("shrink", "expand")
        ),
        FusedJob(sm, "lora", tokens=64, function="find_tiles"),
        *(FusedJob(sm, "sum_ranks", around=it) for it in ((), ("norm",), ("norm", "parts"))),
        FusedJob(sm, "best"),
        *(FusedJob(sm, "argmax", function=name) for name in ("rank_tiles", "choose_best")),
        FusedJob(sm, "chosen", function="score_chosen"),
        *(FusedJob(sm, "sample", function=name) for name in SAMPLING),
        *(
            FusedJob(sm, "sample", function="sample_filtered", vocabulary=n)
            for n in SMALL_VOCABULARIES
        ),
        FusedJob(sm, "rope", around=("norm",)),
        FusedJob(sm, "rope", around=("norm", "ahead")),
        FusedJob(sm, "rope", around=("norm",), tokens=256),
        FusedJob(sm, "rope", tokens=4096, head_dim=64),
        *(
            FusedJob(sm, "rope", around=("norm", "fp8"), tokens=tokens, head_dim=head_dim)
            for tokens in (1, 256, 4096)
            for head_dim in (64, 80, 128, 256)
        ),
        FusedJob(sm, "rope", around=("norm",), tokens=4096, head_dim=80),
        *(
            FusedJob(sm, "rope", around=("norm", *around), tokens=tokens, head_dim=head_dim)
            for tokens in (1, 256, 4096)
            for head_dim in (256, 512)
            for around in (("values",), ("values", "fp8"))
        ),
        *(
            FusedJob(sm, "rope", around=around, tokens=tokens, head_dim=head_dim)
            for head_dim in NARROW_HEADS
            for around, tokens in NARROW_ROPES
        ),
        *(FusedJob(sm, "step", around=around) for around in STEPS if sm == HOPPER),
    ]


JOBS = [job for sm in COMPUTE_CAPABILITIES for job in jobs_for(sm)] + [
    FusedJob(sm, "step", around=around)
    for sm in (100, 120)
    for around in (*BLACKWELL_STEPS, ("fp8 weights",))
]
JOBS += [FusedJob(HOPPER, "step", around=it, tokens=most) for it, most in STEPS_OF_ROWS.items()]
JOBS += [FusedJob(HOPPER, "step", around=("norm",), tokens=rows) for rows in (2, 4)]


QUERIES = [
    FusedJob(sm, "rope", around=("norm", "queries"), tokens=tokens, head_dim=head_dim)
    for sm in COMPUTE_CAPABILITIES
    for tokens in (1, 256, 4096)
    for head_dim in (256, 512)
]
"""Rotations that write nothing to the cache."""


def representative_jobs() -> list[FusedJob]:
    """Choose one job of each function for Hopper, and linear layers for a GPU without dependent launch."""
    found: dict[tuple[Any, ...], FusedJob] = {}
    for job in JOBS:
        if job.sm == HOPPER or (job.sm == ADA and job.operation == "linear"):
            form = job.choice and job.choice.problem.format
            step = job.operation == "step" and (
                job.tokens > 1,
                any(it in WEIGHT_FORMATS for it in job.around),
            )
            narrow = job.operation == "rope" and job.head_dim in NARROW_HEADS
            found.setdefault((job.sm, job.operation, job.function, form, step, narrow), job)
    return list(found.values())


def wide_loads(choice: LinearChoice, around: tuple[str, ...]) -> tuple[int, int]:
    """Return the numbers of 16-byte loads per thread of the vector kernel: of weights, and of all else."""
    launch, problem = choice.launch, choice.problem
    assert launch is not None
    chunks = -(-problem.inputs // launch.block_k)
    a_row = launch.block_k * problem.format.bits // 8 // (launch.num_warps * 32 * 16)
    weights = chunks * problem.matrices * launch.block_n * a_row
    others = chunks * a_row * (choice.padded_rows + ("norm" in around))
    return weights, others


def fp8_load_faults(
    job: FusedJob, choice: LinearChoice, sass: dict[str, int], shared: int
) -> list[str]:
    """List the faults of the 8-byte loads of FP8 weights; the scales of each matrix may add one such load."""
    launch, problem = choice.launch, choice.problem
    assert launch is not None
    chunks = -(-problem.inputs // launch.block_k)
    of_a_chunk = problem.matrices * launch.block_n * launch.block_k // (launch.num_warps * 256)
    first = min(launch.ahead, chunks) * of_a_chunk
    early = sass.get("early LDG.64", 0)
    found = []
    if job.sm == HOPPER and not first <= early <= first + problem.matrices:
        found.append(f"{early} loads of 8 bytes before the wait, wanted {first}")
    if early + sass.get("LDG.64", 0) < chunks * of_a_chunk:
        found.append(f"{early} and {sass.get('LDG.64', 0)} loads of 8 bytes")
    if shared >= launch.block_k:
        found.append(f"{shared} bytes of shared memory: weights are exchanged between threads")
    return found


def faults(job: FusedJob, facts: dict[str, Any]) -> list[str]:
    """List the faults of a compilation."""
    if "error" in facts:
        return [facts["error"]]
    found = [f"{n}: {facts[n]}" for n in ("stack", "spill_stores", "spill_loads") if facts[n]]
    found += facts["warnings"]
    if facts["shared"] > ARCHES[job.sm].shared_memory_bytes:
        found.append(f"{facts['shared']} bytes of shared memory")
    if facts["registers"] * facts["threads"] > REGISTERS:
        found.append(f"{facts['registers']} registers for each of {facts['threads']} threads")
    waits = facts["ptx"].get("griddepcontrol.wait", 0)
    independent = (
        job.operation in ("embed", "step")
        or job.function == "find_tiles"
        or job == FusedJob(job.sm, "sum_ranks")
    )
    if waits != (job.sm >= HOPPER and not independent):
        found.append(f"waits {waits} times")
    # 16 bytes are no more than half a head, and a thread has one token.
    wide = job.head_dim % 16 == 0 and {"fp8", "float32"}.isdisjoint(job.around)
    if job.operation == "rope" and job.tokens > FEW_TOKENS and wide:
        # The only narrow loads are of a token's position and slot.
        narrow = {name: n for name, n in facts["sass"].items() if not name.endswith(".128")}
        expected = {"early LDG.32" if job.sm >= HOPPER else "LDG.32": 2}
        found += [] if narrow == expected else [f"narrow loads and stores {narrow}"]
    if job.operation == "sum_ranks":
        # The only narrow store is of the number of launches.
        stores = {name: n for name, n in facts["sass"].items() if name.startswith("STG.")}
        if stores != {"STG.128": stores.get("STG.128", 0), "STG.32": 1}:
            found.append(f"stores {stores}")
        if facts["registers"] > SUM_REGISTERS:
            found.append(f"{facts['registers']} registers: not all programs run at once")
    if job.operation == "step":
        # Only scales are copied by less than 16 bytes at once, and halves of a head in FP8 that are no multiple of 16
        # bytes.
        copies = {name: n for name, n in facts["sass"].items() if name.startswith("LDGSTS.")}
        fp8 = "fp8" in job.around
        expected = {"LDGSTS.32": 2} if fp8 else {}
        if not WEIGHT_FORMATS.keys().isdisjoint(job.around):
            expected["LDGSTS.32"] = copies.get("LDGSTS.32", 0)
        has_groups = any(WEIGHT_FORMATS[it].group for it in job.around if it in WEIGHT_FORMATS)
        if has_groups or (fp8 and STEPS[job.around].head_dim % 32):
            expected["LDGSTS.64"] = copies.get("LDGSTS.64", 0)
        expected["LDGSTS.128"] = copies.get("LDGSTS.128", 0)
        if Counter(copies) != Counter(expected):  # no copies are none
            found.append(f"copies {copies}")
        if facts["ptx"].get("mul.f16x2", 0):
            found.append("scales a vector after its conversion to float16, whose range is smaller")
    if job.choice is None:
        return found
    if job.choice.problem.format.is_quantized:
        return found + fp8_load_faults(job, job.choice, facts["sass"], facts["shared"])
    return found + load_faults(job, job.choice, facts["sass"])


def load_faults(job: FusedJob, choice: LinearChoice, sass: dict[str, int]) -> list[str]:
    """List the faults of the loads of a linear layer."""
    weights, others = wide_loads(choice, job.around)
    found = []
    total = sass.get("early LDG.128", 0) + sass.get("LDG.128", 0)
    if total != weights + others:
        found.append(f"{total} loads of 16 bytes, wanted {weights} + {others}")
    launch = choice.launch
    assert launch is not None
    chunks = -(-choice.problem.inputs // launch.block_k)
    early = weights * min(launch.ahead, chunks) // chunks
    if job.sm == HOPPER and sass.get("early LDG.128", 0) != early:
        found.append(f"{sass.get('early LDG.128', 0)} of them before the wait, wanted {early}")
    return found


@pytest.mark.parametrize("job", slow_except(representative_jobs(), JOBS))
def test_a_fused_kernel_compiles_without_spills_and_uses_wide_loads(job, compile_job):
    found = faults(job, compile_job(job))

    assert not found, f"{job}: {'; '.join(found)}"


@pytest.mark.parametrize("job", slow_except(QUERIES[:1], QUERIES))
def test_a_rotation_of_queries_alone_loads_no_slot(job, compile_job):
    name = "early LDG.32" if job.sm >= HOPPER else "LDG.32"
    one_less = f"narrow loads and stores {{'{name}': 1}}"
    found = [it for it in faults(job, compile_job(job)) if it != one_less]

    assert not found, f"{job}: {'; '.join(found)}"


EXPANSIONS = [
    FusedJob(sm, "lora", around=around, tokens=rows, function="expand")
    for sm in COMPUTE_CAPABILITIES
    for around in ((), ("rank 64",), ("rank 256",), ("float32",))
    for rows in (64, 1024)
]
MANY_ROWS = FusedJob(HOPPER, "lora", around=("rank 256",), tokens=1024, function="expand")


@pytest.mark.parametrize("job", slow_except([MANY_ROWS], EXPANSIONS))
def test_steps_of_few_and_of_many_rows_add_adapters_in_the_same_order(job, compile_job):
    """In both, the sum of the products begins with the layer's output, which is not added to their sum."""
    facts = compile_job(job)

    assert "error" not in facts, facts
    assert facts["sass"]["additions after the products"] == 0


FACTS = {
    "registers": 64, "threads": 128, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0,
    "warnings": [], "ptx": {"griddepcontrol.wait": 1},
}  # fmt: skip
ROPE = FusedJob(HOPPER, "rope", tokens=4096)
WIDE_ROPE = {"early LDG.32": 2, "LDG.128": 8, "STG.128": 24}
VECTOR = layer(HOPPER, *QKV, 1, "bfloat16")
IN_FP8 = layer(HOPPER, *GATE_UP, 1, "bfloat16", FP8_ROWS)
WEIGHTS, OTHERS = wide_loads(VECTOR.choice, VECTOR.around)
GOOD = FACTS | {"sass": {"early LDG.128": WEIGHTS, "LDG.128": OTHERS}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"error": "refused"}, "refused"),
        ({"spill_loads": 4}, "spill_loads: 4"),
        ({"ptx": {}}, "waits 0 times"),
        ({"sass": {"early LDG.128": WEIGHTS, "LDG.64": 2 * OTHERS}}, "loads of 16 bytes, wanted"),
        ({"sass": {"LDG.128": WEIGHTS + OTHERS}}, "0 of them before the wait"),
    ],
    ids=str,
)
def test_each_fault_of_a_fused_kernel_is_found(change, fault):
    found = faults(VECTOR, GOOD | change)

    assert found == [] if fault is None else fault in "; ".join(found)


@pytest.mark.parametrize(
    ("early", "later", "shared", "fault"),
    [
        (4, 0, 64, None),
        (4 + 2, 1, 64, None),
        (0, 4, 64, "0 loads of 8 bytes before the wait"),
        (3, 0, 64, "3 and 0 loads"),
        (4, 0, 4096, "exchanged between threads"),
    ],
)
def test_each_fault_of_weights_in_fp8_is_found(early, later, shared, fault):
    sass = {"early LDG.64": early, "LDG.64": later, "LDG.128": 3}
    found = faults(IN_FP8, FACTS | {"sass": sass, "shared": shared})

    assert found == [] if fault is None else fault in "; ".join(found)


@pytest.mark.parametrize("narrow", ["LDG.64", "STG.32", "early LDG.U16"])
def test_narrow_accesses_of_many_tokens_are_found(narrow):
    assert faults(ROPE, FACTS | {"sass": WIDE_ROPE}) == []
    assert narrow in str(faults(ROPE, FACTS | {"sass": WIDE_ROPE | {narrow: 1}}))


def test_a_job_survives_json():
    for job in (VECTOR, dataclasses.replace(VECTOR, around=()), FusedJob(80, "gate", tokens=3)):
        assert str(FusedJob.from_json(job.to_json())) == str(job)
