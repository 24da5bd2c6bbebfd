"""Lists the compilations for absent GPUs: every launch in the tuning tables, and variants of the problem."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels.arch import CATALOGUE, GPUArch
from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import DTYPES, AttentionProblem, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from kernels.attention.spec import KernelSpec
from kernels.attention.tuned import tuned_launches
from kernels.fp8 import FP8

ARCHES = {arch.sm: arch for arch in CATALOGUE.values() if arch.has_triton}
_LIKE = {103: 100}
"""Compute capabilities that no GPU of the catalogue has, each with one that has its shared memory."""
SAMPLED_HEAD_DIMS = frozenset({64, 80, 256})
"""Head dims for float16, whose code differs from bfloat16's only in the type of the instructions, and for float32."""
_HEADS = 32, 8
_FIRST_TO_LAST = (90, 89, 80, 100, 120, 86, 75)
_KINDS = (90, 89, 100, 75)
"""One for each kind of tensor cores, wgmma, mma.sync and tcgen05, and one for GPUs without Triton's tensor cores."""
_READ_FP8 = (89, 90)
"""Compute capabilities for which all head dims over an FP8 cache are compiled; others use the same conversions."""
_RELATIVES = {86: 89, 120: 89}
"""Compute capabilities whose used instructions, registers and shared memory equal those of another one."""
_LONGEST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        sm: compute capability.
        kernel: name of a registry's row, `write_kv` or `combine_parts`.
        stage: "plan" for kernels launched once per step, "run" for kernels that each layer launches.
        problem: the attention problem; for `write_kv` only its shapes and dtypes matter.
        launch: tile sizes.
        num_seqs: sequences of the batch, for the functions that plan a step.
        name: the feature that the job covers; empty for the common case.
        float32_out: whether the output is float32 for any dtype, like that of the rest of a cascade.
        function: the launched function to compile; empty where there is only one.
    """

    sm: int
    kernel: str
    stage: str
    problem: AttentionProblem
    launch: LaunchConfig
    num_seqs: int = 2
    name: str = ""
    float32_out: bool = False
    function: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `from_json` takes."""
        fields = dataclasses.asdict(self)
        fields["problem"]["phase"] = self.problem.phase.value
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        """Make a job from the fields of `to_json`."""
        problem = {**fields["problem"], "phase": Phase(fields["problem"]["phase"])}
        return cls(
            **{
                **fields,
                "problem": AttentionProblem(**problem),
                "launch": LaunchConfig(**fields["launch"]),
            }
        )

    def __str__(self) -> str:
        """Return the job's name for test names and failures."""
        launch = self.launch
        tile = f"{launch.block_m}x{launch.block_n} w{launch.num_warps} s{launch.num_stages}"
        loop = " one loop" if launch.one_loop else ""
        name = f" ({self.name})" if self.name else ""
        stage = f"{self.stage} {self.function}" if self.function else self.stage
        return f"sm_{self.sm} {self.kernel} {stage}{name} {tile}{loop}: {self.problem}"


_HOPPER_VARIANTS: dict[str, dict[str, Any]] = {
    "window, softcap, lse, 1 head a group": {
        "num_heads": 8, "sliding_window": 1000, "softcap": 30.0, "lse": True,
    },
    "packed, window, not causal, lse, 2 heads a group": {
        "num_heads": 16, "block_size": None, "causal": False, "sliding_window": 1000, "lse": True,
    },
    "softcap, blocks of 64, 8 heads a group": {"num_heads": 64, "block_size": 64, "softcap": 30.0},
    "64 heads a group": {"num_heads": 64, "num_kv_heads": 1},
}  # fmt: skip
"""Compiled for every head dim: each has its own distribution of registers, so each may spill."""
_INVARIANT_VARIANTS: dict[str, dict[str, Any]] = {
    "window, softcap, 1 head a group": {"num_heads": 8, "sliding_window": 1000, "softcap": 30.0},
    "window, 2 heads a group": {"num_heads": 16, "sliding_window": 1000},
    "softcap, blocks of 64, 8 heads a group": {"num_heads": 64, "block_size": 64, "softcap": 30.0},
    "3 heads a group": {"num_heads": 9, "num_kv_heads": 3},
    "7 heads a group": {"num_heads": 14, "num_kv_heads": 2},
    "64 heads a group": {"num_heads": 64, "num_kv_heads": 1},
}
_FUNCTIONS = {"hopper_fp8_prefill": "prefill", "hopper_unpacked_prefill": "unpack_rows"}
"""Of rows that launch several functions, the one that no other row launches, or the largest."""
_FP8_VARIANTS: dict[str, dict[str, Any]] = {
    "lse, 1 head a group": {"num_heads": 8, "lse": True},
    "not causal, 2 heads a group": {"num_heads": 16, "causal": False},
    "64 heads a group": {"num_heads": 64, "num_kv_heads": 1},
}


