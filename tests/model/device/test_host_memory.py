"""The memory of the host and of its container."""

import os

import pytest

from model.device.host_memory import free_host_bytes, total_host_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("limit", "total"), [("1000000", 1_000_000), ("max", PHYSICAL)])
def test_the_total_is_that_of_the_container_if_it_has_a_limit(tmp_path, limit, total):
    (tmp_path / "memory.max").write_text(f"{limit}\n")

    assert total_host_bytes(tmp_path) == total


def test_without_a_container_the_total_is_the_hosts_and_more_than_what_is_free(tmp_path):
    assert total_host_bytes(tmp_path) == PHYSICAL
    assert 0 < free_host_bytes(tmp_path) <= PHYSICAL
