"""Times our attention kernels and PyTorch's in the same run, and compares them with published figures of other kernels.

Each row is checked on the inputs that are timed: the whole output for values that were never written, some of its rows
against a float32 reference. Prefill reads packed and paged keys, and is compared with the cuDNN and flash backends of
SDPA in the same run; long rows are also measured in FP8. PyTorch has no paged decode, so decode is compared with the
microseconds of FA3 and FlashInfer on another machine, and with the bandwidth of a copy in this run. A call computes one
layer; planning, which happens once per step, is timed separately.

    python -m benchmarks.attention [--phase prefill] [--rows quick] [--launch block_m=128,num_warps=8]
    python -m benchmarks.attention --rows few-heads --kernel hopper_decode hopper_keys_on_m_decode:block_n=128

`--rows lengths` measures prefill from 128 to 131,072 tokens beside standard attention too (PyTorch's math backend),
with the memory of every contender and the bytes that the tiles move beside the least possible.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import torch

import kernels
from benchmarks import precompile
from benchmarks.attention_fp8 import (
    has_fp8_cache_row,
    has_fp8_row,
    time_fp8,
    time_fp8_cache,
)
from benchmarks.attention_inputs import (
    arch_of,
    forced,
    make_inputs,
    parse_launch,
    peak_mib,
    problem_of,
    spec_named,
    time_call,
)
from benchmarks.attention_peers import time_peers
from benchmarks.attention_report import TABLES, Ceilings, summary
from benchmarks.attention_shapes import (
    DECODE,
    FEW_HEADS,
    LENGTHS,
    MORE_DECODE,
    MORE_PREFILL,
    PEERS_SOURCE,
    PREFILL,
    SHARED_DECODE,
    SHORT,
    TINY,
    TINY_LENGTHS,
    Shape,
)
from benchmarks.attention_traffic import least_bytes, standard_bytes, tile_bytes
from benchmarks.report import add_bookkeeping, write_report
from kernels.attention.problem import PagedBatch
from server.cli.bench.result import number

if TYPE_CHECKING:
    from benchmarks.attention_inputs import Inputs
    from kernels.attention.problem import AttentionProblem
    from kernels.attention.select import Selection

_QUICK = {
    ("prefill", 32, 512),
    ("prefill", 4, 4096),
    ("prefill", 1, 16384),
    ("decode", 1, 1024),
    ("decode", 1, 16384),
    ("decode", 32, 4096),
    ("decode", 256, 1024),
}
_PAGED = {False: (False, True), True: (False,)}
"""By whether a prefill belongs to a series: whether its keys are paged."""
_SERIES = frozenset((*LENGTHS, *TINY_LENGTHS))
_GEMM_SIZE = 8192
_COPY_BYTES = 4 << 30


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a large matrix product and a large copy, as upper bounds for kernels on this device."""
    if device.type != "cuda":
        return Ceilings(1.0, 1.0)
    a, b = torch.randn((2, _GEMM_SIZE, _GEMM_SIZE), device=device).bfloat16()
    gemm = time_call(lambda: a @ b, device).median
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source), device).median
    return Ceilings(2 * _GEMM_SIZE**3 / gemm / 1e6, 2 * _COPY_BYTES / copy / 1e3)


def choose(
    problem: AttentionProblem, shape: Shape, arguments: argparse.Namespace, kernel: str = ""
) -> Selection:
    """Return the registry's selection, or `kernel` with the launch of the command line or its own, `name:launch`."""
    arch = arch_of(torch.device(arguments.device))
    name, _, own = kernel.partition(":")
    selection = (
        kernels.select(dataclasses.replace(problem, unmeasured=True), arch, (spec_named(name),))
        if name
        else kernels.select(problem, arch)
    )
    if not (own or arguments.launch) or not selection.launches:
        return selection
    launch = selection.launch_for(shape.length, shape.batch)
    return forced(selection.spec, arch, parse_launch(own or arguments.launch, launch))


def compile_ahead(shapes: list[tuple[Shape, bool]], arguments: argparse.Namespace) -> None:
    """Compile all kernels in parallel into Triton's cache. Failures are printed and recur when the kernel runs."""
    if arguments.device != "cuda":
        return
    jobs = {}
    for (shape, paged), kernel in itertools.product(shapes, arguments.kernel):
        problem = problem_of(shape, arguments.dtype, paged=paged)
        selection = choose(problem, shape, arguments, kernel)
        if selection.launches:
            launch = selection.launch_for(shape.length, shape.batch)
            job = precompile.Job(selection.spec.name, shape, arguments.dtype, paged, launch)
            code = (selection.spec.name, shape.heads, paged, launch, shape.causal, shape.window)
            jobs[code] = job
    with precompile.pool(max(1, min(len(jobs), arguments.workers))) as workers:
        try:
            for result in workers.map(precompile.compile_job, jobs.values()):
                if result.error or result.spills:
                    print(f"{result.job}: {result.error or f'spills {result.spills} words'}")
        except BrokenProcessPool:
            print("a compiler process died")


