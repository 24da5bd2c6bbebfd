"""Finds the fastest launch configuration for the shapes of the attention tables.

Processes that launch no kernels compile the candidates in parallel; meanwhile compiled candidates are checked against
the reference and timed. Then the best candidates of each row are timed again for longer, for decode with other numbers
of programs per SM. When the time is up, the results so far are written.

    python -m benchmarks.tune_attention --phase decode --head-dims 64 128 --seconds 240 --out DIR
    python -m benchmarks.tune_attention --phase prefill --head-dims 64 128 256 --layouts paged packed --out DIR
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kernels
from benchmarks import precompile
from benchmarks.attention_inputs import (
    Inputs,
    Timing,
    arch_of,
    forced,
    make_inputs,
    problem_of,
    show_launch,
    spec_named,
    time_call,
)
from benchmarks.attention_shapes import TINY, Shape, find
from benchmarks.report import add_bookkeeping, write_report
from benchmarks.tune_grid import PROGRAMS_PER_SM, candidates
from kernels.attention.launch import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future, ProcessPoolExecutor

    from kernels.attention.plan import AttentionPlan

PREFILL_SIZES = ((32, 512), (4, 4096), (1, 16384))
DECODE_SIZES = ((1, 1024), (1, 16384), (8, 1024), (32, 4096), (128, 1024), (256, 1024))
_NEAR_REFERENCE = 1e-2
"""Largest relative difference from the first checked output; rounding in bf16 stays below 4e-3."""
_SECOND_ROUND_SHARE = 0.25
_REFINED = 5


@dataclass(slots=True)
class Group:
    """The rows of one tuning entry.

    Attributes:
        kernel: name of the registry row.
        dtype: dtype of the tensors.
        paged: whether keys and values are in a paged cache; packed otherwise.
        shapes: the rows.
        launches: candidates.
        results: times by shape and launch.
        failed: reasons by launch that did not run.
        compiled: resources by launch.
    """

    kernel: str
    dtype: str
    paged: bool
    shapes: list[Shape]
    launches: list[LaunchConfig]
    results: dict[Shape, dict[LaunchConfig, Timing]] = field(default_factory=dict)
    failed: dict[LaunchConfig, str] = field(default_factory=dict)
    compiled: dict[LaunchConfig, precompile.Compiled] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format as in `portable_prefill 32/8/128 bfloat16 paged`."""
        layout = "paged" if self.paged else "packed"
        return f"{self.kernel} {self.shapes[0].heads} {self.dtype} {layout}"