def arch_of(sm: int) -> GPUArch:
    """Return a GPU of a compute capability."""
    if sm in _LIKE:
        return dataclasses.replace(ARCHES[_LIKE[sm]], key=f"sm_{sm}", name=f"sm_{sm}", sm=sm)
    return ARCHES[sm]


def problem(
    phase: Phase, dtype: str = "bfloat16", head_dim: int = 128, **more: Any
) -> AttentionProblem:
    """Make the representative problem of a dtype and head dim, with some fields changed."""
    fields = {"num_heads": _HEADS[0], "num_kv_heads": _HEADS[1], "block_size": 16}
    fields |= {"softmax_scale": head_dim**-0.5, "dtype": dtype, "head_dim": head_dim}
    return AttentionProblem(phase=phase, **{**fields, **more})


def jobs_for(sm: int) -> list[Job]:
    """List the jobs for a compute capability, without jobs that compile the same code."""
    if not ARCHES[sm].has_triton_tensor_cores:
        return _writing(sm)
    jobs = [
        job
        for spec in compiled_rows(sm)
        for job in (*_tabled(spec, sm), *_variants(spec, sm), *_quantized(spec, sm))
    ]
    jobs += _planning(sm) + _writing(sm)
    return list({dataclasses.replace(job, name=""): job for job in reversed(jobs)}.values())[::-1]


def distinct_jobs() -> list[Job]:
    """List the jobs for all architectures, without those whose result follows from another architecture.

    Jobs with a special feature, and float16, are compiled once for each of `_KINDS`; float32, which uses no tensor
    cores, once. A launch that sm_89 has too is not compiled for its `_RELATIVES`, which have its registers and shared
    memory.
    """
    found: dict[Job, Job] = {}
    for sm in _FIRST_TO_LAST:
        for job in jobs_for(sm):
            special = job.name not in ("", "safe default") or job.problem.dtype == "float16"
            if special and sm not in _KINDS:
                continue
            kind = _RELATIVES.get(sm, sm)
            if job.problem.dtype == "float32" and ARCHES[sm].has_triton_tensor_cores:
                kind = 0
            found.setdefault(dataclasses.replace(job, sm=kind, name=""), job)
    return list(found.values())


def representative_jobs() -> set[Job]:
    """Choose one job for each function and kind of tensor cores, preferably of the commonest dtype and head dim."""
    found: dict[tuple[Any, ...], Job] = {}
    for job in sorted(distinct_jobs(), key=_is_uncommon):
        if job.sm in _KINDS and (job.problem.kv_dtype is None or job.sm in _READ_FP8):
            key = (job.sm, job.kernel, job.stage, job.function, job.problem.kv_dtype)
            found.setdefault(key, job)
    return set(found.values())


def _is_uncommon(job: Job) -> bool:
    return bool(job.name) or (job.problem.dtype, job.problem.head_dim) != ("bfloat16", 128)


def compiled_rows(sm: int) -> list[KernelSpec]:
    """List the registry rows that launch Triton or Gluon kernels on a compute capability."""
    # Decodes with the launches of another row have the same compiled kernel.
    invariant = [row for row in INVARIANT_REGISTRY if row.tuned_as is None]
    ours = [row for row in (*REGISTRY, *PREFIX_REGISTRY, *invariant) if row.launch]
    return [row for row in ours if row.sm and sm in row.sm]


