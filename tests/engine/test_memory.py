"""How large the KV cache becomes."""

import pytest
import torch

from model.memory import free_bytes
from server.engine.memory import NotEnoughMemoryError, kv_cache_blocks

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch):
    def set_free(num_bytes):
        monkeypatch.setattr("server.engine.memory.free_bytes", lambda _device: num_bytes)

    return set_free


def blocks(requested=None, useful=1000):
    return kv_cache_blocks(
        requested_tokens=requested,
        useful_tokens=useful,
        block_size=16,
        bytes_per_token=10,
        device=CPU,
    )


def test_a_requested_size_is_taken_and_rounded_up_to_blocks(free):
    free(10_000)

    assert blocks(requested=17) == 2


def test_a_requested_size_beyond_memory_is_refused_with_both_sizes(free):
    free(2**20)

    with pytest.raises(NotEnoughMemoryError, match=r"200000 tokens needs 2 MiB.* 1 MiB"):
        blocks(requested=200_000)


def test_no_more_is_allocated_than_the_engine_could_fill(free):
    free(2**30)

    assert blocks(useful=33) == 3


def test_a_quarter_of_a_cpus_free_memory_is_the_limit(free):
    free(4 * 160 * 7)

    assert blocks() == 7


def test_too_little_memory_for_one_block_is_refused(free):
    free(4 * 159)

    with pytest.raises(NotEnoughMemoryError, match="one block"):
        blocks()


def test_a_containers_limit_counts_but_its_file_cache_does_not(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 500000\n")

    assert free_bytes(CPU, tmp_path) == 600_000


def test_a_container_without_a_limit_does_not_count(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")

    assert free_bytes(CPU, tmp_path) == pytest.approx(free_bytes(CPU, tmp_path / "none"), rel=0.5)
