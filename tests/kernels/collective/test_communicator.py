"""Sums and gathers of ranks: every rank has the same bits, in the order of the ranks."""

import contextlib
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from kernels.collective import nccl
from kernels.collective.communicator import AbsentRanks
from server.engine.link.engine_process.rank_processes import RankEndpoints
from tests.model.network.ranks import ThreadRanks


def test_sums_are_in_the_order_of_the_ranks_on_each_of_them():
    parts = [torch.randn(5, 7, dtype=torch.float64).to(torch.bfloat16) * 10**i for i in range(4)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()

    sums = ThreadRanks(4).run(lambda it: it.all_reduce(parts[it.rank]))

    assert all(torch.equal(found, expected) for found in sums)


def test_a_sum_does_not_change_its_terms():
    x = torch.ones(2, 3)

    ThreadRanks(2).run(lambda it: it.all_reduce(x))

    assert torch.equal(x, torch.ones(2, 3))


def test_absent_ranks_have_what_the_present_one_has():
    x = torch.arange(6.0).view(2, 3)

    assert torch.equal(AbsentRanks(3).all_gather(x), x.expand(3, 2, 3))
    assert torch.equal(AbsentRanks(3).all_reduce(x), 3 * x)
    assert AbsentRanks(3).minimum(5) == 5


class OneShot:
    """In the place of `OneShotSum`: supports every tensor."""

    def normalizes(self, _x):
        return True

    def add_and_normalize(self, parts, hidden, _weight, _eps, *, pdl):
        del pdl
        return hidden.add_(parts.sum(0))


def test_ranks_are_deleted_after_their_descriptors_are_closed():
    code = """
import gc, socket
from unittest import mock
import torch
from kernels.collective import nccl
from server.engine.link.engine_process.rank_processes import RankEndpoints
with mock.patch.object(nccl.distributed, "init_process_group") as init, mock.patch.object(nccl, "_one_shot"):
    endpoints = RankEndpoints(2)
    ranks = nccl.NCCLCommunicator(endpoints.ranks[0], torch.device("cuda", 0))
    endpoints.close()
    others = [socket.socket() for _ in range(16)]  # they have the numbers of the descriptors
    del ranks
    init.reset_mock()
gc.collect()
print("deleted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )

    assert (done.returncode, done.stdout) == (0, "deleted\n"), done.stderr


@pytest.mark.parametrize("has_one", [True, False])
def test_the_norm_is_in_the_launch_of_the_sum_where_gpus_read_each_others_memory(has_one):
    with (
        mock.patch.object(nccl.distributed, "init_process_group"),
        mock.patch.object(nccl, "_one_shot", return_value=OneShot() if has_one else None),
        contextlib.closing(RankEndpoints(2)) as endpoints,
    ):
        ranks = nccl.NCCLCommunicator(endpoints.ranks[0], torch.device("cuda", 0))
    hidden, parts = torch.zeros(2, 3), torch.ones(1, 2, 3)

    assert ranks.fuses_norm == has_one
    with ranks.detached():
        assert ranks.add_and_normalize(parts, hidden, torch.ones(3), 1e-6, pdl=False) is None
    assert not hidden.any()
    found = ranks.add_and_normalize(parts, hidden, torch.ones(3), 1e-6, pdl=False)
    assert (found is not None) == bool(hidden.any()) == has_one
