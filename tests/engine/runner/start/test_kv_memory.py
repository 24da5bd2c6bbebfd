"""The size of the KV cache, and its allocation while other processes allocate memory too."""

import dataclasses
import logging

import pytest
import torch

from model.device.memory import free_bytes, is_out_of_memory
from server.engine.core.memory.kv_demand import (
    CUDA_BYTES,
    Allowance,
    KVCacheDemand,
    NotEnoughMemoryError,
)
from server.engine.runner.start.kv_memory import allocate_kv_cache, kv_cache_size

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK_BYTES = 160


class Device:
    """A device with a number of free bytes, shared with other processes."""

    def __init__(self, free):
        self.free = free
        self.held = []

    def allocate(self, num_blocks, _num_slots=0):
        """Raise PyTorch's error if the memory is too small."""
        if num_blocks * BLOCK_BYTES > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nMore text")
        self.free -= num_blocks * BLOCK_BYTES
        self.held.append(num_blocks)
        return num_blocks


@pytest.fixture
def device(monkeypatch):
    device = Device(0)
    monkeypatch.setattr(
        "server.engine.runner.start.kv_memory.free_bytes", lambda _device: device.free
    )
    return device


def demand(tokens=None, gib=None, useful=1000, kept=0, allowance=None, slots=0):
    return KVCacheDemand(
        requested_tokens=tokens,
        requested_gib=gib,
        useful_tokens=useful,
        block_size=16,
        bytes_per_token=10,
        kept_bytes=kept,
        allowance=allowance,
        slot_bytes=slots,
        num_seqs=1,
        requested_snapshots=0,
    )


def allowance(blocks, share=0.5, held=2**30):
    """Return an allowance that leaves a number of blocks beside what is held and what CUDA takes."""
    return Allowance(share, round((held + CUDA_BYTES + blocks * BLOCK_BYTES) / share), held)


def test_a_requested_number_of_tokens_is_rounded_up_to_blocks(device):
    device.free = 10_000

    assert kv_cache_size(demand(tokens=17), CPU).num_blocks == 2


