"""Measures where the time of a decode step or a prompt is spent: phases of the host, kernels and gaps of the GPU.

Each case runs twice. The first run only times the phases of the host. The second run uses PyTorch's profiler, which
slows the host down, so only its GPU times count. All first runs come before the second runs, because the profiler's
hooks remain active.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from server.cli.bench.engine.device_trace import (
    Interval,
    KernelTotal,
    busy_microseconds,
    idle_gaps,
    read_profile,
    totals,
)
from server.cli.bench.engine.run import EngineRun, EngineRunError
from server.cli.bench.stopwatch import Stopwatch, Timed
from server.engine.core import engine
from server.engine.core.schedule import scheduler
from server.engine.runner.explain.model_work import ModelWork, Rows, Work
from server.engine.runner.step import model_runner, step_input

if TYPE_CHECKING:
    from numpy.random import Generator

    from server.cli.bench.engine.workloads import Plan, Workload
    from server.engine.core.messages import StepMessage
    from server.engine.core.request import GenerateRequest

_WARM_STEPS = 24
_TIMED_STEPS = 64
_TRACED_STEPS = 16
_TIMED_PROMPTS = 8
_TRACED_PROMPTS = 4
_SHORT_GAP_US = 20.0

HOST_PHASES: tuple[Timed, ...] = (
    ("receive", engine.Engine, "receive"),
    ("schedule", scheduler.Scheduler, "schedule"),
    ("pack", step_input.PackedStep, "pack"),
    ("launch", model_runner.ModelRunner, "launch"),
    ("commit", scheduler.Scheduler, "commit"),
    ("publish", engine.Engine, "_publish"),
)
"""The time of `launch` without its nested phases is for launching kernels on a GPU, or for computing on a CPU."""

WAITS: tuple[Timed, ...] = (
    ("wait", torch.Tensor, "tolist"),
    ("wait", torch.Tensor, "item"),
    ("wait", torch.Tensor, "cpu"),
    ("wait", torch.cuda.Event, "synchronize"),
    ("wait", torch.cuda.Stream, "synchronize"),
    ("wait", torch.cuda, "synchronize"),
)
"""Functions in which the host may wait for a GPU."""


@dataclass(frozen=True, slots=True)
class GPUProfile:
    """GPU profile of a step, on average; times in microseconds.

    Attributes:
        busy_us: time in which at least one kernel ran.
        short_gaps: number of gaps of up to 20 us, which are typical between two kernels.
        short_gaps_us: total time of these gaps.
        launches: number of kernels and copies.
        kernels: totals by kernel name; the one that adds most to the busy time comes first.
    """

    busy_us: float
    short_gaps: float
    short_gaps_us: float
    launches: float
    kernels: list[KernelTotal]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Profile of a decode step or a prompt, on average; times in microseconds.

    Attributes:
        what: description.
        step_us: time from one step or prompt to the next.
        phases_us: times of the host by phase, and "other"; they add up to `step_us`.
        least_us: minimum time by the roofline; None if the processor's peaks are not known.
        memory_share: share of the peak bandwidth (MBU); None if that is not known.
        compute_share: share of the peak arithmetic (MFU); None if that is not known.
        gpu: profile of the GPU; None on a CPU.
    """

    what: str
    step_us: float
    phases_us: dict[str, float]
    least_us: float | None
    memory_share: float | None
    compute_share: float | None
    gpu: GPUProfile | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """A case to profile.

    Attributes:
        what: description.
        work: work of one step.
        timed: number of steps in the timed run.
        traced: number of steps in the traced run.
        run: computes (number of steps, function to call before them, function to call after them).
    """

    what: str
    work: Work
    timed: int
    traced: int
    run: Callable[[int, Callable[[], None], Callable[[], None]], None]


