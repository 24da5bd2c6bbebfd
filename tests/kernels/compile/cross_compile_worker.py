"""Compiles kernels for a GPU that is absent, and reports registers, memory and instructions.

It runs the kernel's own classes on small CPU tensors, with Triton's driver replaced by one that reports
the wanted architecture, and launches replaced by compilations. Signature, constants and specialization
are therefore those of the real launch and not a copy of them.

    python -m tests.kernels.compile.cross_compile_worker --arch 90 --kernel portable_prefill --head-dim 128 \
        --block-m 128 --block-n 64 --warps 8 --stages 3
    python -m tests.kernels.compile.cross_compile_worker --sweep jobs.json --output facts.json
    python -m tests.kernels.compile.cross_compile_worker --serve [--keys]

The last reads a job per line from standard input and answers each with a line of facts: a compiler that
aborts ends only this process. `cross_compile_pool` starts such processes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.portable.cascade_decode import CascadeDecode
from kernels.attention.portable.write_kv import write_kv
from kernels.attention.problem import KV_DTYPES, AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from kernels.attention.select import Selection
from kernels.gpu.compile_ahead import _make_keys_stable
from tests.kernels.compile.cross_compile_jobs import Job, arch_of, problem
from tests.kernels.compile.manifest.source_key import compilation_key, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

FACTS_VERSION = "7"
"""Part of the file name of cached facts, and of a job's key; change it when the facts change."""
PTX_INSTRUCTIONS = (
    "mma.sync", "cp.async.cg", "wgmma.mma_async", "tcgen05.mma", "fma.rn.f32", "cp.async.bulk.tensor",
    "setmaxnreg", "e4m3.e4m3", "shfl.sync", "prmt.b32", "griddepcontrol.wait",
    "griddepcontrol.launch_dependents", "tcgen05.ld.", "tcgen05.st.", "tcgen05.commit", "tcgen05.fence::before",
    "tcgen05.fence::after", "ex2.approx", "cp.async.bulk.tensor.2d.shared", "cp.async.bulk.tensor.3d.shared",
    "cp.async.bulk.tensor.3d.global", "m64n8k16", "m64n16k16", "mul.f16x2",
)  # fmt: skip
SASS_INSTRUCTIONS = (
    "HMMA", "HGMMA", "QGMMA", "SHFL", "PRMT", "UTCHMMA", "LDGSTS", "LDSM", "FFMA", "FFMA2", "LDL", "STL",
)  # fmt: skip
_USAGE = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class AbsentGPU(DriverBase):
    """A driver for an absent GPU; the device index is the compute capability."""

    sm = 0

    @staticmethod
    def launcher_cls(src: object, metadata: object) -> None:
        """Make no program that launches a kernel: it needs CUDA's driver."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


class Compiler:
    """Replaces Triton's launches by compilations."""

    def __init__(self, *, disassemble: bool = False) -> None:
        self._gpu = AbsentGPU()
        self._disassemble = disassemble
        self.compiled: list[Any] | None = None
        self._fresh: dict[str, Any] | None = None
        self._function = ""
        driver.set_active(self._gpu)
        _make_keys_stable()  # a run with other tests, or in another order, finds the same kernels
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.store_binary_only = True
        knobs.compilation.disable_line_info = True  # a fifth of the time
        knobs.runtime.add_stages_inspection_hook = self._watch
        launch = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            del warmup
            if self.compiled is not None and self._function in ("", function.__name__):
                function.device_caches.clear()
                self.compiled.append(launch(function, *args, grid=grid, warmup=True, **named))

        JITFunction.run = compile_only

    def facts(self, job: Job) -> dict[str, Any]:
        """Compile a job, or read the facts of an earlier compilation of the same code."""
        start = time.perf_counter()
        kernel, fresh = self._compile(job)
        kind = "sass" if self._disassemble else "ptx"
        path = Path(knobs.cache.dir) / f"{kernel.hash}.{kind}.{FACTS_VERSION}.json"
        if fresh is None and not path.exists():
            knobs.compilation.always_compile = True
            kernel, fresh = self._compile(job)
            knobs.compilation.always_compile = False
        if fresh is not None:
            whole = path.with_suffix(
                f".{os.getpid()}"
            )  # another process may compile and read the same
            whole.write_text(json.dumps(fresh))
            whole.replace(path)
        facts: dict[str, Any] = json.loads(path.read_text())
        facts["function"] = kernel.name
        facts["shared"] = kernel.metadata.shared
        facts["threads"] = 32 * kernel.metadata.num_warps
        facts["seconds"] = round(time.perf_counter() - start, 2)
        return facts

    def key(self, job: Job) -> dict[str, Any]:
        """Return a digest of what `facts` depends on, and the kernel's name, without a compilation."""
        compile_kernel, JITFunction._do_compile = JITFunction._do_compile, _identify
        try:
            (name, digest), _ = self._compile(job)
        finally:
            JITFunction._do_compile = compile_kernel
        shared = arch_of(job.sm).shared_memory_bytes
        return {"kernel": name, "key": digest_of(FACTS_VERSION, shared, job.to_json(), digest)}

    def count(self, sass: str) -> dict[str, int]:
        """Count the SASS instructions."""
        found = collections.Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?\w+\s+)?(\w+)", sass, re.M))
        return {name: found[name] for name in SASS_INSTRUCTIONS if found[name]}

    def _compile(self, job: Job) -> tuple[Any, dict[str, Any] | None]:
        self._gpu.sm = job.sm
        self.compiled = self._fresh = None
        self._function = job.function
        with contextlib.redirect_stdout(io.StringIO()):
            self.launch(job)
        (kernel,) = self.compiled or ()
        return kernel, self._fresh

    def launch(self, job: Job) -> None:
        """Run the code that launches the kernels; only the launches of the job's stage are compiled."""
        if job.kernel == "write_kv":
            arguments = _write_arguments(job)
            self.compiled = []
            write_kv(*arguments)
            return
        batch, q, cache = _step(job)
        out = q.float() if job.float32_out else torch.empty_like(q)
        lse = torch.empty(q.shape[:2]) if job.problem.lse else None
        if job.kernel == "combine_parts":
            merge = CascadeDecode(job.problem, batch, SimpleNamespace(num_parts=4), None).merge
            self.compiled = []
            merge(out, lse)
            return
        every = (*REGISTRY, *PREFIX_REGISTRY, *INVARIANT_REGISTRY)
        spec = next(row for row in every if row.name == job.kernel)
        tuned = TunedLaunch(job.launch, None, "job", measured=False)
        selection = Selection(spec, arch_of(job.sm), (tuned,), "job", ())
        if spec in PREFIX_REGISTRY:
            out = torch.empty((4, q.shape[0] * q.shape[1], q.shape[2]))
            lse = torch.empty(out.shape[:2])
        module, _, name = spec.target.partition(":")
        factory = getattr(importlib.import_module(module), name)
        self.compiled = [] if job.stage == "plan" else None
        run = factory(job.problem, batch, selection)
        if job.stage == "run":
            self.compiled = []
            run(q, cache["kv"], out, lse, **{k: v for k, v in cache.items() if k != "kv"})

    def _watch(self, backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        """Wrap the stage that runs ptxas, to read the PTX, the log and the binary."""
        del backend, rest
        assemble = stages["cubin"]

        def watched(ptx: str, metadata: dict[str, Any]) -> bytes:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                cubin: bytes = assemble(ptx, metadata)
            self._fresh = _describe(ptx, log.getvalue())
            if self._disassemble:
                self._fresh["sass"] = self.count(disassembled(cubin))
            return cubin

        stages["cubin"] = watched


def _identify(
    function: Any, _key: str, signature: Any, device: int, constants: Any, options: Any, *rest: Any
) -> tuple[str, str]:
    """Take the place of Triton's compilation of a kernel; return its name and what identifies the compilation."""
    attributes, _warmup = rest
    name = f"{function.__module__}.{function.__qualname__}"
    return name, compilation_key(function, device, options, (signature, constants, attributes))


def _describe(ptx: str, log: str) -> dict[str, Any]:
    """Extract the facts from PTX and the log of ptxas."""
    (usage,) = _USAGE.findall(log)
    (frame,) = _FRAME.findall(log)
    return {
        "registers": int(usage),
        **dict(zip(("stack", "spill_stores", "spill_loads"), map(int, frame), strict=True)),
        "ptx": {name: ptx.count(name) for name in PTX_INSTRUCTIONS if name in ptx},
        "warnings": [
            line for line in log.splitlines() if "warning" in line.lower() or "C75" in line
        ],
    }


def disassembled(cubin: bytes) -> str:
    """Return the SASS of a binary as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "nvdisasm", "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _step(job: Job) -> tuple[PagedBatch | PackedBatch, torch.Tensor, dict[str, torch.Tensor]]:
    """Make a step's batch, queries and cache, as arguments by name; their contents do not matter."""
    problem, num_seqs = job.problem, job.num_seqs
    dtype = getattr(torch, problem.dtype)
    tokens = num_seqs * problem.max_query_tokens
    q = torch.empty((tokens, problem.num_heads, problem.head_dim), dtype=dtype)
    offsets = torch.empty(num_seqs + 1, dtype=torch.int32)
    bounds = {"num_tokens": tokens, "max_seqlen_q": problem.max_query_tokens, "max_seqlen_k": 4096}
    heads = (problem.num_kv_heads, problem.head_dim)
    if problem.block_size is None:
        packed = {"kv": torch.empty((2, 64, *heads), dtype=dtype)}
        return PackedBatch(offsets, offsets, **bounds), q, packed
    table = torch.empty((num_seqs, 8), dtype=torch.int32)
    bounds["shared_prefix"] = 4 * problem.block_size
    lengths = torch.empty(num_seqs, dtype=torch.int32)
    batch = PagedBatch(offsets, lengths, table, **bounds, keys_settled=True)
    return batch, q, _cache(problem)


def _cache(problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """Make a paged cache of three blocks, with scales if it is quantized."""
    assert problem.block_size is not None
    heads, size = problem.num_kv_heads, problem.block_size
    dtype = getattr(torch, problem.cache_dtype)
    cache = {"kv": torch.empty((2, 3, size, heads, problem.head_dim), dtype=dtype)}
    if problem.kv_dtype is not None:
        cache["kv_scale"] = torch.empty((2, 3, heads, size))
    return cache


def _write_arguments(
    job: Job,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Make keys and values as views of one projection's output, a cache and slots."""
    heads, head_dim = job.problem.num_kv_heads, job.problem.head_dim
    dtype = getattr(torch, job.problem.dtype)
    qkv = torch.empty((2, 3 * heads, head_dim), dtype=dtype)
    cache = _cache(job.problem)
    slots = torch.empty(2, dtype=torch.int32)
    key, value = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    return key, value, cache["kv"], slots, cache.get("kv_scale")


def serve(compiler: Compiler, job_from_json: Callable[[dict[str, Any]], Any]) -> None:
    """Answer each line of standard input: with facts, or with keys if the program's arguments ask for those."""
    answer = compiler.key if "--keys" in sys.argv else compiler.facts
    for line in sys.stdin:
        print(json.dumps(_attempt(answer, job_from_json(json.loads(line)))), flush=True)


def _attempt(answer: Callable[[Job], dict[str, Any]], job: Job) -> dict[str, Any]:
    try:
        return answer(job)
    except Exception as error:  # noqa: BLE001  # any compiler error is reported
        causes = []
        while error is not None:
            # The last cause says what is wrong; those before, where.
            causes.append(f"{type(error).__name__}: {error}")
            error = error.__cause__
        return {"error": "\n".join(reversed(causes))}


def job_from(**wanted: Any) -> Job:
    """Make a job from the names of the command line; `--sweep` takes a list of such dictionaries."""
    decode = "decode" in wanted["kernel"]
    asked = problem(
        Phase.DECODE if decode else Phase.PREFILL,
        wanted.get("dtype", "bfloat16"),
        wanted.get("head_dim", 128),
        num_heads=wanted.get("heads", 32),
        num_kv_heads=wanted.get("kv_heads", 8),
        block_size=wanted.get("block_size", 16) or None,
        sliding_window=wanted.get("window") or None,
        softcap=wanted.get("softcap") or None,
        causal=not wanted.get("no_causal", False),
        max_query_tokens=wanted.get("queries", 1),
        lse=wanted.get("lse", False),
        kv_dtype=wanted.get("kv_dtype") or None,
    )
    launch = LaunchConfig(
        wanted.get("block_m", 16 if decode else 128),
        wanted.get("block_n", 64),
        wanted.get("warps", 4),
        wanted.get("stages", 2),
        one_loop=wanted.get("one_loop", False),
    )
    return Job(wanted["arch"], wanted["kernel"], wanted.get("stage", "run"), asked, launch)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="compile kernels for absent GPUs")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument(
        "--keys", action="store_true", help="identify the jobs, and compile nothing"
    )
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kernel", default="portable_prefill")
    parser.add_argument("--stage", default="run", choices=("plan", "run"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="", choices=("", *KV_DTYPES))
    for name, default in (
        ("arch", 90), ("head-dim", 128), ("heads", 32), ("kv-heads", 8), ("block-size", 16),
        ("block-m", 128), ("block-n", 64), ("warps", 8), ("stages", 2), ("queries", 1), ("window", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--no-causal", action="store_true")
    parser.add_argument("--one-loop", action="store_true")
    parser.add_argument("--sass", action="store_true", help="count machine instructions too")
    return parser


def summary(job: Job, facts: dict[str, Any]) -> str:
    """Summarize the facts of a job in one line."""
    if "error" in facts:
        return f"{job}  ERROR {facts['error'].splitlines()[0][:150]}"
    limit = arch_of(job.sm).shared_memory_bytes
    spills = facts["spill_stores"] + facts["spill_loads"] + facts["stack"]
    marks = "SPILLS " if spills else ""
    marks += "SMEM! " if facts["shared"] > limit else ""
    marks += "WARNS " if facts["warnings"] else ""
    counts = " ".join(f"{key}:{value}" for key, value in facts.get("sass", facts["ptx"]).items())
    return (
        f"{job}  {marks or 'clean'} regs={facts['registers']} stack={facts['stack']} "
        f"spill={facts['spill_stores']}/{facts['spill_loads']} smem={facts['shared'] // 1024}K {counts} "
        f"{facts['seconds']}s"
    )


def main() -> None:
    """Compile one job, a file of jobs, or jobs from standard input."""
    given = _arguments().parse_args()
    if given.serve:
        serve(Compiler(disassemble=given.sass), Job.from_json)
    elif given.sweep:
        from tests.kernels.compile.cross_compile_pool import Pool

        jobs = [job_from(**row) for row in json.loads(given.sweep.read_text())]
        results = []
        with Pool(given.processes, disassemble=given.sass) as pool:
            answers = [(job, pool.submit(job)) for job in jobs]
            for job, answer in answers:
                facts = answer.result()
                print(summary(job, facts), flush=True)
                results.append({"job": job.to_json(), "facts": facts})
        if given.output:
            given.output.write_text(json.dumps(results, indent=1))
    else:
        job = job_from(**vars(given))
        facts = _attempt(Compiler(disassemble=given.sass).facts, job)
        print(summary(job, facts))
        print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
