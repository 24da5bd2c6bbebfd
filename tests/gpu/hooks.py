"""pytest hooks for GPU tests: mark them, skip them without a CUDA device, and wait for free memory.

A run that selected GPU tests but skipped all of them fails; the summary shows how many ran. With several processes
(`-n`) the controlling process sees the tests only through their reports.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.gpu.memory import DEFAULT_GIB, GIB, GPUMemory, NotFreeError

_HERE = Path(__file__).parent
_GIB_OF_A_PROCESS = 2
"""Memory that a process keeps between tests: a CUDA context and module-scoped fixtures."""
_IS_GPU_TEST = ("gpu", True)
_REFUSED = pytest.StashKey[str]()
_selected: set[str] = set()
_ran: set[str] = set()
_memory: GPUMemory | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu"):
            item.user_properties.append(_IS_GPU_TEST)  # reports tell the controlling process


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Wait for the memory before the test's time limit begins to run."""
    if not item.get_closest_marker("gpu") or not torch.cuda.is_available():
        return (yield)
    memory, asked = _of_this_gpu(), _asked_gib(item)
    if not memory.is_held and (asked is None or asked <= memory.total_gib):
        if asked != DEFAULT_GIB:
            gc.collect()
            torch.cuda.empty_cache()
        try:
            memory.take(asked)
        except NotFreeError as error:
            item.stash[_REFUSED] = str(error)
    torch.cuda.reset_peak_memory_stats()
    result = yield
    torch.cuda.empty_cache()
    # Module-scoped fixtures keep memory until the last test of the module that asks for the same amount.
    same = nextitem is not None and (nextitem.path, _asked_gib(nextitem)) == (item.path, asked)
    if asked == DEFAULT_GIB or not same:
        memory.release()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if not item.get_closest_marker("gpu"):
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if _REFUSED in item.stash:
        pytest.fail(item.stash[_REFUSED], pytrace=False)
    asked, total = _asked_gib(item) or 0, _of_this_gpu().total_gib
    if asked > total:
        pytest.skip(f"needs {asked} GiB of GPU memory; this GPU has {total} for tests")


def pytest_runtest_teardown(item):
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        peak, asked = torch.cuda.max_memory_reserved() / GIB, _asked_gib(item)
        if asked is not None and peak > asked:
            line = f"{item.nodeid} used {peak:.1f} GiB and requested {asked}"
            item.user_properties.append(("gpu_memory", line))


def pytest_runtest_logreport(report):
    if _IS_GPU_TEST not in map(tuple, report.user_properties):
        return
    _selected.add(report.nodeid)
    if report.when == "call" and not report.skipped:
        _ran.add(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if _all_skipped() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not _selected:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    terminalreporter.section("gpu tests")
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        for name, value in getattr(report, "user_properties", ()):
            if (name, getattr(report, "when", "")) in (
                ("proof", "call"),
                ("gpu_memory", "teardown"),
            ):
                terminalreporter.write_line(f"{report.outcome}: {value}")
    terminalreporter.write_line(f"{len(_ran)} of {len(_selected)} gpu tests ran on {device}")
    if _all_skipped():
        terminalreporter.write_line(
            "FAILED: gpu tests were selected, but all of them were skipped",
            red=True,
        )


def pytest_unconfigure():
    if _memory is not None:
        _memory.close()


def _all_skipped():
    return bool(_selected) and not _ran


def _asked_gib(item):
    marker = item.get_closest_marker("gpu_memory")
    return DEFAULT_GIB if marker is None else marker.args[0]


def _of_this_gpu():
    global _memory  # noqa: PLW0603  # made on first use: it opens a CUDA context
    if _memory is None:
        device = torch.cuda.get_device_properties()
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        total_gib = device.total_memory // GIB - _GIB_OF_A_PROCESS * processes
        path = Path(tempfile.gettempdir()) / f"tessera-gpu-tests-{device.uuid}.lock"
        _memory = GPUMemory(path, total_gib, lambda: torch.cuda.mem_get_info()[0])
    return _memory