class _Window:
    """Calls `begin` and `end` around a number of decode steps of the whole batch, after warm-up steps.

    A shorter window is in the middle of the longest, so that timed and traced steps have the same average context.
    """

    def __init__(
        self, batch: int, steps: int, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._batch = batch
        first = _WARM_STEPS + (_TIMED_STEPS - steps) // 2
        self._calls = {first: begin, first + steps: end}
        self._seen = 0

    @property
    def ended(self) -> bool:
        return not self._calls

    def __call__(self, message: StepMessage) -> None:
        if len(message.request_ids) == self._batch:
            self._seen += 1
            self._calls.pop(self._seen, _nothing)()


class Profiler:
    """Profiles the steps of workloads."""

    def __init__(
        self, engine: EngineRun, work: ModelWork, plan: Plan, generator: Generator
    ) -> None:
        self._engine = engine
        self._work = work
        self._plan = plan
        self._generator = generator
        self._on_gpu = engine.info.device.startswith("cuda")

    def profile(self, workloads: Sequence[Workload]) -> list[StepProfile]:
        """Profile the steps of "batch", "decode" and "ttft".

        Raises:
            EngineRunError: the sequences of a workload never decode together.
        """
        cases = list(self._cases(workloads))
        profiles = [self._time(case) for case in cases]
        if self._on_gpu:
            pairs = zip(profiles, cases, strict=True)
            profiles = [dataclasses.replace(p, gpu=_trace(case)) for p, case in pairs]
        return profiles

    def _cases(self, workloads: Sequence[Workload]) -> Iterable[_Case]:
        limit = self._engine.info.max_total_tokens
        for batch in dict.fromkeys(w.size for w in workloads if w.kind in ("batch", "decode")):
            if self._plan.prompt + self._outputs(batch) <= limit:
                yield self._decode_case(batch)
        for prompt in (w.size for w in workloads if w.kind == "ttft"):
            yield self._prompt_case(min(prompt, limit - 1))

    def _outputs(self, batch: int) -> int:
        plan = dataclasses.replace(self._plan, steps=_WARM_STEPS + _TIMED_STEPS + 4)
        return plan.outputs(batch, self._engine.info.max_num_batched_tokens)

    def _decode_case(self, batch: int) -> _Case:
        prompt, outputs = self._plan.prompt, self._outputs(batch)

        def run(steps: int, begin: Callable[[], None], end: Callable[[], None]) -> None:
            window = _Window(batch, steps, begin, end)
            self._engine.run(self._requests([prompt] * batch, outputs), window)
            self._engine.use_idle_time()
            if not window.ended:
                raise EngineRunError(
                    f"{batch} sequences never decode together; --max-num-seqs may be too small"
                )

        context = prompt + _WARM_STEPS + _TIMED_STEPS // 2
        what = f"decode step of {batch} sequences at {context} tokens"
        work = self._work.step([Rows(batch, 1, context)])
        return _Case(what, work, _TIMED_STEPS, _TRACED_STEPS, run)

    def _prompt_case(self, prompt: int) -> _Case:
        def run(prompts: int, begin: Callable[[], None], end: Callable[[], None]) -> None:
            requests = self._requests([prompt] * prompts, 1)
            begin()
            for request in requests:
                self._engine.run([request])
            end()

        work = self._work.step([Rows(1, prompt, prompt)])
        return _Case(f"prompt of {prompt} tokens", work, _TIMED_PROMPTS, _TRACED_PROMPTS, run)

    def _requests(self, prompts: Sequence[int], outputs: int) -> list[GenerateRequest]:
        return self._engine.random_requests(prompts, [outputs] * len(prompts), self._generator)

    def _time(self, case: _Case) -> StepProfile:
        step_us, phases_us = time_host(
            case.run, case.timed, HOST_PHASES + (WAITS if self._on_gpu else ())
        )
        limit = self._work.limit(case.work)
        memory, compute = self._work.shares(case.work, 1e-6 * step_us)
        least_us = None if limit is None else 1e6 * limit.seconds
        return StepProfile(case.what, step_us, phases_us, least_us, memory, compute)


def time_host(
    run: Callable[[int, Callable[[], None], Callable[[], None]], None],
    steps: int,
    functions: Sequence[Timed],
) -> tuple[float, dict[str, float]]:
    """Return the microseconds of a step and of each of its phases."""
    watch = Stopwatch()
    marks: list[tuple[float, dict[str, float]]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), dict(watch.seconds)))

    with watch.timing(functions):
        run(steps, mark, mark)
    (begin, before), (end, after) = marks
    scale = 1e6 / steps
    phases = {name: scale * (after[name] - before.get(name, 0.0)) for name in after}
    step_us = scale * (end - begin)
    return step_us, phases | {"other": step_us - sum(phases.values())}


def _trace(case: _Case) -> GPUProfile:
    tracer = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def begin() -> None:
        torch.cuda.synchronize()
        tracer.start()

    def end() -> None:
        torch.cuda.synchronize()
        tracer.stop()

    case.run(case.traced, begin, end)
    return summarize(read_profile(tracer), case.traced)


def summarize(intervals: Sequence[Interval], steps: int) -> GPUProfile:
    """Return the average profile of a step."""
    short = [gap for gap in idle_gaps(intervals) if gap <= _SHORT_GAP_US]
    return GPUProfile(
        busy_us=busy_microseconds(intervals) / steps,
        short_gaps=len(short) / steps,
        short_gaps_us=sum(short) / steps,
        launches=len(intervals) / steps,
        kernels=[
            KernelTotal(k.name, k.launches / steps, k.microseconds / steps, k.added_us / steps)
            for k in totals(intervals)
        ],
    )


def _nothing() -> None:
    pass
