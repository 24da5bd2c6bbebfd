"""Attention for training on a GPU: values and gradients against a dense definition, and memory."""

from __future__ import annotations

import functools

import pytest
import torch

import kernels
from tests.kernels.attention.training.test_autograd import gradients
from tests.kernels.attention.training_cases import CASES, Case, dense
from tests.kernels.references.problems import assert_no_worse_than, truth_dtype

pytestmark = pytest.mark.gpu

LARGE = [
    Case(queries=(700, 1, 0, 513), heads=8, kv_heads=2, head_dim=128),
    Case(queries=(300,), keys=(900,), heads=6, kv_heads=2, head_dim=64, options={"causal": False}),
    Case(queries=(640, 129), heads=4, kv_heads=4, head_dim=96, options={"sliding_window": 200}),
    Case(queries=(400,), heads=8, kv_heads=1, head_dim=256, options={"softcap": 20.0}),
    Case(queries=(500,), heads=4, kv_heads=1, head_dim=128, options={"dropout_p": 0.2, "dropout_seed": 1 << 40}),
    Case(queries=(500, 37), heads=4, kv_heads=2, head_dim=80, alibi=True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_tensor_cores():
    if not kernels.detect("cuda").has_triton_tensor_cores:
        pytest.skip("no Triton kernel for training before sm_80")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_values_and_gradients_agree_with_the_definition(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    actual = gradients(lambda *x: kernels.flash_attention(*x, **case.arguments("cuda")), inputs)
    truth, same = (
        gradients(functools.partial(dense, case), [x.to(kind) for x in inputs])
        for kind in (truth_dtype(dtype), dtype)
    )
    atol = {torch.bfloat16: 0.02, torch.float16: 3e-3}.get(dtype, 2e-5)
    for found, exact, rounded in zip(actual, truth, same, strict=True):
        assert_no_worse_than(found, exact, rounded, atol=atol)


def test_seven_runs_have_the_same_bits():
    case = LARGE[0]
    inputs = case.inputs(torch.bfloat16, "cuda")
    runs = [
        gradients(lambda *x: kernels.flash_attention(*x, **case.arguments("cuda")), inputs)
        for _ in range(7)
    ]
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.gpu_memory(8)
def test_memory_grows_linearly():
    def peak(length):
        q, k, v = (
            torch.randn(1, length, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.flash_attention(q, k, v).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    assert peak(32768) < 2.2 * peak(16384)
