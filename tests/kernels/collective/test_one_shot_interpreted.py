"""The all-reduce in one launch: processes in Triton's interpreter that wait for each other through shared memory."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch

from kernels.linear.around import joined
from kernels.norms.pytorch import rms_norm
from tests.kernels import triton_interpreter
from tests.kernels.collective.interpreted_ranks import EPS, SIZES, hidden, part, partials, weight

pytestmark = triton_interpreter.interpreted

MOST_BYTES = 2 << 20


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_sums_in_the_order_of_the_ranks_and_their_norms(size, tmp_path):
    for rank in range(size):
        for number in range(3):
            with (tmp_path / f"memory-{rank}-{number}").open("wb") as file:
                file.truncate(2 * MOST_BYTES + 4 * 512 * size)
    command = (sys.executable, "-m", "tests.kernels.collective.interpreted_ranks")

    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in range(size)
    ]
    failures = [rank.communicate(timeout=200)[1].decode() for rank in ranks]

    assert not any(rank.returncode for rank in ranks), failures
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for launch in range(len(SIZES)):
        expected = torch.zeros(SIZES[launch])
        for rank in range(size):
            expected += part(rank, launch).float()
        assert all(torch.equal(it[launch][0], expected) for it in found), launch
        squares = torch.zeros(SIZES[launch])
        for rank in range(size):
            squares += part(rank, launch).float().square()
        assert all(torch.equal(it[launch][3], squares) for it in found), launch
        stream = hidden(launch)
        total = torch.zeros(stream.shape)
        for rank in range(size):
            total += joined(partials(rank, launch), stream.dtype).float()
        stream = (stream.float() + total).to(stream.dtype)
        normalized = rms_norm(stream.float(), weight().float(), EPS)
        assert all(torch.equal(it[launch][1], stream) for it in found), launch
        assert all(torch.equal(it[launch][2], found[0][launch][2]) for it in found), launch
        torch.testing.assert_close(
            found[0][launch][2].float(), normalized, rtol=2**-8, atol=2**-8, msg=str(launch)
        )


@pytest.fixture
def one_shot():
    from kernels.collective import one_shot as module

    with (
        mock.patch.object(module, "share_memory", return_value=(None, [0, 0])),
        mock.patch.object(module, "detect", return_value=mock.Mock(num_sms=2)),
    ):
        yield module.OneShotSum(0, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "dtype", "supported"),
    [
        ((16, 2048), torch.bfloat16, True),
        ((16, 2048), torch.float32, True),
        ((16, 2056), torch.bfloat16, False),  # more programs than run at once on 2 SMs
        ((3, 5), torch.bfloat16, False),  # no multiple of 16 bytes
        ((0, 8), torch.bfloat16, False),
    ],
)
def test_only_tensors_that_fit_are_supported(one_shot, shape, dtype, supported):
    assert one_shot.supports(torch.empty(shape, dtype=dtype)) == supported


def test_tensors_of_more_than_2_mib_are_not_supported(one_shot):
    one_shot.most_warps = 4 * 512

    assert one_shot.supports(torch.empty(1 << 19, dtype=torch.float32))
    assert not one_shot.supports(torch.empty((1 << 19) + 8, dtype=torch.float32))


@pytest.mark.parametrize(
    ("rows", "columns", "supported"),
    [
        (4, 4096, True),  # 16 warps each, on 2 SMs with room for 32
        (5, 4096, False),
        (64, 256, True),
        (65, 256, False),
        (1, 100, False),  # no multiple of 16 bytes
        (0, 64, False),
    ],
)
def test_only_residual_streams_whose_rows_fit_are_normalized_with_the_sum(
    one_shot, rows, columns, supported
):
    hidden = torch.empty((rows, columns), dtype=torch.bfloat16)

    assert one_shot.normalizes(hidden) == supported


def test_rows_whose_vectors_are_not_aligned_are_not_normalized_with_the_sum(one_shot):
    hidden = torch.empty((2, 68), dtype=torch.bfloat16)

    assert not one_shot.normalizes(hidden[:, :64])


def test_slots_are_divided_by_rows_of_one_size(one_shot):
    hidden = torch.empty((1, 64), dtype=torch.bfloat16)
    with mock.patch("kernels.collective.one_shot.sum_ranks_and_normalize"):
        one_shot.add_and_normalize(hidden[None], hidden, hidden[0], 1e-5, pdl=False)

    assert one_shot.normalizes(torch.empty((3, 64), dtype=torch.bfloat16))
    assert not one_shot.normalizes(torch.empty((3, 128), dtype=torch.bfloat16))