def measure(
    shape: Shape, *, paged: bool, arguments: argparse.Namespace, kernel: str = ""
) -> dict[str, Any]:
    """Check and time one shape. Returns its record without the entries that depend on other rows."""
    device = torch.device(arguments.device)
    inputs = make_inputs(shape, arguments.dtype, device, paged=paged)
    selection = choose(inputs.problem, shape, arguments, kernel)
    plan = inputs.plan(selection)
    inputs.run(plan)
    error, plain = inputs.check(inputs.out)
    timing = time_call(lambda: inputs.run(plan), device)
    planning = time_call(lambda: inputs.plan(selection), device, warmup_ms=5, rep_ms=20)
    prefill = shape.phase == "prefill"
    record: dict[str, Any] = {
        **shape.record(),
        **_special(shape),
        "dtype": arguments.dtype,
        "kernel": selection.spec.name,
        "paged": paged,
        **timing.record(),
        "plan_us": round(planning.median, 2),
        "error": number(error),
        "error_of_plain_pytorch": number(plain),
    }
    alone = len(arguments.kernel) == 1
    if not alone:
        record["beside"] = kernel
    if selection.launches:
        record["launch"] = dataclasses.asdict(selection.launch_for(shape.length, shape.batch))
    if prefill:
        record["tflops"] = number(shape.flops / timing.median / 1e6)
        if shape in _SERIES:
            record |= _memory(inputs, selection)
        if not paged:
            record |= time_peers(inputs, inputs.out, device)
            record |= time_fp8(inputs, timing.median) if has_fp8_row(shape) else {}
    else:
        record["gbs"] = number(shape.kv_bytes(arguments.dtype) / timing.median / 1e3)
        record |= (
            time_fp8_cache(inputs, timing.median) if alone and has_fp8_cache_row(shape) else {}
        )
    return record | (_without_sharing(inputs, selection, timing.median) if shape.shared else {})


def _memory(inputs: Inputs, selection: Selection) -> dict[str, Any]:
    """Return entries of a record: the memory that a call allocates with its output, and the MiB that it moves."""
    shape, dtype = inputs.shape, str(inputs.q.dtype).removeprefix("torch.")
    moved = {"least": least_bytes(shape, dtype), "standard": standard_bytes(shape, dtype)}
    if selection.launches:
        launch = selection.launch_for(shape.length, shape.batch)
        moved["tiles"] = tile_bytes(shape, dtype, launch.block_m, launch.block_n)

    def call() -> object:
        whole = dataclasses.replace(inputs, out=torch.empty_like(inputs.out))
        plan = whole.plan(selection)
        whole.run(plan)
        return plan, whole.out

    return {
        "series": "lengths",
        "peak_mib": peak_mib(call, inputs.q.device),
        "moved_mib": {name: round(count / 2**20, 2) for name, count in moved.items()},
    }


def _without_sharing(inputs: Inputs, selection: Selection, sharing_us: float) -> dict[str, Any]:
    """Time the same decode with each sequence reading the shared prefix separately. Returns entries of a record."""
    assert isinstance(inputs.batch, PagedBatch)
    batch = dataclasses.replace(inputs.batch, shared_prefix=0)
    alone = dataclasses.replace(inputs, batch=batch)
    plan = alone.plan(selection)
    taken = time_call(lambda: alone.run(plan), inputs.q.device).median
    return {"us_without_sharing": round(taken, 2), "gain": number(taken / sharing_us)}