def fixed_fields(spec: KernelSpec) -> dict[str, Any]:
    """Return the fields that all problems of a row have in common."""
    if spec.quantized_only:
        return {"kv_dtype": FP8}
    if spec.batch_invariant:
        return {"batch_invariant": True}
    if spec.measured is not None:
        return {"unmeasured": True}
    return {"causal": False, "lse": True} if spec in PREFIX_REGISTRY else {}


def _tabled(spec: KernelSpec, sm: int) -> list[Job]:
    """List every launch that selection can return, for every dtype and head dim of the row."""
    jobs = []
    for dtype in DTYPES:
        for head_dim in sorted(spec.head_dims or ()):
            if dtype in spec.dtypes and (dtype == "bfloat16" or head_dim in SAMPLED_HEAD_DIMS):
                asked = problem(spec.phase, dtype, head_dim, **fixed_fields(spec))
                jobs += [_job(sm, spec, asked, launch) for launch in _launches(spec, asked, sm)]
    assert spec.launch is not None
    widest = problem(spec.phase, head_dim=max(spec.head_dims or ()), **fixed_fields(spec))
    return [*jobs, _job(sm, spec, widest, spec.launch, "safe default")]


def _variants(spec: KernelSpec, sm: int) -> list[Job]:
    """List problems with features that change the code, with the launches of the commonest head dim."""
    variants: dict[str, dict[str, Any]] = {
        "softcap and lse": {"softcap": 30.0, "lse": True},
        "3 heads a group": {"num_heads": 24},
        "7 heads a group": {"num_heads": 28, "num_kv_heads": 4},
        "blocks of 256": {"block_size": 256},
    }
    if spec.sliding_window:
        variants["window"] = {"sliding_window": 1000}
    if spec.phase is Phase.PREFILL and spec.packed:
        variants["packed"] = {"block_size": None}
        variants["packed, not causal"] = {"block_size": None, "causal": False}
    elif spec.several_queries:
        variants["4 queries"] = {"max_query_tokens": 4}
        variants["8 queries in two tiles, window"] = {"max_query_tokens": 8, "sliding_window": 1000}
    rest = "rest of a cascade"
    if spec.phase is Phase.DECODE and spec not in PREFIX_REGISTRY:
        variants[rest] = {"lse": True}
    asked = [
        (name, problem(spec.phase, **(fixed_fields(spec) | fields)))
        for name, fields in variants.items()
    ]
    every_dim = {
        "hopper_fp8_prefill": _FP8_VARIANTS,
        "hopper_prefill": _HOPPER_VARIANTS,
        "hopper_invariant_decode": _INVARIANT_VARIANTS,
        "hopper_invariant_prefill": _INVARIANT_VARIANTS,
        "blackwell_prefill": _HOPPER_VARIANTS,
    }
    if spec.name in every_dim:
        asked += [
            (name, problem(spec.phase, head_dim=head_dim, **(fixed_fields(spec) | fields)))
            for name, fields in every_dim[spec.name].items()
            for head_dim in sorted(spec.head_dims or ())
        ]
    return [
        dataclasses.replace(_job(sm, spec, it, launch, name), float32_out=name == rest)
        for name, it in asked
        if not spec.unsupported(it, ARCHES[sm])
        for launch in _launches(spec, it, sm)[-1:]
    ]


