"""Compile a kernel as a launch on some GPU would, without that GPU, and tell what came out.

The kernel's own classes are run on small CPU tensors with Triton's driver replaced by one that names
the wanted architecture and its launches by compilations, so that signature, constants and
specialisation are those of the real launch and not a copy of them.

    python -m tests.kernels.cross_compile_worker --arch 90 --kernel portable_prefill --head-dim 128 \
        --block-m 128 --block-n 64 --warps 8 --stages 3
    python -m tests.kernels.cross_compile_worker --sweep jobs.json --output facts.json
    python -m tests.kernels.cross_compile_worker --serve

The last reads a job per line from standard input and answers each with a line of facts: a compiler that
aborts takes only this process with it. `cross_compile_pool` starts such processes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.arch import CATALOGUE
from kernels.attention.portable_decode import PortableDecode
from kernels.attention.portable_prefill import PortablePrefill
from kernels.attention.portable_write_kv import write_kv
from kernels.plan import (
    AttentionProblem,
    LaunchConfig,
    PackedBatch,
    PagedBatch,
    Phase,
    Selection,
    TunedLaunch,
)
from kernels.registry import REGISTRY

FACTS_VERSION = "1"
"""Part of the name of cached facts: change it when they change."""
ARCHES = {arch.sm: arch for arch in CATALOGUE.values()}
PTX_INSTRUCTIONS = ("mma.sync", "cp.async.cg", "wgmma.mma_async", "tcgen05.mma", "fma.rn.f32")
SASS_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "LDSM", "FFMA", "FFMA2", "LDL", "STL")
_TOOLS = Path(nvidia.__file__).parent / "bin"
_LOCAL_LINE = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")
_SPILL_LINE = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to compile.

    Attributes:
        sm: compute capability.
        kernel: a row of the registry, or `write_kv`.
        function: the jit function whose facts are wanted; launches of others are left out.
        problem: fields of `AttentionProblem`, those of its shape and dtype for `write_kv`.
        launch: fields of `LaunchConfig`.
        num_seqs: sequences of the batch, for the kernels that plan.
        slots: dtype of the slot mapping, for `write_kv`.
    """

    sm: int
    kernel: str
    function: str
    problem: dict[str, Any]
    launch: dict[str, int]
    num_seqs: int = 2
    slots: str = "int32"

    def __str__(self) -> str:
        """One line that names the job in a failure."""
        words = [f"sm_{self.sm}", self.kernel, self.function]
        words += [f"{key}={value}" for key, value in self.problem.items()]
        words += [f"{key}={value}" for key, value in self.launch.items()]
        return " ".join(words)


