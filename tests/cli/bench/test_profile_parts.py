"""Parts of a profile: timed functions and intervals of a GPU."""

import sys
import time
from types import SimpleNamespace

import pytest

from server.cli.bench.engine.device_trace import (
    Interval,
    busy_microseconds,
    idle_gaps,
    read_profile,
    totals,
)
from server.cli.bench.engine.profile import StepProfile, summarize, time_host
from server.cli.bench.engine.table import line, render
from server.cli.bench.stopwatch import Stopwatch

HERE = sys.modules[__name__]


class Clock:
    """A clock that advances only in `wait`."""

    now = 0.0

    def wait(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture
def only_waits_take_time(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK.now)


def inner():
    CLOCK.wait(2.0)


def outer():
    CLOCK.wait(1.0)
    inner()
    inner()


class Base:
    def work(self):
        return 7


class Derived(Base):
    pass


def test_the_time_of_a_phase_excludes_nested_phases(only_waits_take_time):
    watch = Stopwatch()
    with watch.timing([("outer", HERE, "outer"), ("inner", HERE, "inner")]):
        HERE.outer()

    assert watch.seconds == {"outer": 1.0, "inner": 4.0}


def test_timed_functions_are_restored_even_inherited_ones_and_after_an_error():
    before = inner
    watch = Stopwatch()

    def fail():
        with watch.timing([("inner", HERE, "inner"), ("work", Derived, "work")]):
            assert Derived().work() == 7
            assert Base().work() == 7
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert HERE.inner is before
    assert "work" not in vars(Derived)
    assert set(watch.seconds) == {"work"}


def test_a_missing_function_is_an_error_and_leaves_no_function_replaced():
    before = inner
    with (
        pytest.raises(AttributeError, match="gone"),
        Stopwatch().timing([("inner", HERE, "inner"), ("gone", HERE, "gone")]),
    ):
        pass
    assert HERE.inner is before


def test_a_gpu_is_busy_while_any_kernel_runs():
    intervals = [
        Interval("c", 30.0, 31.0),
        Interval("a", 0.0, 10.0),
        Interval("b", 5.0, 12.0),  # on another stream
        Interval("d", 6.0, 7.0),
        Interval("e", 12.0, 13.0),
    ]

    assert busy_microseconds(intervals) == 14.0
    assert idle_gaps(intervals) == [17.0]
    assert busy_microseconds([]) == 0.0
    assert idle_gaps([]) == []


def test_kernels_are_summed_up_by_name_the_longest_first():
    found = totals([Interval("a", 0, 1), Interval("b", 1, 9), Interval("a", 9, 12)])

    assert [(k.name, k.launches, k.microseconds) for k in found] == [("b", 1, 8), ("a", 2, 4)]


def test_a_kernel_that_begins_early_adds_what_is_left_after_the_kernels_before_it():
    found = totals([Interval("b", 4, 12), Interval("a", 0, 10), Interval("c", 5, 9)])

    assert {k.name: k.added_us for k in found} == {"a": 10, "b": 2, "c": 0}


def test_only_kernels_and_copies_of_a_profile_count():
    def event(name, device, annotation=False):
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
            time_range=SimpleNamespace(start=1.0, end=3.0),
        )

    events = [event("gemm", "CUDA"), event("cudaLaunchKernel", "CPU"), event("step", "CUDA", True)]
    profile = SimpleNamespace(events=lambda: events)

    assert read_profile(profile) == [Interval("gemm", 1.0, 3.0)]


def test_a_trace_is_averaged_over_steps_and_only_short_gaps_count():
    gpu = summarize(
        [Interval("a", 0, 10), Interval("b", 12, 20), Interval("a", 520, 530), Interval("b", 530, 538)],
        2,
    )  # fmt: skip

    assert (gpu.busy_us, gpu.launches) == (18, 2)
    assert (gpu.short_gaps, gpu.short_gaps_us) == (0.5, 1)
    assert [(k.name, k.launches, k.microseconds) for k in gpu.kernels] == [
        ("a", 1, 10),
        ("b", 1, 8),
    ]


def test_phases_of_the_host_are_per_step_and_add_up(only_waits_take_time):
    def run(steps, begin, end):
        HERE.inner()  # before the window
        begin()
        for _ in range(steps):
            HERE.outer()
        end()

    step_us, phases = time_host(run, 2, [("inner", HERE, "inner")])

    assert step_us == pytest.approx(5e6)
    assert phases == pytest.approx({"inner": 4e6, "other": 1e6})


def profile(**changes):
    fields = {
        "what": "decode step of 1 sequences at 100 tokens", "step_us": 200.0,
        "phases_us": {"schedule": 20.0, "other": 180.0}, "least_us": 50.0, "memory_share": 0.25,
        "compute_share": 0.01, "gpu": summarize([Interval("k" * 99, 0, 150), Interval("s", 160, 170)], 1),
    }  # fmt: skip
    return StepProfile(**fields | changes)


def test_a_profile_shows_phases_gaps_kernels_and_shares():
    lines = [" ".join(line.split()) for line in render(profile()).splitlines()]

    assert lines[0] == "decode step of 1 sequences at 100 tokens: 200.0 us"
    assert "host schedule 20.0 us 10.0%" in lines
    assert "GPU busy 160.0 us 80.0% 2 kernels and copies" in lines
    assert "GPU short gaps 10.0 us 5.0% 1 x" in lines
    assert "GPU waits for the host 30.0 us 15.0%" in lines
    assert f"kernel {57 * 'k'}... 150.0 us 75.0% 1 x, 150.0 us" in lines
    assert "roofline 50.0 us, 25.0% of it reached; MBU 25.0%, MFU 1.0%" in lines
    assert max(map(len, render(profile()).splitlines())) < 120


def test_unknown_figures_are_not_shown():
    text = render(profile(gpu=None, least_us=None))

    assert "GPU" not in text
    assert "not known" in text


def test_a_table_row_shows_the_values_of_the_result():
    row = {"metric": "ttft_ms", "batch": 1, "value": 6.8, "roofline": 0.123, "prompt_tokens": 128}

    assert line(row).split() == ["ttft_ms", "1", "128", "6.8", "12.3%"]
    assert line(row | {"roofline": None}).split() == ["ttft_ms", "1", "128", "6.8"]
