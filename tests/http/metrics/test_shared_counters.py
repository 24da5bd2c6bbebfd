"""Counters that several processes share: one row per process, reported as sums."""

import os
import subprocess
import sys

import pytest
from msgspec import structs

from server.engine.link.protocol import EngineReport
from server.engine.link.shared_file import shared_file
from server.http.metrics import process
from server.http.metrics.histogram import Histogram, cumulative, num_cells
from server.http.metrics.process import EngineProcesses, Processes
from server.http.metrics.shared_counters import SharedCounters
from tests.http.fakes import INFO


@pytest.fixture
def memory():
    descriptor = shared_file(1 << 12)
    yield descriptor
    os.close(descriptor)


def test_private_counters_start_at_zero():
    counters = SharedCounters.private(3)

    counters.mine[1] += 2

    assert counters.totals() == [0, 2, 0]


def test_every_process_writes_its_row_and_sees_the_sums(memory):
    processes = [SharedCounters.shared(memory, 3, 4, mine=row) for row in range(3)]

    for row, counters in enumerate(processes):
        counters.mine[0] += 1
        counters.mine[3] += row

    assert [counters.totals() for counters in processes] == [[3, 0, 0, 3]] * 3
    assert processes[0].total(3) == 3


def test_a_restarted_process_continues_its_row(memory):
    SharedCounters.shared(memory, 2, 1, mine=1).mine[0] = 5

    again = SharedCounters.shared(memory, 2, 1, mine=1)
    again.mine[0] += 1

    assert SharedCounters.shared(memory, 2, 1, mine=0).totals() == [6]


def test_the_rows_of_a_histogram_add_up(memory):
    bounds = (1.0, 2.0)
    processes = [SharedCounters.shared(memory, 2, num_cells(bounds), mine=row) for row in range(2)]
    for counters, values in zip(processes, ((0.5, 1.5), (1.5, 9.0)), strict=True):
        histogram = Histogram(bounds, counters.mine)
        for value in values:
            histogram.observe(value)

    assert cumulative(bounds, processes[0].totals()) == (
        [("1.0", 1), ("2.0", 3), ("+Inf", 4)],
        12.5,
    )


def test_process_metrics_are_summed_without_dead_processes():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        alone = Processes().read([other.pid, 0, 2**22 + 1])
        both = Processes().read([os.getpid(), other.pid])

        def value(readings, name):
            return next(v for r in readings for v in r.values() if r.metric.name == name)

        assert value(alone, "process_open_fds") >= 3
        assert value(both, "process_open_fds") > value(alone, "process_open_fds")
        assert value(both, "process_start_time_seconds") <= value(
            alone, "process_start_time_seconds"
        )
        assert value(both, "process_max_fds") < 2 * value(alone, "process_max_fds")
        other.stdin.close()


def test_each_engine_with_a_process_has_its_processor_time_and_memory():
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()  # before, it has hardly any memory
        pids = (os.getpid(), 2**22 + 1, other.pid)
        engines = [EngineReport(info=structs.replace(INFO, pid=pid)) for pid in pids]
        seconds, memory = EngineProcesses().read([*engines, EngineReport()])
        other.stdin.close()

    assert [labels for labels, _ in seconds.samples] == [("0",), ("2",)]
    assert seconds.metric.name == "tessera_engine_process_cpu_seconds"
    assert seconds.values()[0] > 0
    assert memory.metric.name == "tessera_engine_process_resident_memory_bytes"
    assert memory.values()[0] > memory.values()[1] > 0


def test_processes_that_end_and_start_are_followed(monkeypatch):
    monkeypatch.setattr(process, "_KEPT_SECONDS", 0.0)
    processes = Processes()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert processes.read([other.pid])
        other.stdin.close()

    assert processes.read([other.pid]) == []
    assert processes.read([os.getpid()])


def test_processes_are_read_at_most_once_a_second():
    processes = Processes()

    first = processes.read([os.getpid()])

    assert processes.read([os.getpid()]) is first
    assert processes.read([os.getpid(), os.getppid()]) is not first
