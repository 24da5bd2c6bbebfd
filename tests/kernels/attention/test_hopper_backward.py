"""Hopper's one-pass backward without a GPU: its gradients, with the roles' own code on the CPU, and its selection.

The launches before and after that of the roles run in Triton's interpreter.
"""

from __future__ import annotations

import functools

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.attention.training.registry import (
    TRAINING_REGISTRY,
    TrainingBatch,
    TrainingProblem,
    select_training,
)
from tests.kernels.attention.training.test_autograd import gradients, problem_of
from tests.kernels.attention.training_cases import Case, dense
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.triton_interpreter import interpreted
from tests.marks import slow_except

ALL = {"causal": False}
CASES = [
    Case(queries=(200, 1, 0, 65), heads=4, kv_heads=2, head_dim=64),
    Case(queries=(130,), keys=(300,), heads=2, kv_heads=1, head_dim=128),
    Case(queries=(300, 64), keys=(130, 128), heads=2, kv_heads=2, head_dim=64),
    Case(queries=(70, 128, 40), keys=(150, 128, 0), heads=3, kv_heads=1, head_dim=64, options=ALL),
    Case(queries=(257,), keys=(129,), heads=2, kv_heads=2, head_dim=128, options=ALL),
    Case(queries=(300, 90), heads=2, kv_heads=1, head_dim=64, options={"sliding_window": 100}),
    Case(queries=(128,), keys=(400,), heads=1, kv_heads=1, head_dim=64, options={"sliding_window": 1}),
    Case(queries=(400,), keys=(390,), heads=1, kv_heads=1, head_dim=64, options={"sliding_window": 290}),
    Case(queries=(256,), heads=8, kv_heads=1, head_dim=64, options={"softmax_scale": 0.5}),
    Case(queries=(5, 64, 63), keys=(1, 128, 127), heads=6, kv_heads=2, head_dim=64),
]  # fmt: skip


@pytest.fixture
def roles(monkeypatch):
    """Run the kernel's roles on the CPU."""
    from kernels.attention.training.hopper import backward
    from tests.kernels.attention.hopper_backward_on_cpu import BackwardOnCPU

    found = BackwardOnCPU()
    monkeypatch.setattr(backward, "backward", found)
    return found


def one_pass(case, inputs):
    """Return the gradients of a case."""
    from kernels.attention.training.hopper.backward import ONE_PASS

    problem, batch = problem_of(case, case.arguments())
    q, k, v, dout, dlse = inputs
    out, lse = dense(case, *(x.double() for x in (q, k, v)))
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    saved = (q, k, v, out.to(q.dtype), lse.float())
    return ONE_PASS.backward((dout, dlse), saved, batch, problem)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", slow_except([CASES[0], CASES[3], CASES[5]], CASES), ids=str)
def test_the_gradients_agree_with_the_definition(case, dtype, roles):
    inputs = case.inputs(dtype)
    found = one_pass(case, inputs)

    truth, same = (
        gradients(functools.partial(dense, case), [x.to(kind) for x in inputs])[2:]
        for kind in (torch.float64, dtype)
    )
    atol = 0.02 if dtype is torch.bfloat16 else 3e-3
    for actual, exact, rounded in zip(found, truth, same, strict=True):
        assert_no_worse_than(actual, exact, rounded, atol=atol)
    assert roles.tiles


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_of_nans_does_not_reach_its_neighbours(causal, roles):
    case = Case(queries=(70, 90, 30), heads=2, kv_heads=1, head_dim=64, options={"causal": causal})
    inputs = case.inputs(torch.float16)
    expected = one_pass(case, inputs)
    for x in inputs[:4]:
        x[70:160] = torch.nan
    found = one_pass(case, inputs)

    for actual, clean in zip(found, expected, strict=True):
        for place in (slice(70), slice(160, 190)):
            assert torch.equal(actual[place], clean[place])
    assert roles.tiles


@interpreted
def test_few_tiles_have_masks(roles):
    case = Case(queries=(512,), heads=1, kv_heads=1, head_dim=64)
    one_pass(case, case.inputs(torch.float16))

    # Each of 4 tiles of keys is on the diagonal of 2 tiles of queries, and all later ones see it whole.
    assert (roles.tiles, roles.masked) == (8 + 6 + 4 + 2, 8)


@interpreted
def test_a_batch_without_queries_or_keys_has_gradients_of_zero(roles):
    for case in (
        Case(queries=(0,), keys=(30,), heads=1, kv_heads=1, head_dim=64),
        Case(queries=(30,), keys=(0,), heads=1, kv_heads=1, head_dim=64),
    ):
        assert not any(x.any() for x in one_pass(case, case.inputs(torch.float16)))
    assert not roles.tiles


def test_it_is_selected_only_if_asked_for():
    assert selected() == "hopper_backward"
    for changes in (
        {"deterministic": True},
        {"softcap": 10.0},
        {"dropout_p": 0.5},
    ):
        assert selected(**changes) == "portable_backward"
    assert selected(head_dim=96) == selected(arch="a100") == "portable_backward"
    assert selected(slopes=torch.ones(8)) == "portable_backward"


def test_it_says_why_it_is_passed_over():
    row = next(row for row in TRAINING_REGISTRY if row.name == "hopper_backward")
    q, batch, problem = asked(softcap=10.0, deterministic=True, head_dim=96)

    assert row.unsupported(q, q, batch, problem, CATALOGUE["h100"]) == (
        "head_dim 96 is none of [64, 128]",
        "no softcap",
        "not deterministic",
    )


def asked(head_dim=128, slopes=None, **options):
    q = torch.empty(64, 8, head_dim, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    options = {"softmax_scale": 1.0, "deterministic": False} | options
    return q, TrainingBatch(offsets, offsets, slopes), TrainingProblem(**options)


def selected(arch="h100", **options):
    q, batch, problem = asked(**options)
    return select_training(q, q, batch, problem, CATALOGUE[arch]).name