def test_snapshots_beside_a_requested_size_take_a_quarter_of_its_memory(device):
    device.free = 10**6
    asked = dataclasses.replace(
        demand(tokens=100 * 16, slots=100), num_seqs=1000, requested_snapshots=None
    )

    size = kv_cache_size(asked, CPU)

    assert (size.num_blocks, size.num_snapshots) == (100, 100 * BLOCK_BYTES // 4 // 100)


def test_a_requested_number_of_bytes_is_rounded_down_to_blocks(device):
    device.free = 10_000

    size = kv_cache_size(demand(gib=(3 * BLOCK_BYTES + 159) / 2**30), CPU)

    assert size.num_blocks == 3
    assert "--kv-cache-gib" in size.why


@pytest.mark.parametrize(
    "asked", [{"tokens": 200_000}, {"gib": 2_000_000 / 2**30}], ids=["tokens", "GiB"]
)
def test_a_requested_size_beyond_memory_is_refused_with_both_sizes(device, asked):
    device.free = 2**20

    with pytest.raises(NotEnoughMemoryError, match=r"needs 2 MiB, at most 1 MiB can be used"):
        kv_cache_size(demand(**asked), CPU)


def test_a_requested_number_of_bytes_below_a_block_is_refused(device):
    device.free = 2**20

    with pytest.raises(NotEnoughMemoryError, match=r"--kv-cache-gib 1e-07 is less than one block"):
        kv_cache_size(demand(gib=1e-7), CPU)


def test_the_cache_is_not_larger_than_the_engine_can_use(device):
    device.free = 2**30

    assert kv_cache_size(demand(useful=33), CPU).num_blocks == 3


@pytest.mark.parametrize(("where", "expected"), [(CPU, 25), (CUDA, 80)])
def test_the_default_size_is_limited_to_a_share_of_the_free_memory(device, where, expected):
    device.free = 100 * BLOCK_BYTES

    assert kv_cache_size(demand(useful=10**9), where).num_blocks == expected


def test_the_memory_of_a_step_stays_free(device):
    device.free = 110 * BLOCK_BYTES

    assert kv_cache_size(demand(useful=10**9, kept=10 * BLOCK_BYTES), CUDA).num_blocks == 80
    with pytest.raises(NotEnoughMemoryError, match="activations of a step"):
        kv_cache_size(demand(tokens=101 * 16, kept=10 * BLOCK_BYTES), CUDA)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_cache_has_all_that_the_engine_leaves_of_its_share_of_the_total_memory(device, share):
    device.free = 2**40
    kept = {"kept": 20 * BLOCK_BYTES, "slots": 10 * BLOCK_BYTES}

    size = kv_cache_size(demand(useful=16, allowance=allowance(100, share), **kept), CUDA)

    assert size.num_blocks == 70
    for words in (f"{share:g} of ", "--gpu-memory-utilization", "1.00 GiB for the weights"):
        assert words in size.why


def test_a_share_does_not_count_what_other_programs_use(device):
    device.free = 100 * BLOCK_BYTES

    for free in (100, 1000):
        device.free = free * BLOCK_BYTES
        assert kv_cache_size(demand(allowance=allowance(100)), CUDA).num_blocks == 100


def test_a_share_of_more_than_is_free_is_bounded_by_what_is_free_and_the_log_says_so(
    device, caplog
):
    caplog.set_level(logging.INFO, "tessera.engine")
    device.free = 99 * BLOCK_BYTES
    wanted = demand(kept=9 * BLOCK_BYTES, allowance=allowance(100))

    assert allocate_kv_cache(wanted, CUDA, device.allocate) == 90
    assert "GiB free on cuda, which is less than 0.5 of" in caplog.text


def test_a_share_that_the_weights_exceed_is_refused_with_the_numbers(device):
    device.free = 2**40
    granted = Allowance(0.05, 80 * 2**30, 15 * 2**30)

    with pytest.raises(NotEnoughMemoryError) as refusal:
        kv_cache_size(demand(allowance=granted), CUDA)
    for words in ("0.05 of 80.00 GiB (--gpu-memory-utilization)", "15.00 GiB for the weights"):
        assert words in str(refusal.value)


def test_a_share_is_reduced_if_another_process_took_the_memory(device, caplog):
    device.free = 200 * BLOCK_BYTES

    def allocate(num_blocks, _num_slots):
        if not device.held:
            device.allocate(140)  # the other process
        return device.allocate(num_blocks)

    assert allocate_kv_cache(demand(allowance=allowance(100)), CUDA, allocate) == 30
    assert "trying a smaller size" in caplog.text


def test_too_little_memory_for_one_block_is_refused(device):
    device.free = 4 * 159

    with pytest.raises(NotEnoughMemoryError, match="one block"):
        kv_cache_size(demand(), CPU)


def test_a_step_that_needs_more_than_the_free_memory_is_refused(device):
    device.free = 100

    with pytest.raises(NotEnoughMemoryError, match="one block"):
        kv_cache_size(demand(kept=1000), CUDA)


def test_the_log_states_the_size_and_its_reason(device, caplog):
    caplog.set_level(logging.INFO, "tessera.engine")
    device.free = 10 * 2**30

    allocate_kv_cache(demand(useful=10**12, kept=2**30), CUDA, device.allocate)

    assert "7.20 GiB: 80% of 10.00 GiB free on cuda less 1.00 GiB for the activations" in (
        caplog.text
    )


def test_the_log_states_the_size_before_the_memory_is_taken(device, caplog):
    caplog.set_level(logging.INFO, "tessera.engine")
    device.free = 10 * 2**30
    before = []

    def allocate(num_blocks, _num_slots):
        before.append(caplog.text)
        return device.allocate(num_blocks)

    allocate_kv_cache(demand(useful=10**12, kept=2**30), CUDA, allocate)

    assert "7.20 GiB" in before[0]


def test_a_smaller_cache_is_tried_if_another_process_took_the_memory(device, caplog):
    device.free = 1000 * BLOCK_BYTES

    def allocate(num_blocks, _num_slots):
        if not device.held:
            device.allocate(700)  # the other process
        return device.allocate(num_blocks)

    # 80 % of 1000 blocks do not fit any more; half of that share of the remaining 300 does.
    assert allocate_kv_cache(demand(useful=10**9), CUDA, allocate) == 120
    assert "trying a smaller size" in caplog.text
    assert "Tried to allocate much." in caplog.text
    assert "More text" not in caplog.text


def test_two_processes_fit_on_one_gpu_after_a_failed_first_attempt(device):
    device.free = 1000 * BLOCK_BYTES
    both = iter(range(1))

    def allocate(num_blocks, _num_slots):
        if next(both, None) is not None:  # half of the cache is allocated on both sides
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return device.allocate(num_blocks)

    first = allocate_kv_cache(demand(useful=10**9), CUDA, allocate)
    second = allocate_kv_cache(demand(useful=10**9), CUDA, device.allocate)

    assert (first, second) == (400, 480)


def test_a_requested_size_is_never_reduced(device):
    device.free = 100 * BLOCK_BYTES
    attempts = []

    def allocate(num_blocks, _num_slots):
        attempts.append(num_blocks)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(NotEnoughMemoryError, match=r"set by --kv-cache-tokens.*another process"):
        allocate_kv_cache(demand(tokens=160), CUDA, allocate)

    assert attempts == [10]


def test_allocation_fails_after_the_last_attempt(device):
    device.free = 1000 * BLOCK_BYTES
    attempts = []

    def allocate(num_blocks, _num_slots):
        attempts.append(num_blocks)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(NotEnoughMemoryError, match="could not be allocated"):
        allocate_kv_cache(demand(useful=10**9), CUDA, allocate)

    assert attempts == [800, 400, 200, 100]


def test_other_allocation_errors_are_not_treated_as_out_of_memory(device):
    device.free = 1000 * BLOCK_BYTES

    def allocate(_num_blocks, _num_slots):
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        allocate_kv_cache(demand(), CUDA, allocate)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognized_by_type_or_message(error, expected):
    assert is_out_of_memory(error) is expected


def test_free_memory_respects_a_container_limit_without_its_file_cache(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 500000\n")

    assert free_bytes(CPU, tmp_path) == 600_000


def test_free_memory_ignores_a_container_without_a_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")

    assert free_bytes(CPU, tmp_path) == pytest.approx(free_bytes(CPU, tmp_path / "none"), rel=0.5)
