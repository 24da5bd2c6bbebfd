"""The arithmetic of the Blackwell prefill, which no GPU has run: a model of its tiles against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.attention.problem import AttentionProblem, Phase
from tests.kernels.references.problems import Layout, make_case, make_packed_case
from tests.kernels.triton_interpreter import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

MOST_RELATIVE_ERROR = 1.1e-4
"""Of the polynomial. A float16 has 4.9e-4 from one number to the next, a bfloat16 3.9e-3 or more."""


@pytest.fixture
def model():
    from tests.kernels.attention import blackwell_model

    return blackwell_model


def arguments(lowest, highest, steps=400_001):
    return torch.linspace(lowest, highest, steps, dtype=torch.float64).float()


def ulps(a, b):
    """Return by how many numbers of their 16-bit dtype two positive tensors differ."""
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


def test_the_polynomial_has_the_stated_relative_error(model):
    x = arguments(-125.5, 8.0)
    exact = x.double().exp2()

    error = (model.polynomial_exp2(x).double() - exact).abs() / exact

    assert float(error.max()) <= MOST_RELATIVE_ERROR


def test_the_polynomial_has_a_small_absolute_error_from_its_lowest_argument_on(model):
    x = arguments(-127.0, 0.0)

    error = (model.polynomial_exp2(x).double() - x.double().exp2()).abs()

    assert float(error.max()) <= MOST_RELATIVE_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_polynomial_differs_from_a_rounded_exponential_by_at_most_one_number(
    model, dtype
):
    x = arguments(-14.0, 8.0)

    difference = ulps(model.polynomial_exp2(x).to(dtype), x.double().exp2().to(dtype))

    assert int(difference.max()) <= 1
    # The shares are the error as a part of the distance between two numbers.
    assert float((difference > 0).double().mean()) < (0.02 if dtype is torch.bfloat16 else 0.15)


def test_the_polynomial_is_exact_for_integers_and_0_for_masked_scores(model):
    x = torch.arange(-126.0, 9.0)

    assert torch.equal(model.polynomial_exp2(x), x.exp2())
    assert torch.equal(
        model.polynomial_exp2(torch.tensor([-127.0, -200.0, -math.inf])), torch.zeros(3)
    )


def test_the_polynomial_of_a_nan_is_no_weight(model):
    weight = float(model.polynomial_exp2(torch.tensor([math.nan])))

    assert math.isnan(weight) or weight > 1e30


def test_a_maximum_that_grows_by_at_most_the_lag_is_kept(model):
    m = torch.tensor([0.0, 0.0, -math.inf, -math.inf, 3.0])
    largest = torch.tensor([model.LAG, model.LAG + 0.1, 2.0, -math.inf, -50.0])

    new = model.lagging_maximum(m, largest)

    assert new.tolist() == [0.0, pytest.approx(model.LAG + 0.1), 2.0, -math.inf, 3.0]


def problem(dtype="bfloat16", heads=(8, 2), head_dim=64, block_size=16, **more):
    fields = {"softmax_scale": head_dim**-0.5, "lse": True, **more}
    return AttentionProblem(Phase.PREFILL, dtype, *heads, head_dim, block_size, **fields)


def check(model, case):
    out, lse, sequences = model.attend(case)

    case.check(out)
    case.check_lse(lse)
    return sequences


LENGTHS = [150, 1, 20], [300, 129, 20]
PROBLEMS = {
    "causal": {},
    "float16": {"dtype": "float16"},
    "head dim 128": {"head_dim": 128, "heads": (4, 2)},
    "blocks of 64": {"block_size": 64},
    "blocks of 256": {"block_size": 256},
    "window": {"sliding_window": 40},
    "window of 1": {"sliding_window": 1},
    "window over tiles": {"sliding_window": 200},
    "softcap": {"softcap": 2.0},
    "window and softcap in float16": {"sliding_window": 70, "softcap": 5.0, "dtype": "float16"},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "sliding_window": 60},
    "packed": {"block_size": None},
    "packed, not causal": {"block_size": None, "causal": False},
}


@pytest.mark.parametrize("more", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_the_tile_algorithm_is_as_exact_as_pytorch_in_the_same_precision(model, more):
    asked = problem(**more)
    if asked.block_size is None:
        case = make_packed_case(asked, *LENGTHS)
    else:
        case = make_case(asked, *LENGTHS, layout=Layout.FRAGMENTED)

    check(model, case)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 6, 7, 8, 16])
def test_every_group_of_query_heads_is_computed(model, group):
    check(model, make_case(problem(heads=(2 * group, 2)), [70, 3], [200, 3]))


@pytest.mark.parametrize("keys", [127, 128, 129, 255, 256, 257])
def test_tiles_end_at_any_key(model, keys):
    check(model, make_case(problem(heads=(2, 1)), [keys, 1], [keys, keys]))


def test_rows_that_see_no_key_are_0(model):
    case = make_packed_case(problem(block_size=None), [40, 5], [10, 0])
    out, lse, _ = model.attend(case)

    seen = lse > -math.inf
    assert bool((out[~seen] == 0.0).all())
    assert seen.sum(0).tolist() == [10] * 8
    case.check(out)


def growing(asked, step):
    """Return a case whose later tiles have lower scores: those of the first visited tile are 0, `step` more each."""
    case = make_case(asked, [16], [512])
    size = asked.block_size
    case.q.zero_()
    case.q[..., 0] = 1.0
    scale = asked.softmax_scale * math.log2(math.e)
    for key in range(512):
        tile_from_last = (511 - key) // 128
        block = case.block_table[0][key // size]
        case.kv[0, block, key % size] = 0.0
        case.kv[0, block, key % size, :, 0] = tile_from_last * step / scale
    return case


def test_the_output_is_rescaled_only_when_a_maximum_grows_by_more_than_the_lag(model):
    asked = problem("float16", heads=(1, 1))

    (few,) = check(model, growing(asked, 2.0))
    (two,) = check(model, growing(asked, 5.0))
    (each,) = check(model, growing(asked, 9.0))

    assert (few.rescaled, two.rescaled, each.rescaled) == (0, 1, 3)


def test_weights_stay_below_the_lag(model):
    case = growing(problem("float16", heads=(1, 1)), 2.6)

    (seq,) = check(model, case)

    assert seq.rescaled == 0
    assert 2.0**7 < seq.largest_weight <= 2.0**model.LAG


@pytest.mark.parametrize("size", [4.0, 12.0])
def test_large_scores_are_as_exact_as_in_pytorch(model, size):
    case = make_case(problem(heads=(4, 2)), [64], [400])
    case.q.mul_(size)

    (seq,) = check(model, case)

    assert seq.largest_weight > 1.0