class Row:
    """The inputs of one shape, and a checked output with which later outputs are compared."""

    def __init__(self, group: Group, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self._inputs: Inputs = make_inputs(shape, group.dtype, device, paged=group.paged)
        self._device = device
        self._spec = spec_named(group.kernel)
        self._expected: torch.Tensor | None = None

    def check(self, launch: LaunchConfig) -> None:
        """Run once with an output filled with NaN, and check the result.

        Raises:
            AssertionError: the result is wrong.
        """
        out = self._inputs.out.fill_(float("nan"))
        self._inputs.run(self._plan(launch))
        if self._expected is None:
            self._inputs.check(out)
            self._expected = out.clone()
        difference = float((out - self._expected).norm() / self._expected.norm())
        if not difference <= _NEAR_REFERENCE:
            raise AssertionError(f"differs by {difference:.2g} from the checked output")

    def time(self, launch: LaunchConfig, rep_ms: int) -> Timing:
        """Time a call, without planning."""
        plan = self._plan(launch)
        return time_call(
            lambda: self._inputs.run(plan), self._device, warmup_ms=rep_ms // 4, rep_ms=rep_ms
        )

    def _plan(self, launch: LaunchConfig) -> AttentionPlan:
        return self._inputs.plan(forced(self._spec, arch_of(self._device), launch))


def main() -> None:
    """Tune each group and write the results."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    begin = time.monotonic()
    groups = make_groups(arguments, device)
    deadline = begin + arguments.seconds
    workers = precompile.pool(arguments.workers) if device.type == "cuda" else None
    try:
        with torch.inference_mode():
            _tune_all(groups, device, deadline, workers)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if workers is not None:
            workers.shutdown(wait=False, cancel_futures=True)
    rows = [row for group in groups for row in _records(group)]
    write_report(
        "tune-attention",
        rows,
        ("torch", "triton"),
        device=device.type,
        folder=arguments.out,
        revision=arguments.commit,
        echo=False,
    )
    for group in groups:
        print("\n".join(table(group, arguments.top)))
    print(f"{time.monotonic() - begin:.0f} s of {arguments.seconds}")


def make_groups(arguments: argparse.Namespace, device: torch.device) -> list[Group]:
    """Make a group for each combination of phase, heads, dtype and layout."""
    skip = json.loads(arguments.skip.read_text()) if arguments.skip else []
    given = json.loads(arguments.candidates.read_text()) if arguments.candidates else None
    groups = []
    for phase in ("prefill", "decode") if arguments.phase == "both" else (arguments.phase,):
        for head_dim in arguments.head_dims:
            for dtype in arguments.dtypes:
                for layout in arguments.layouts if phase == "prefill" else ["paged"]:
                    shapes = _shapes(phase, (*arguments.heads, head_dim), arguments.sizes)
                    problem = problem_of(shapes[0], dtype, paged=layout == "paged")
                    kernel = arguments.kernel or kernels.select(problem, arch_of(device)).spec.name
                    launches = (
                        [LaunchConfig(**launch) for launch in given]
                        if given is not None
                        else candidates(kernel, head_dim, dtype, arch_of(device), skip)
                    )
                    groups.append(Group(kernel, dtype, layout == "paged", shapes, launches))
    return groups


def _shapes(phase: str, heads: tuple[int, int, int], sizes: list[str] | None) -> list[Shape]:
    if sizes == ["tiny"]:
        return [shape for shape in TINY if shape.phase == phase and not shape.history]
    if sizes:
        pairs = [tuple(int(number) for number in size.split("x")) for size in sizes]
    else:
        pairs = list(PREFILL_SIZES if phase == "prefill" else DECODE_SIZES)
    return [find(phase, heads, batch, length) for batch, length in pairs]


def _tune_all(
    groups: list[Group],
    device: torch.device,
    deadline: float,
    workers: ProcessPoolExecutor | None,
) -> None:
    jobs = [_submit(group, workers, device) for group in groups]
    for index, (group, futures) in enumerate(zip(groups, jobs, strict=True)):
        now = time.monotonic()
        share = max(0.0, deadline - now) / (len(groups) - index)
        print(f"{group}: {len(group.launches)} candidates, {share:.0f} s", flush=True)
        _tune(group, futures, device, now + share)
        for future in futures:
            future.cancel()


def _submit(
    group: Group, workers: ProcessPoolExecutor | None, device: torch.device
) -> list[Future[precompile.Compiled]]:
    if workers is None:
        return []
    return [
        workers.submit(
            precompile.compile_job,
            precompile.Job(
                group.kernel, group.shapes[0], group.dtype, group.paged, launch, device.type
            ),
        )
        for launch in group.launches
    ]


def _tune(
    group: Group, futures: list[Future[precompile.Compiled]], device: torch.device, deadline: float
) -> None:
    """Time every candidate on every row, then the best candidates of each row for longer."""
    first = deadline - _SECOND_ROUND_SHARE * (deadline - time.monotonic())
    rows = [Row(group, shape, device) for shape in group.shapes]
    group.results = {shape: {} for shape in group.shapes}
    for launch in _ready(group, futures, first):
        if time.monotonic() > first:
            break
        try:
            for row in rows:
                row.check(launch)
                group.results[row.shape][launch] = row.time(launch, rep_ms=20)
        except (AssertionError, RuntimeError, ValueError) as error:
            group.failed[launch] = f"{type(error).__name__}: {error}".splitlines()[0]
    for row in rows:
        for launch in _second_round(group, row.shape):
            if time.monotonic() > deadline:
                return
            row.check(launch)
            group.results[row.shape][launch] = row.time(launch, rep_ms=60)


def _ready(
    group: Group, futures: list[Future[precompile.Compiled]], deadline: float
) -> Iterator[LaunchConfig]:
    """Yield candidates in the order in which their compilation ends, except those that cannot run."""
    if not futures:
        yield from group.launches
        return
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            compiled = future.result()
            launch = compiled.job.launch
            group.compiled[launch] = compiled
            if compiled.error:
                group.failed[launch] = compiled.error
            else:
                yield launch
    except TimeoutError:
        print(f"{group}: {sum(not future.done() for future in futures)} not compiled in time")
    except BrokenProcessPool:
        print(f"{group}: a compiler process died; its remaining candidates are not tried")


def _second_round(group: Group, shape: Shape) -> list[LaunchConfig]:
    best = sorted(group.results[shape], key=lambda launch: group.results[shape][launch].median)
    best = best[:_REFINED]
    if shape.phase == "prefill":
        return best
    return [
        dataclasses.replace(launch, programs_per_sm=programs)
        for launch in best
        for programs in PROGRAMS_PER_SM
    ]


def _records(group: Group) -> list[dict[str, Any]]:
    """Return one record per measurement and one per failure."""
    rows = []
    for shape, results in group.results.items():
        for launch, timing in results.items():
            compiled = group.compiled.get(dataclasses.replace(launch, programs_per_sm=2))
            compiled = compiled or group.compiled.get(launch)
            row: dict[str, Any] = {
                **shape.record(),
                "dtype": group.dtype,
                "kernel": group.kernel,
                "paged": group.paged,
                **timing.record(),
                "tflops": round(shape.flops / timing.median / 1e6, 1),
                "gbs": round(shape.kv_bytes(group.dtype) / timing.median / 1e3, 1),
                "launch": dataclasses.asdict(launch),
            }
            if compiled:
                row |= {"registers": compiled.registers, "spills": compiled.spills}
                row["shared_bytes"] = compiled.shared_bytes
            rows.append(row)
    rows += [
        {
            "phase": group.shapes[0].phase,
            "kernel": group.kernel,
            "d": group.shapes[0].d,
            "dtype": group.dtype,
            "paged": group.paged,
            "launch": dataclasses.asdict(launch),
            "failed": reason,
        }
        for launch, reason in group.failed.items()
    ]
    return rows


def table(group: Group, top: int) -> list[str]:
    """Format the best launches of each row, of all rows of each length, and of all rows."""
    lines = ["", f"{group}: {len(group.failed)} of {len(group.launches)} failed"]
    for shape, results in group.results.items():
        best = sorted(results, key=lambda launch: results[launch].median)[:top]
        shown = [f"{show_launch(launch)} {_figure(shape, results[launch])}" for launch in best]
        bar = "" if shape.bar is None else f" (peers {shape.bar:g})"
        lines.append(f"{shape.batch}x{shape.length}{bar}: " + " | ".join(shown))
    lengths = sorted({shape.length for shape in group.shapes})
    sets = [
        (f"all of {length}", [s for s in group.shapes if s.length == length]) for length in lengths
    ]
    for name, shapes in [*(s for s in sets if len(s[1]) > 1), ("all", group.shapes)]:
        shown = [
            f"{show_launch(launch)} {loss:.3f}" for launch, loss in _losses(group, shapes)[:top]
        ]
        lines.append(f"{name}, mean of time over the row's best: " + " | ".join(shown))
    return lines


def _figure(shape: Shape, timing: Timing) -> str:
    if shape.phase == "prefill":
        return f"{shape.flops / timing.median / 1e6:.0f} TF"
    return f"{timing.median:.1f} us"


def _losses(group: Group, shapes: list[Shape]) -> list[tuple[LaunchConfig, float]]:
    """Return, for launches timed on all of `shapes`, the geometric mean of the time relative to each row's best."""
    results = [group.results[shape] for shape in shapes if group.results.get(shape)]
    if not results:
        return []
    common = set.intersection(*(set(result) for result in results))
    bests = [min(timing.median for timing in result.values()) for result in results]
    losses = {
        launch: math.exp(
            sum(
                math.log(result[launch].median / best)
                for result, best in zip(results, bests, strict=True)
            )
            / len(results)
        )
        for launch in common
    }
    return sorted(losses.items(), key=lambda item: item[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phase", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--kernel", help="registry row; default: the registry's selection")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("HQ", "HKV"))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="+", choices=("paged", "packed"), default=["paged"])
    parser.add_argument("--sizes", nargs="+", help="rows as 32x512 (batch x length); tiny: dry run")
    parser.add_argument("--candidates", type=Path, help="JSON list of launches instead of the grid")
    parser.add_argument("--skip", type=Path, help="JSON list of launches known to spill")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--workers", type=int, default=14, help="compiler processes")
    parser.add_argument("--top", type=int, default=4, help="launches shown per row")
    add_bookkeeping(parser)
    parser.add_argument("--device", default="cuda", help="cpu: dry run in Triton's interpreter")
    return parser.parse_args()


if __name__ == "__main__":
    main()
