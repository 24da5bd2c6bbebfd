"""The all-reduce in one launch: processes in Triton's interpreter that wait for each other through shared memory."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.kernels import triton_interpreter
from tests.kernels.collective.interpreted_ranks import SIZES, part

pytestmark = triton_interpreter.interpreted

MOST_BYTES = 2 << 20


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_sums_in_the_order_of_the_ranks(size, tmp_path):
    for rank in range(size):
        with (tmp_path / f"memory-{rank}").open("wb") as file:
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
        assert all(torch.equal(it[launch], expected) for it in found), launch


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
    one_shot.most_programs = 512

    assert one_shot.supports(torch.empty(1 << 19, dtype=torch.float32))
    assert not one_shot.supports(torch.empty((1 << 19) + 8, dtype=torch.float32))
