"""The memory of the host and of its container."""

import os
import resource
from pathlib import Path

import pytest

from model.device import host_memory
from model.device.host_memory import free_host_bytes, total_host_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("limit", "total"), [("1000000", 1_000_000), ("max", PHYSICAL)])
def test_the_total_is_that_of_the_container_if_it_has_a_limit(tmp_path, limit, total):
    (tmp_path / "memory.max").write_text(f"{limit}\n")

    assert total_host_bytes(tmp_path) == total


def test_without_a_container_the_total_is_the_hosts_and_more_than_what_is_free(tmp_path):
    assert total_host_bytes(tmp_path) == PHYSICAL
    assert 0 < free_host_bytes(tmp_path) <= PHYSICAL


def group(folder, limit, used, cached=0, version=2):
    """Write the files of a group."""
    names = {2: ("memory.max", "memory.current", "inactive_file")}.get(
        version, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


@pytest.mark.parametrize(("outer", "inner"), [(900, 800), (800, 900)])
def test_the_limits_of_all_groups_around_the_process_hold(tmp_path, monkeypatch, outer, inner):
    own = tmp_path / "own"
    own.write_text("0::/system.slice/tessera.service\n")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", own)
    group(tmp_path / "system.slice", outer, 100, 50)
    group(tmp_path / "system.slice" / "tessera.service", inner, 100, 50)
    group(tmp_path / "system.slice" / "other.service", 1, 1)

    assert total_host_bytes(tmp_path) == 800
    assert free_host_bytes(tmp_path) == 750


def test_groups_of_version_1_hold(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text("12:cpu,cpuacct:/docker/a\n5:memory:/docker/a\n")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", own)
    group(tmp_path / "memory" / "docker" / "a", 1000, 300, 100, version=1)
    group(tmp_path / "memory", 1 << 62, 300, 100, version=1)

    assert total_host_bytes(tmp_path) == 1000
    assert free_host_bytes(tmp_path) == 800


def test_the_limit_of_the_process_holds(tmp_path, monkeypatch):
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = {resource.RLIMIT_AS: size + (64 << 20), resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))

    assert 32 << 20 < free_host_bytes(tmp_path) < 96 << 20
