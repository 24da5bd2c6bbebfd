"""Ranks on CPUs exchange tensors through memory that they share; here each rank is a thread."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.collective import shared_memory
from kernels.collective.communicator import RankLostError
from kernels.collective.connect import connect
from kernels.collective.endpoint import SLOT_BYTES, num_bytes
from kernels.collective.shared_memory import SharedMemoryCommunicator
from kernels.norms.pytorch import sum_in_order
from server.engine.link.engine_process.rank_processes import RankEndpoints


def run(size, compute):
    """Call `compute(communicator)` for each rank in a thread of its own; return the results by rank."""
    with (
        contextlib.closing(RankEndpoints(size)) as endpoints,
        ThreadPoolExecutor(size) as pool,
    ):
        ranks = [connect(it, torch.device("cpu")) for it in endpoints.ranks]
        return list(pool.map(compute, ranks))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_the_sum_in_the_order_of_the_ranks(size):
    torch.manual_seed(0)
    parts = [torch.randn(5, 7).to(torch.bfloat16) * 10**i for i in range(size)]

    found = run(size, lambda it: [it.all_reduce(parts[it.rank]) for _ in range(5)])

    expected = sum_in_order(torch.stack(parts))
    assert all(torch.equal(one, expected) for ranks in found for one in ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (3, 1, 5)])
def test_tensors_of_any_shape_and_dtype_are_gathered_in_the_order_of_the_ranks(shape, dtype):
    count = torch.zeros(shape).numel()
    parts = [(torch.arange(count) + 10 * i).to(dtype).view(shape) for i in range(3)]

    found = run(3, lambda it: it.all_gather(parts[it.rank]))

    assert all(torch.equal(one, torch.stack(parts)) for one in found)


def test_tensors_that_are_not_contiguous_are_gathered():
    parts = [torch.arange(12.0).view(3, 4).T + i for i in range(2)]

    assert torch.equal(run(2, lambda it: it.all_gather(parts[it.rank]))[1], torch.stack(parts))


@pytest.mark.parametrize("extra", [-4, 0, 4, 3 * SLOT_BYTES // 2])
def test_tensors_beyond_a_slot_are_gathered_and_summed_in_parts(extra):
    count = (SLOT_BYTES + extra) // 4
    parts = [torch.arange(count, dtype=torch.float32) % 1000 + i for i in range(2)]

    found = run(2, lambda it: (it.all_gather(parts[it.rank]), it.all_reduce(parts[it.rank])))

    for gathered, total in found:
        assert torch.equal(gathered, torch.stack(parts))
        assert torch.equal(total, parts[0] + parts[1])


def test_results_stay_while_later_operations_use_the_same_memory():
    def compute(ranks):
        kept = [ranks.all_reduce(torch.full((100,), float(i))) for i in range(20)]
        gathered = [ranks.all_gather(torch.full((100,), float(i))) for i in range(20)]
        return kept, gathered

    for kept, gathered in run(2, compute):
        assert all((one == 2 * i).all() for i, one in enumerate(kept))
        assert all((one == i).all() for i, one in enumerate(gathered))


def test_a_broadcast_and_a_minimum_reach_all_ranks():
    def compute(ranks):
        x = torch.full((4,), ranks.rank)
        ranks.broadcast(x)
        return x.tolist(), ranks.minimum(7 - ranks.rank)

    assert run(3, compute) == [([0] * 4, 5)] * 3


def test_a_detached_rank_does_not_wait_for_the_others():
    with contextlib.closing(RankEndpoints(2)) as endpoints:
        alone = SharedMemoryCommunicator(endpoints.ranks[1])
        x = torch.ones(3)
        with alone.detached():
            assert torch.equal(alone.all_gather(x), torch.ones(2, 3))
            assert torch.equal(alone.all_reduce(x), torch.full((3,), 2.0))
            alone.broadcast(x)
            assert alone.minimum(4) == 4
        assert torch.equal(x, torch.ones(3))


def test_a_rank_that_has_ended_ends_the_operation_of_the_others_and_is_named():
    with contextlib.closing(RankEndpoints(3)) as endpoints:
        first = SharedMemoryCommunicator(endpoints.ranks[0])
        errors = []

        def wait():
            try:
                first.all_reduce(torch.ones(2))
            except RankLostError as error:
                errors.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        endpoints.close_all_but(0)  # as if their processes had ended
        waiting.join(60)

        assert errors in (["rank 1 has ended"], ["rank 2 has ended"])
        with pytest.raises(RankLostError):
            first.all_gather(torch.ones(2))


def test_the_descriptors_of_ranks_are_closed_and_their_memory_has_no_name():
    folder = Path("/proc/self/fd")
    before = len(list(folder.iterdir()))
    with contextlib.closing(RankEndpoints(4)) as endpoints:
        first = endpoints.ranks[0]
        target = str((folder / str(first.memory)).readlink())
        assert os.fstat(first.memory).st_size == num_bytes(4)
        assert "(deleted)" in target
        assert len(endpoints.inherited(0)) == 5
        endpoints.close_all_but(0)
        assert len(list(folder.iterdir())) == before + 5

    assert len(list(folder.iterdir())) == before


def test_the_memory_of_all_slots_fits_what_the_ranks_share():
    for size in (2, 3, 8):
        assert num_bytes(size) == 2 * size * shared_memory.SLOT_BYTES