def _quantized(spec: KernelSpec, sm: int) -> list[Job]:
    """List every launch over an FP8 cache, and variants of the commonest head dim."""
    if spec.quantized is None or sm not in (spec.quantized.sm or ()):
        return []
    asked = [
        (problem(spec.phase, dtype, head_dim, kv_dtype=FP8, **fixed_fields(spec)), "")
        for head_dim in sorted(spec.head_dims or ())
        for dtype in sorted(spec.quantized.dtypes)
        if head_dim in SAMPLED_HEAD_DIMS or (dtype == "bfloat16" and sm in _READ_FP8)
    ]
    fields = {"sliding_window": 1000, "softcap": 30.0, "lse": spec.lse, "num_heads": 24}
    fields |= fixed_fields(spec)
    fields |= {"max_query_tokens": 8} if spec.phase is Phase.DECODE else {}
    for size in (1, 256):
        features = problem(spec.phase, kv_dtype=FP8, block_size=size, **fields)
        asked.append((features, f"3 heads a group, blocks of {size}"))
    return [
        _job(sm, spec, it, launch, name) for it, name in asked for launch in _launches(spec, it, sm)
    ]


def _planning(sm: int) -> list[Job]:
    """List the functions that plan a step, and the merge of a cascade."""
    prefill, decode = problem(Phase.PREFILL), problem(Phase.DECODE, sliding_window=1000)
    windowed = problem(Phase.PREFILL, sliding_window=1000)
    packed = problem(Phase.PREFILL, num_heads=28, num_kv_heads=4, block_size=None)
    launch = LaunchConfig(64, 64, 4, 2)
    ordered = {"hopper_prefill": 192, "blackwell_prefill": 256}
    return [
        *(
            Job(sm, row.name, "plan", prefill, LaunchConfig(rows, 64, 4, 2), 1, f"{rows} rows")
            for row in compiled_rows(sm)
            if (rows := ordered.get(row.name))
        ),
        *_quantizing(sm),
        Job(sm, "portable_prefill", "plan", prefill, launch, 1, "1 sequence"),
        Job(sm, "portable_prefill", "plan", packed, launch, 300, "packed, 300 sequences"),
        *(
            Job(sm, "invariant_prefill", "plan", it, launch, count, f"{count} sequences")
            for count, it in ((1, prefill), (300, windowed))
        ),
        Job(sm, "portable_decode", "plan", problem(Phase.DECODE), launch, 1, "1 sequence"),
        Job(sm, "portable_decode", "plan", decode, launch, 300, "window, 300 sequences"),
        Job(sm, "combine_parts", "run", problem(Phase.DECODE, head_dim=192, lse=True), launch),
        Job(sm, "combine_parts", "run", problem(Phase.DECODE, "float16", 256), launch),
    ]


def _writing(sm: int) -> list[Job]:
    """List the kernels that write the cache."""
    launch = LaunchConfig(64, 64, 4, 2)
    return [
        Job(sm, "write_kv", "run", problem(Phase.PREFILL, dtype, head_dim, kv_dtype=kv), launch)
        for dtype, head_dim in (("bfloat16", 128), ("float16", 128), ("float32", 80))
        for kv in (None, FP8)
    ]


def _quantizing(sm: int) -> list[Job]:
    """List the functions that write the operands of the FP8 prefill."""
    launch = LaunchConfig(128, 128, 4, 1)
    asked = [
        problem(Phase.PREFILL, dtype, 128, kv_dtype=FP8, block_size=size)
        for dtype, size in (("bfloat16", 16), ("float16", 48))
    ]
    return [
        Job(sm, row.name, stage, it, launch, num_seqs, function=function)
        for row in compiled_rows(sm)
        if row.name == "hopper_fp8_prefill"
        for num_seqs, it in zip((1, 4), asked, strict=True)
        for stage, function in (
            ("plan", "list_key_tiles"),
            ("run", "quantize_queries"),
            ("run", "copy_tiles"),
        )
    ]


def _job(
    sm: int, spec: KernelSpec, asked: AttentionProblem, launch: LaunchConfig, name: str = ""
) -> Job:
    return Job(
        sm, spec.name, "run", asked, launch, name=name, function=_FUNCTIONS.get(spec.name, "")
    )


def _launches(spec: KernelSpec, asked: AttentionProblem, sm: int) -> list[LaunchConfig]:
    """List a problem's launches by length, without fields that do not change the code."""
    tuned = tuned_launches(spec, asked, ARCHES[sm])
    return list(dict.fromkeys(dataclasses.replace(row.launch, programs_per_sm=1) for row in tuned))
