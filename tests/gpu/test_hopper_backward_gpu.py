"""The one-pass backward on a Hopper GPU: gradients against a dense definition and the two-pass kernels.

Each ends its process if the kernel hangs.
"""

from __future__ import annotations

import faulthandler
import functools

import pytest
import torch

import kernels
from kernels.attention.training.portable.launch import PORTABLE
from kernels.attention.training.registry import TRAINING_REGISTRY
from kernels.selection import load
from tests.kernels.attention.training.test_autograd import gradients
from tests.kernels.attention.training.test_autograd import problem_of as problem_on_cpu
from tests.kernels.attention.training_cases import Case, dense
from tests.kernels.references.problems import assert_no_worse_than

ROW = next(row for row in TRAINING_REGISTRY if row.name == "hopper_backward")
SECONDS = 40
"""After which a test counts as hanging. A compilation takes a few seconds, a test without one a fraction of one."""
ALL = {"causal": False}
BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = Case(queries=(700, 1, 0, 513), heads=8, kv_heads=2, head_dim=128)
CASES = [
    (RAGGED, BF16),
    (Case(queries=(300, 130), keys=(900, 65), heads=8, kv_heads=2, head_dim=128, options=ALL), BF16),
    (Case(queries=(640, 129), heads=8, kv_heads=2, head_dim=128, options={"sliding_window": 200}), BF16),
    (Case(queries=(257, 64, 30), keys=(130, 128, 0), heads=6, kv_heads=2, head_dim=64), FP16),
    (Case(queries=(257, 64, 30), keys=(700, 128, 1), heads=6, kv_heads=2, head_dim=64, options=ALL), FP16),
    (Case(queries=(1024,), heads=16, kv_heads=16, head_dim=128), BF16),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _ends_if_the_kernel_hangs():
    if kernels.detect("cuda").sm not in ROW.sm:
        pytest.skip(f"{ROW.name} is for {sorted(ROW.sm)}")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def problem_of(case):
    problem, batch = problem_on_cpu(case, case.arguments())
    return problem, type(batch)(*(x if x is None else x.cuda() for x in batch))


def gradients_of(kernel, case, inputs):
    """Return the gradients by a kernel from the values of the definition."""
    q, k, v, dout, dlse = inputs
    out, lse = dense(case, *(x.double() for x in (q, k, v)))
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    saved = (q, k, v, out.to(q.dtype), lse.float())
    problem, batch = problem_of(case)
    return kernel.backward((dout, dlse), saved, batch, problem)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_the_gradients_agree_with_the_definition(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    found = gradients_of(load(ROW.target), case, inputs)

    truth, same = (
        gradients(functools.partial(dense, case), [x.to(kind) for x in inputs])[2:]
        for kind in (torch.float64, dtype)
    )
    for actual, exact, rounded in zip(found, truth, same, strict=True):
        assert_no_worse_than(actual, exact, rounded, atol=0.02 if dtype is BF16 else 3e-3)


def test_the_gradients_of_long_sequences_agree_with_the_two_pass_kernels():
    case = Case(queries=(8192, 3000), heads=16, kv_heads=16, head_dim=128, options=ALL)
    problem, batch = problem_of(case)
    q, k, v, dout, dlse = case.inputs(BF16, "cuda")
    saved = (q, k, v, *PORTABLE.forward(q, k, v, batch, problem))
    found, expected = (
        kernel.backward((dout, dlse), saved, batch, problem)
        for kernel in (load(ROW.target), PORTABLE)
    )

    for actual, other in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=2e-2, atol=2e-2)


def test_the_gradients_of_keys_and_values_have_the_same_bits_in_every_run():
    inputs = RAGGED.inputs(BF16, "cuda")
    runs = [gradients_of(load(ROW.target), RAGGED, inputs) for _ in range(5)]

    for dq, dk, dv in runs[1:]:
        torch.testing.assert_close(dq, runs[0][0], rtol=2e-2, atol=1e-2)
        assert torch.equal(dk, runs[0][1])
        assert torch.equal(dv, runs[0][2])


def test_a_sequence_of_nans_does_not_reach_its_neighbours():
    inputs = RAGGED.inputs(BF16, "cuda")
    expected = gradients_of(load(ROW.target), RAGGED, inputs)
    for x in inputs[:4]:
        x[701:] = torch.nan
    found = gradients_of(load(ROW.target), RAGGED, inputs)

    for actual, clean in zip(found, expected, strict=True):
        torch.testing.assert_close(actual[:701], clean[:701], rtol=2e-2, atol=1e-2)


def test_it_computes_the_gradients_of_flash_attention_if_asked_for():
    inputs = RAGGED.inputs(BF16, "cuda")
    arguments = RAGGED.arguments("cuda")
    one_pass, two_passes = (
        gradients(lambda *x, more=more: kernels.flash_attention(*x, **arguments, **more), inputs)
        for more in ({"deterministic": False}, {})
    )

    for actual, other in zip(one_pass, two_passes, strict=True):
        torch.testing.assert_close(actual, other, rtol=2e-2, atol=2e-2)


def test_transposed_inputs_and_expanded_gradients_are_taken():
    q, k, v = (
        torch.randn(2, heads, 300, 128, device="cuda", dtype=BF16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    found = []
    for more in ({"deterministic": False}, {}):
        out = kernels.flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), **more)
        found.append(torch.autograd.grad(out.sum(), (q, k, v)))

    for actual, other in zip(*found, strict=True):
        torch.testing.assert_close(actual, other, rtol=2e-2, atol=2e-2)