def _special(shape: Shape) -> dict[str, Any]:
    """Return the properties in which a row differs from the default (equal lengths, causal, no history)."""
    found: dict[str, Any] = {}
    if shape.history:
        found["history"] = shape.history
    if not shape.causal:
        found["causal"] = False
    if shape.window is not None:
        found["window"] = shape.window
    if shape.shared:
        found["shared"] = shape.shared
    if shape.lengths:
        lengths = sorted(shape.lengths)
        found["ragged"] = {
            "shortest": lengths[0], "median": lengths[len(lengths) // 2], "longest": lengths[-1],
            "tokens": sum(lengths),
        }  # fmt: skip
    return found | ({"size": shape.size} if found else {})


def measure_all(
    shapes: list[tuple[Shape, bool]], ceilings: Ceilings, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure all rows and compare each with the ceilings and with its peers."""
    rows: list[dict[str, Any]] = []
    in_run: dict[Shape, dict[str, float]] = {}
    for (shape, paged), kernel in itertools.product(shapes, arguments.kernel):
        record = measure(shape, paged=paged, arguments=arguments, kernel=kernel)
        if shape.phase == "prefill":
            in_run.setdefault(shape, record.get("peer_tflops", {}))
            record["peer_tflops"] = in_run[shape]
            record["peer_tflops_elsewhere"] = dict(shape.peers)
            record["share_of_ceiling"] = round(record["tflops"] / ceilings.gemm_tflops, 3)
            ours = record["tflops"]
        else:
            record["peer_us_elsewhere"] = dict(shape.peers)
            record["share_of_ceiling"] = round(record["gbs"] / ceilings.copy_gbs, 3)
            ours = record["us"]
        if shape.bar is not None:
            record["ratio_to_best_peer"] = round(ours / shape.bar, 3)
        rows.append(record)
        name = f" {kernel}" if kernel else ""
        print(f"{shape} {'paged' if paged else 'packed'}{name}: {record['us']} us", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def shapes_of(arguments: argparse.Namespace) -> list[tuple[Shape, bool]]:
    """Return the shapes to measure, each with a flag: whether its keys are paged."""
    tables, more = (*PREFILL, *DECODE), (*MORE_PREFILL, *MORE_DECODE, *SHARED_DECODE)
    shapes: tuple[Shape, ...] = (*tables, *more)
    named = {"tiny": TINY, "tables": tables, "more": more}
    named |= {
        "lengths": LENGTHS,
        "tiny-lengths": TINY_LENGTHS,
        "few-heads": FEW_HEADS,
        "short": SHORT,
    }
    shapes = named.get(arguments.rows, shapes)
    if arguments.rows == "quick":
        shapes = tuple(
            shape
            for shape in tables
            if (shape.hq, shape.d) == (32, 128)
            and (shape.phase, shape.batch, shape.length) in _QUICK
        )
    given = [spec_named(kernel.partition(":")[0]) for kernel in arguments.kernel if kernel]
    paged_alone = not all(spec.packed for spec in given)
    return [
        (shape, paged)
        for shape in shapes
        if arguments.phase in (shape.phase, "both")
        for paged in (
            (True,) if shape.phase == "decode" or paged_alone else _PAGED[shape in _SERIES]
        )
    ]


def _plans(shapes: list[tuple[Shape, bool]], arguments: argparse.Namespace) -> dict[str, str]:
    """Return the reason for the selected kernel, by phase."""
    return {
        shape.phase: choose(
            problem_of(shape, arguments.dtype, paged=paged), shape, arguments, arguments.kernel[0]
        ).why
        for shape, paged in shapes
    }


def main() -> None:
    """Measure, write the result file and print its tables."""
    arguments = _arguments()
    begin = time.monotonic()
    device = torch.device(arguments.device)
    shapes = shapes_of(arguments)
    with torch.inference_mode():
        compile_ahead(shapes, arguments)
        ceilings = measure_ceilings(device)
        rows = measure_all(shapes, ceilings, arguments)
    write_report(
        "attention-lengths" if arguments.rows.endswith("lengths") else "attention",
        rows,
        ("torch", "triton"),
        device=arguments.device,
        folder=arguments.out,
        revision=arguments.commit,
        echo=False,
        extra={
            "plan": _plans(shapes, arguments),
            "ceilings": dataclasses.asdict(ceilings),
            "peers_elsewhere": PEERS_SOURCE,
        },
    )
    for belongs, table in TABLES:
        if some := [row for row in rows if belongs(row)]:
            print(*table(some), "", sep="\n")
    print(
        f"a matrix product reaches {ceilings.gemm_tflops:.0f} TFLOP/s here, a copy {ceilings.copy_gbs:.0f} GB/s"
    )
    print(*summary(rows), sep="\n")
    print(f"{len(rows)} rows in {time.monotonic() - begin:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phase", choices=("prefill", "decode", "both"), default="both")
    rows = (
        "all",
        "tables",
        "more",
        "quick",
        "lengths",
        "few-heads",
        "short",
        "tiny",
        "tiny-lengths",
    )
    parser.add_argument("--rows", choices=rows, default="all")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=[""],
        metavar="ROW[:LAUNCH]",
        help="registry rows, timed one after the other; default: the registry's selection",
    )
    parser.add_argument("--launch", help="launch fields, such as block_m=128,num_warps=8")
    parser.add_argument("--workers", type=int, default=8, help="compiler processes")
    add_bookkeeping(parser)
    parser.add_argument("--device", default="cuda", help="cpu: dry run in Triton's interpreter")
    return parser.parse_args()


if __name__ == "__main__":
    main()
