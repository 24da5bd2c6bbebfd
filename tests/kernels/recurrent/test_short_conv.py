"""The causal convolution and the gated short convolution in PyTorch's operations against their formulas."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent.problem import RecurrentWeights, ShortConvShape
from kernels.recurrent.pytorch.convolution import causal_conv, dense_conv
from kernels.recurrent.pytorch.short_conv import ShortConv
from tests.kernels.recurrent.cases import (
    NEW,
    RAGGED,
    ROWS,
    SHORT_CONV,
    Sequence,
    Step,
    check_divided,
    check_kept_blocks,
    check_nothing_written,
    make_weights,
)
from tests.kernels.references.mamba2 import convolve
from tests.kernels.references.problems import assert_no_worse_than


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [SHORT_CONV, ShortConvShape(20, 4, bias=True), ShortConvShape(7, 2)], ids=str
)
def test_the_sequences_of_a_step_agree_with_the_formula(shape, dtype):
    Step(shape, ROWS, RAGGED, dtype).check(ShortConv)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_prompt_may_be_shorter_than_the_convolution(length):
    shape = ShortConvShape(16, 6)
    Step(shape, prompts=[Sequence(length, 0, NEW, 2), Sequence(length, 9, 3, 3)]).check(ShortConv)


def test_unused_rows_and_steps_of_nothing_write_nothing():
    check_nothing_written(ShortConv, SHORT_CONV)


@pytest.mark.parametrize("ends", [(1, 2, 40), (17, 18, 20, 39, 40), (39, 40)], ids=str)
@pytest.mark.parametrize("channels", [5, 48, 1000])
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(channels, ends):
    check_divided(ShortConv, ShortConvShape(channels, 4, bias=True), ends)


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66), (63, 2)])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(start, length):
    check_kept_blocks(ShortConv, SHORT_CONV, start, length)


def test_a_decode_row_has_the_bits_of_the_same_token_in_a_prompt():
    whole = Step(ShortConvShape(37, 4), prompts=[Sequence(40, 0, NEW, 0)])
    x, _, _ = whole.projected.chunk(3, -1)
    conv = {"weight": whole.weights.conv, "bias": None, "silu": True}
    states = whole.states[0].clone()
    expected = causal_conv(x, state=states, segments=whole.segments, **conv)

    step = Step(whole.shape, [(NEW, 2), (NEW, 3), (NEW, 4)])
    for t in range(40):
        found = causal_conv(x[[t] * 3], state=states, segments=step.segments, **conv)
        assert torch.equal(found, expected[[t] * 3])
        step = Step(whole.shape, [(i, i) for i in (2, 3, 4)])
    assert torch.equal(states[2:5], states[[0] * 3])


@pytest.mark.parametrize("silu", [True, False])
def test_whole_sequences_are_convolved_from_zeros(silu):
    weights = make_weights(ShortConvShape(24, 4, bias=True))
    x = torch.randn(2, 9, 24)

    found = dense_conv(x, weights.conv, weights.conv_bias, silu=silu)

    for row, out in zip(x, found, strict=True):
        exact, same = (
            convolve(row.to(dtype), weights, torch.zeros(3, 24))[0]
            for dtype in (torch.float64, torch.float32)
        )
        if silu:
            exact, same = (torch.nn.functional.silu(it) for it in (exact, same))
        assert_no_worse_than(out, exact, same)


def test_whole_sequences_can_be_trained():
    shape = ShortConvShape(4, 3, bias=True)
    weights = make_weights(shape, torch.float64)
    leaves = [weights.conv.requires_grad_(), weights.conv_bias.requires_grad_()]
    projected = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)

    def compute(projected, conv, bias):
        return ShortConv(shape, RecurrentWeights(conv, bias)).dense(projected)

    assert compute(projected, *leaves).shape == (2, 5, 4)
    # Float32 within: the differences are coarse.
    assert torch.autograd.gradcheck(
        compute, (projected, *leaves), eps=1e-2, atol=1e-3, rtol=1e-3, nondet_tol=1e-6
    )
