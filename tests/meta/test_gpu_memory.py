"""Test processes share a GPU's memory: each waits until the memory it needs is free. Needs no GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.memory import _QUEUE, GIB, GPUMemory, NotFreeError

ROOT = Path(__file__).parents[2]
TOTAL_GIB = 10
HOLD = """
import sys
from pathlib import Path
from tests.gpu.memory import GIB, GPUMemory
memory = GPUMemory(Path(sys.argv[1]), {total}, lambda: {total} * GIB)
memory.take(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(path, gib):
    """Run a test process that reserves memory until its standard input closes."""
    command = [sys.executable, "-c", HOLD.format(total=TOTAL_GIB), str(path), str(gib)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def held(process):
    return process.stdout.readline() == "held\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def this_process(path, free_gib=TOTAL_GIB, wait_seconds=30.0):
    memory = GPUMemory(path, TOTAL_GIB, lambda: free_gib * GIB, wait_seconds)
    return contextlib.closing(memory)


def test_a_test_starts_when_the_memory_it_needs_is_free(path):
    with another_process(path, 6) as other, this_process(path) as memory:
        assert held(other)
        memory.take(4)
        memory.release()
        other.stdin.close()

        memory.take(5)

        assert memory.is_held


def test_waiting_for_memory_of_other_tests_times_out_with_an_error(path):
    with another_process(path, 6) as other, this_process(path, wait_seconds=0.1) as memory:
        assert held(other)

        with pytest.raises(
            NotFreeError, match=r"5 GiB of GPU memory .* waited 0 s for other tests"
        ):
            memory.take(5)

        assert not memory.is_held


def test_waiting_for_memory_of_another_program_times_out_with_an_error(path):
    with this_process(path, free_gib=3, wait_seconds=0.1) as memory:
        with pytest.raises(NotFreeError, match=r"for other programs, 3\.0 GiB are free"):
            memory.take(4)

        assert not memory.is_held


def test_memory_of_a_process_that_was_killed_is_free(path):
    with another_process(path, TOTAL_GIB) as other, this_process(path) as memory:
        assert held(other)
        other.kill()

        memory.take(TOTAL_GIB)


def test_all_memory_can_be_reserved_while_another_program_uses_some(path):
    with this_process(path, free_gib=3, wait_seconds=0.1) as memory:
        memory.take(None)

        with another_process(path, 1) as small, pytest.raises(subprocess.TimeoutExpired):
            small.wait(0.5)


def test_a_test_that_needs_much_memory_is_not_overtaken_by_later_ones(path):
    with this_process(path) as memory, another_process(path, 4) as other:
        assert held(other)
        with another_process(path, 8) as large:
            while memory._lock(_QUEUE):
                memory._unlock(_QUEUE)
                time.sleep(0.01)
            with another_process(path, 1) as small:
                with pytest.raises(subprocess.TimeoutExpired):
                    small.wait(0.5)
                other.stdin.close()
                assert held(large)
                assert held(small)
