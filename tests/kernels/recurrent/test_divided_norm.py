"""The norm of a group of Mamba-2 whose elements several ranks have is the norm of the group."""

from __future__ import annotations

import pytest
import torch

from kernels.collective.communicator import OrderedSum
from kernels.norms.pytorch import rms_norm
from kernels.recurrent.pytorch.divided_norm import PARTS, DividedNorm
from kernels.recurrent.registry import REGISTRY
from kernels.selection import load
from tests.kernels import triton_interpreter

TARGETS = [
    pytest.param(it, marks=triton_interpreter.interpreted if ".gpu." in it else ())
    for it in sorted({row.divided_norm for row in REGISTRY})
]
EPS = 1e-3


class OneAfterAnother(OrderedSum):
    """A rank of several that exchange tensors by computing twice: what the first pass sends, the second receives."""

    def __init__(self, rank, size, sent):
        self.rank, self.size, self.sent = rank, size, sent

    def all_gather(self, x):
        self.sent[self.rank] = x.clone()
        return torch.stack([self.sent.get(it, x) for it in range(self.size)])


def computed(norm, y, weight, num_ranks, size):
    """Return what ranks make of their parts of y, each [T, inner]."""
    sent, found = {}, []
    for _ in range(2):
        found = [
            norm(weight[rank], EPS, num_ranks, OneAfterAnother(rank, size, sent))(y[rank].clone())
            for rank in range(size)
        ]
    return found, sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize("inner", [8, 24, 60, 2056])
@pytest.mark.parametrize("target", TARGETS)
def test_ranks_normalize_their_parts_of_a_group(target, inner, num_ranks, size, dtype):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(size, 5, inner, generator=generator).to(dtype)
    y[:, 3] = 0
    weight = torch.rand(size, inner, generator=generator).to(dtype)

    with triton_interpreter.poisoned_memory():
        found, sent = computed(load(target), y, weight, num_ranks, size)

    for first in range(0, size, num_ranks):
        group = slice(first, first + num_ranks)
        whole = y[group].transpose(0, 1).flatten(1).float()
        expected = rms_norm(whole, weight[group].flatten().float(), EPS)
        torch.testing.assert_close(
            torch.cat(found[group], -1).float(), expected, rtol=2**-10, atol=2**-10
        )
    # A launch adds multiples of 8 elements.
    assert {tuple(it.shape) for it in sent.values()} == {(5, size // num_ranks * PARTS)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_has_the_same_bits_beside_others(target):
    generator = torch.Generator().manual_seed(0)
    y, weight = torch.randn(2, 33, 96, generator=generator), torch.ones(2, 96)

    found, _ = computed(load(target), y, weight, 2, 2)

    for row in (0, 17, 32):
        alone, _ = computed(load(target), y[:, row : row + 1], weight, 2, 2)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, found, strict=True))


def test_a_step_without_tokens_has_none_after_the_norm():
    (empty, _), _ = computed(DividedNorm, torch.empty(2, 0, 16), torch.ones(2, 16), 2, 2)

    assert empty.shape == (0, 16)
