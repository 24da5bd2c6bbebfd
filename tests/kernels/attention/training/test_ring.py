"""Ring attention over several processes equals attention in one, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import kernels
from kernels.attention.training import ring
from kernels.errors import ShapeError
from tests.kernels.attention.ring_ranks import inputs


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        pytest.param(2, {"causal": False, "softcap": 4.0}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(4, {"softmax_scale": 0.4}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_process_computes(tmp_path, size, options):
    store = tmp_path / "store"
    command = [sys.executable, "-m", "tests.kernels.attention.ring_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(size), str(store), json.dumps(options)])
        for rank in range(size)
    ]
    assert [process.wait(timeout=100) for process in processes] == [0] * size

    *tensors, dout = inputs()
    tensors = [it.requires_grad_() for it in tensors]
    out = kernels.flash_attention(*tensors, **options)
    out.backward(dout)
    parts = [torch.load(f"{store}-result-{rank}") for rank in range(size)]
    expected = [out.detach(), *(it.grad for it in tensors)]
    for found, whole in zip(zip(*parts, strict=True), expected, strict=True):
        torch.testing.assert_close(ring.zigzag_join(found), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_join_to_the_whole(size):
    x = torch.arange(2 * 12 * 3).view(2, 12, 3)

    parts = [ring.zigzag_split(x, rank, size) for rank in range(size)]

    assert all(part.shape[1] == 12 // size for part in parts)
    assert torch.equal(ring.zigzag_join(parts), x)


def test_tokens_that_cannot_be_divided_are_refused():
    with pytest.raises(ShapeError, match="10 tokens cannot be divided into 2 \\* 2 chunks"):
        ring.zigzag_split(torch.zeros(1, 10), 0, 2)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="S even"):
        ring.ring_attention(*(torch.zeros(1, 3, 2, 8) for _ in range(3)))
