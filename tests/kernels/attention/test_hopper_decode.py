"""Hopper's decode kernels without a GPU: their own code on the CPU against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from tests.kernels.references.problems import Layout, assert_no_worse_than, make_case
from tests.kernels.triton_interpreter import interpreted

KEYS_ON_M = "hopper_keys_on_m_decode"
BOTH = pytest.mark.parametrize("name", [KEYS_ON_M, "hopper_decode"])
ARCH = dataclasses.replace(CATALOGUE["h100"], num_sms=4)
LENGTHS = [1, 0, 16, 63, 64, 65, 128, 300, 700]
# dtype, query heads, key-value heads, head dim, block size, features.
CASES = [
    ("bfloat16", 3, 1, 64, 16, {"lse": True}),
    ("bfloat16", 4, 4, 64, 16, {}),
    ("float16", 7, 1, 64, 32, {"sliding_window": 100, "lse": True}),
    ("bfloat16", 16, 2, 64, 16, {"sliding_window": 1}),
    ("bfloat16", 12, 1, 64, 64, {"softcap": 15.0, "lse": True}),
    ("float16", 16, 1, 128, 256, {"sliding_window": 70, "softcap": 15.0}),
    ("bfloat16", 5, 1, 80, 16, {"lse": True}),
    ("float16", 10, 2, 32, 16, {"softmax_scale": 0.3}),
    ("bfloat16", 6, 1, 128, 16, {}),
]


@pytest.fixture
def on_cpu(monkeypatch):
    """Run the kernel on the CPU."""
    from kernels.attention.hopper import decode
    from tests.kernels.attention.hopper_decode_on_cpu import DecodeOnCPU

    found = DecodeOnCPU()
    monkeypatch.setattr(decode, "decode", found)
    return found


def problem_of(case):
    dtype, heads, kv_heads, head_dim, block_size, features = case
    others = {"softmax_scale": head_dim**-0.5, "unmeasured": True, **features}
    return AttentionProblem(Phase.DECODE, dtype, heads, kv_heads, head_dim, block_size, **others)


def selection_of(name, problem, **launch):
    row = next(row for row in REGISTRY if row.name == name)
    found = kernels.select(problem, ARCH, registry=(row,))
    sizes = dataclasses.replace(found.launches[-1].launch, **launch)
    return dataclasses.replace(
        found, launches=(dataclasses.replace(found.launches[-1], launch=sizes),)
    )


def judge(case, out, lse):
    factor = 3.0 if case.problem.softcap is not None else 2.0
    assert_no_worse_than(out, case.expected(torch.float64), case.expected(out.dtype), factor=factor)
    if case.problem.lse:
        case.check_lse(lse)


@interpreted
@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_decode_agrees_with_float64(case, name, on_cpu):
    case = make_case(problem_of(case), [1] * len(LENGTHS), LENGTHS, layout=Layout.FRAGMENTED)

    judge(case, *case.attend(selection_of(name, case.problem)))

    assert on_cpu.runs == 1


@interpreted
@pytest.mark.parametrize(
    "changes", [{"block_n": 64}, {"num_stages": 1}, {"num_stages": 3}], ids=str
)
@pytest.mark.parametrize("splits", [1, 8])
def test_tiles_stages_and_splits_do_not_change_the_result(changes, splits, on_cpu):
    case = make_case(problem_of(CASES[0]), [1] * len(LENGTHS), LENGTHS, layout=Layout.FRAGMENTED)

    judge(
        case, *case.attend(selection_of(KEYS_ON_M, case.problem, programs_per_sm=splits, **changes))
    )

    assert on_cpu.runs == 1


@interpreted
@BOTH
def test_settled_keys_are_copied_before_those_of_the_step(name, on_cpu):
    case = make_case(problem_of(CASES[0]), [1] * len(LENGTHS), LENGTHS, layout=Layout.FRAGMENTED)
    selection = selection_of(name, case.problem)
    expected = case.attend(selection)[0]
    settled = dataclasses.replace(case, batch=dataclasses.replace(case.batch, keys_settled=True))

    assert torch.equal(settled.attend(selection)[0], expected)
    assert on_cpu.runs == 2


@pytest.mark.parametrize(
    ("heads", "head_dim", "shape"),
    [
        (9, 64, "head_dim 64 and 9 query heads per key-value head"),
        (16, 64, "head_dim 64 and 16 query heads per key-value head"),
        (3, 32, "head_dim 32 and 3 query heads per key-value head"),
        (8, 128, "head_dim 128 and 8 query heads per key-value head"),
    ],
)
def test_shapes_that_were_not_timed_have_keys_on_m_only_if_unmeasured_kernels_are_allowed(
    heads, head_dim, shape
):
    allowed = problem_of(("bfloat16", heads, 1, head_dim, 16, {}))
    refused = dataclasses.replace(allowed, unmeasured=False)

    assert kernels.select(allowed, CATALOGUE["h100"]).spec.name == KEYS_ON_M
    selection = kernels.select(refused, CATALOGUE["h100"])
    assert selection.spec.name == "hopper_decode"
    reason = f"not measured for {shape}, and unmeasured kernels are not allowed"
    assert dict(selection.refusals) == {KEYS_ON_M: (reason,)}


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 17}, {"max_query_tokens": 2}, {"head_dim": 256}, {"kv_dtype": "float8_e4m3fn"}],
    ids=str,
)
def test_what_the_row_with_keys_on_m_does_not_support_has_the_rows_after_it(changes):
    selection = kernels.select(
        dataclasses.replace(problem_of(CASES[0]), **changes), CATALOGUE["h100"]
    )

    assert selection.refusals[0].kernel == KEYS_ON_M
    assert selection.spec.name in ("hopper_decode", "portable_decode")