class AbsentGPU(DriverBase):
    """A driver for an architecture that is not there; the device's index is its compute capability."""

    sm = 0

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
    """Triton with launches replaced by compilations."""

    def __init__(self) -> None:
        self._gpu = AbsentGPU()
        self._wanted = ""
        self._compiled: Any = None
        self._fresh: dict[str, Any] | None = None
        driver.set_active(self._gpu)
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.store_binary_only = True
        knobs.runtime.add_stages_inspection_hook = self._watch
        launch = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            del warmup
            if function.__name__ == self._wanted:
                self._compiled = launch(function, *args, grid=grid, warmup=True, **named)

        JITFunction.run = compile_only

    def facts(self, job: Job) -> dict[str, Any]:
        """Compile, or read what an earlier compilation of the same code found."""
        start = time.perf_counter()
        self._gpu.sm, self._wanted = job.sm, job.function
        # Triton keeps what it compiled in this process; its facts would have to be kept with it.
        kernel, fresh = self._run(job)
        path = Path(knobs.cache.dir or "") / f"facts-{FACTS_VERSION}-{kernel.hash}.json"
        if fresh is not None:
            path.write_text(json.dumps(fresh))
        elif not path.exists():
            with _setting(knobs.compilation, "always_compile", True):
                kernel, fresh = self._run(job)
            assert fresh is not None
            path.write_text(json.dumps(fresh))
        facts: dict[str, Any] = json.loads(path.read_text())
        facts["shared"] = kernel.metadata.shared
        facts["threads"] = 32 * kernel.metadata.num_warps
        facts["seconds"] = round(time.perf_counter() - start, 2)
        return facts

    def _run(self, job: Job) -> tuple[Any, dict[str, Any] | None]:
        self._compiled = self._fresh = None
        for function in _jit_functions(job.kernel):
            function.device_caches.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            _launch(job)
        if self._compiled is None:
            raise LookupError(f"no launch of {job.function}")
        return self._compiled, self._fresh

    def _watch(self, backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        """Wrap the stage that runs ptxas, the one that sees PTX, its log and the binary."""
        del backend, rest
        assemble = stages["cubin"]

        def watched(ptx: str, metadata: dict[str, Any]) -> bytes:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                cubin: bytes = assemble(ptx, metadata)
            self._fresh = _describe(ptx, log.getvalue(), cubin)
            return cubin

        stages["cubin"] = watched


@contextlib.contextmanager
def _setting(owner: Any, name: str, value: Any):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _jit_functions(kernel: str) -> list[JITFunction[Any]]:
    from kernels.attention import portable_decode, portable_prefill, portable_write_kv

    modules = (portable_decode, portable_prefill, portable_write_kv)
    return [x for m in modules for x in vars(m).values() if isinstance(x, JITFunction)]


def _describe(ptx: str, log: str, cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    resources = dict(_LOCAL_LINE.findall(usage))
    opcodes = collections.Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?\w+\s+)?(\w+)", sass, re.M))
    spills = [(int(stores), int(loads)) for stores, loads in _SPILL_LINE.findall(log)]
    return {
        "registers": int(resources["REG"]),
        "stack": int(resources["STACK"]),
        "local": int(resources["LOCAL"]),
        "spill_stores": sum(stores for stores, _ in spills),
        "spill_loads": sum(loads for _, loads in spills),
        "spills_reported": len(spills),
        "ptx": {name: ptx.count(name) for name in PTX_INSTRUCTIONS if name in ptx},
        "sass": {name: opcodes[name] for name in SASS_INSTRUCTIONS if opcodes[name]},
        "warnings": [
            line for line in log.splitlines() if "warning" in line.lower() or "C75" in line
        ],
    }


def _tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _launch(job: Job) -> None:
    if job.kernel == "write_kv":
        _launch_write(job)
        return
    problem = AttentionProblem(**{**job.problem, "phase": Phase(job.problem["phase"])})
    spec = next(row for row in REGISTRY if row.name == job.kernel)
    tuned = TunedLaunch(LaunchConfig(**job.launch), None, "job", measured=False)
    selection = Selection(spec, ARCHES[job.sm], (tuned,), "job", ())
    dtype = getattr(torch, problem.dtype)
    tokens = job.num_seqs * problem.max_query_tokens
    q = torch.empty((tokens, problem.num_heads, problem.head_dim), dtype=dtype)
    lse = torch.empty(q.shape[:2]) if problem.lse else None
    offsets = torch.empty(job.num_seqs + 1, dtype=torch.int32)
    batch: PagedBatch | PackedBatch
    heads = (problem.num_kv_heads, problem.head_dim)
    lengths = {"num_tokens": tokens, "max_seqlen_q": problem.max_query_tokens, "max_seqlen_k": 4096}
    if problem.block_size is None:
        batch = PackedBatch(offsets, offsets, **lengths)
        kv = torch.empty((2, tokens, *heads), dtype=dtype)
    else:
        blocks = torch.empty((job.num_seqs, 8), dtype=torch.int32)
        batch = PagedBatch(offsets, offsets[1:].clone(), blocks, **lengths)
        kv = torch.empty((2, 3, problem.block_size, *heads), dtype=dtype)
    factory = PortableDecode if problem.phase is Phase.DECODE else PortablePrefill
    factory(problem, batch, selection)(q, kv, torch.empty_like(q), lse)


def _launch_write(job: Job) -> None:
    heads, head_dim = job.problem["num_kv_heads"], job.problem["head_dim"]
    dtype = getattr(torch, job.problem["dtype"])
    qkv = torch.empty((2, 3 * heads, head_dim), dtype=dtype)
    cache = torch.empty((2, 3, 16, heads, head_dim), dtype=dtype)
    slots = torch.empty(2, dtype=getattr(torch, job.slots))
    write_kv(qkv[:, heads : 2 * heads], qkv[:, 2 * heads :], cache, slots)


def _serve(compiler: Compiler) -> None:
    for line in sys.stdin:
        print(json.dumps(_attempt(compiler, Job(**json.loads(line)))), flush=True)


def _attempt(compiler: Compiler, job: Job) -> dict[str, Any]:
    try:
        return compiler.facts(job)
    except Exception as error:  # noqa: BLE001  # whatever the compiler refuses is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def job_from(**wanted: Any) -> Job:
    """Make a job from the command line's names; `--sweep` takes a list of the same."""
    decode = wanted["kernel"] == "portable_decode"
    problem = {
        "phase": "decode" if decode else "prefill",
        "dtype": wanted.get("dtype", "bfloat16"),
        "num_heads": wanted.get("heads", 32),
        "num_kv_heads": wanted.get("kv_heads", 8),
        "head_dim": wanted.get("head_dim", 128),
        "block_size": wanted.get("block_size", 16) or None,
        "softmax_scale": 0.1,
        "sliding_window": wanted.get("window") or None,
        "softcap": wanted.get("softcap") or None,
        "causal": not wanted.get("no_causal", False),
        "max_query_tokens": wanted.get("queries", 1),
        "lse": wanted.get("lse", False),
    }
    launch = {
        "block_m": wanted.get("block_m", 16 if decode else 128),
        "block_n": wanted.get("block_n", 64),
        "num_warps": wanted.get("warps", 4),
        "num_stages": wanted.get("stages", 2),
    }
    function = wanted.get("function") or ("decode" if decode else "prefill")
    return Job(wanted["arch"], wanted["kernel"], function, problem, launch)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="compile kernels for GPUs that are not there")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kernel", default="portable_prefill")
    parser.add_argument("--function", default="")
    parser.add_argument("--dtype", default="bfloat16")
    for name, default in (
        ("arch", 90), ("head-dim", 128), ("heads", 32), ("kv-heads", 8), ("block-size", 16),
        ("block-m", 128), ("block-n", 64), ("warps", 8), ("stages", 2), ("queries", 1), ("window", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--no-causal", action="store_true")
    return parser


def summary(job: Job, facts: dict[str, Any]) -> str:
    """Say it in one line."""
    if "error" in facts:
        return f"{_short(job)}  ERROR {facts['error'].splitlines()[0][:150]}"
    limit = ARCHES[job.sm].shared_memory_bytes
    spill = facts["spill_stores"] + facts["spill_loads"] + facts["local"]
    marks = "SPILLS " if spill or facts["stack"] else ""
    marks += "SMEM! " if facts["shared"] > limit else ""
    marks += "WARNS " if facts["warnings"] else ""
    counts = " ".join(f"{key}:{value}" for key, value in facts["sass"].items())
    return (
        f"{_short(job)}  {marks or 'clean'} regs={facts['registers']} stack={facts['stack']} "
        f"spill={facts['spill_stores']}/{facts['spill_loads']} smem={facts['shared'] // 1024}K {counts} "
        f"{facts['seconds']}s"
    )


def _short(job: Job) -> str:
    problem, launch = job.problem, LaunchConfig(**job.launch)
    return (
        f"sm_{job.sm} {job.function} {problem['dtype']} D={problem['head_dim']} "
        f"{launch.block_m}x{launch.block_n} w{launch.num_warps} s{launch.num_stages}"
    )


def main() -> None:
    """Answer one job, a file of them, or standard input."""
    given = _arguments().parse_args()
    if given.serve:
        _serve(Compiler())
    elif given.sweep:
        from tests.kernels.cross_compile_pool import Pool

        jobs = [job_from(**row) for row in json.loads(given.sweep.read_text())]
        results = []
        with Pool(given.processes) as pool:
            for job, facts in pool.run(jobs):
                print(summary(job, facts), flush=True)
                results.append({"job": dataclasses.asdict(job), "facts": facts})
        if given.output:
            given.output.write_text(json.dumps(results, indent=1))
    else:
        job = job_from(**vars(given))
        facts = _attempt(Compiler(), job)
        print(summary(job, facts))
        print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
