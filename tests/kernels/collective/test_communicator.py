"""Sums and gathers of ranks: every rank has the same bits, in the order of the ranks."""

import torch

from kernels.collective.communicator import AbsentRanks
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
