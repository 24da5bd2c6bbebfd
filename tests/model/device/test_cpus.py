"""The processors that the process may use, counted in fake folders."""

import os
import sys

import pytest

from model.device import cpus
from model.device.cpus import UsableCPUs, default_engine_threads, read_sysctl, usable_cpus


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Describe a Linux machine by (package, core) of each allowed processor; write files; count its processors."""

    class Machine:
        def write(self, path, text):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")

        def cores(self, cores, die=None):
            for cpu, (package, core) in cores.items():
                folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{folder}/physical_package_id", package)
                self.write(f"{folder}/core_id", core)
                if die is not None:
                    self.write(f"{folder}/die_id", die[cpu])

        def count(self, allowed):
            monkeypatch.setattr(sys, "platform", "linux")
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
            return usable_cpus(tmp_path)

    return Machine()


def test_two_logical_processors_of_a_core_count_as_one_core(machine):
    machine.cores({0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})

    assert machine.count(range(4)) == UsableCPUs(logical=4, cores=2)


def test_cores_of_two_packages_with_the_same_number_are_two(machine):
    machine.cores({0: (0, 0), 1: (1, 0)})

    assert machine.count(range(2)).cores == 2


def test_cores_of_two_dies_with_the_same_number_are_two(machine):
    machine.cores({0: (0, 0), 1: (0, 0)}, die=[0, 1])

    assert machine.count(range(2)).cores == 2


def test_only_processors_on_which_the_process_may_run_count(machine):
    machine.cores({cpu: (0, cpu // 2) for cpu in range(8)})

    assert machine.count([0, 1]) == UsableCPUs(logical=2, cores=1)
    assert machine.count([0, 2, 3]) == UsableCPUs(logical=3, cores=2)


def test_without_a_topology_each_logical_processor_is_a_core(machine):
    assert machine.count(range(6)) == UsableCPUs(logical=6, cores=6)


@pytest.mark.parametrize(
    ("limit", "usable"),
    [("200000 100000", 2), ("350000 100000", 3), ("50000 100000", 1), ("max 100000", 8)],
)
def test_processor_time_of_a_container_is_a_limit_in_version_2(machine, limit, usable):
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", limit)

    found = machine.count(range(8))

    assert (found.logical, found.cores) == (usable, usable)


@pytest.mark.parametrize(("quota", "usable"), [(200000, 2), (150000, 1), (-1, 8)])
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_processor_time_of_a_container_is_a_limit_in_version_1(machine, folder, quota, usable):
    # Without a namespace of control groups, the path is that on the host.
    machine.write("proc/self/cgroup", "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n0::/")
    machine.write(f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", quota)
    machine.write(f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", 100000)

    assert machine.count(range(8)).cores == usable


def test_the_lowest_limit_of_the_groups_above_applies(machine):
    machine.write("proc/self/cgroup", "0::/system.slice/tessera.service")
    machine.write("sys/fs/cgroup/system.slice/cpu.max", "300000 100000")
    machine.write("sys/fs/cgroup/system.slice/tessera.service/cpu.max", "500000 100000")

    assert machine.count(range(8)) == UsableCPUs(logical=3, cores=3, quota=3)


def test_a_limit_of_a_neighbouring_group_does_not_apply(machine):
    machine.write("proc/self/cgroup", "0::/a")
    machine.write("sys/fs/cgroup/b/cpu.max", "100000 100000")

    assert machine.count(range(8)).cores == 8


def test_physical_cores_stay_the_limit_if_the_processor_time_is_more(machine):
    machine.cores({cpu: (0, cpu // 2) for cpu in range(8)})
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", "600000 100000")

    assert machine.count(range(8)) == UsableCPUs(logical=6, cores=4, quota=6)


@pytest.mark.parametrize(
    ("values", "cores"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4),  # Apple silicon
        ({"hw.physicalcpu": 6}, 6),  # Intel
        ({}, 8),
    ],
)
def test_macos_counts_performance_cores(monkeypatch, values, cores):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpus, "read_sysctl", values.get)

    assert usable_cpus() == UsableCPUs(logical=8, cores=cores)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has such values")
def test_a_value_of_macos_is_none_on_other_systems():
    assert read_sysctl("hw.physicalcpu") is None


def test_this_machine_has_at_least_one_core_and_no_more_than_logical_processors():
    found = usable_cpus()

    assert 1 <= found.cores <= found.logical


@pytest.mark.parametrize(
    ("logical", "cores", "synchronous", "helping"),
    [(1, 1, 1, 1), (2, 2, 1, 2), (4, 4, 3, 4), (8, 4, 4, 4), (2, 1, 1, 1)],
)
def test_threads_that_wait_for_each_other_leave_a_processor_free(
    logical, cores, synchronous, helping
):
    found = UsableCPUs(logical, cores)

    assert default_engine_threads(found, synchronous=True) == synchronous
    assert default_engine_threads(found, synchronous=False) == helping


def test_the_log_says_what_limits_the_threads():
    assert str(UsableCPUs(8, 4)) == "4 physical cores (8 logical processors)"
    assert str(UsableCPUs(2, 2, 2)) == (
        "2 physical cores (2 logical processors, limited to the time of 2)"
    )
