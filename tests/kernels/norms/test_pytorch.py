"""RMS norm, rotary embedding and gated activation against their formulas."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.norms import pytorch
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than, truth_dtype

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 384), (3, 384), (40, 64), (2, 5, 4, 32), (0, 64)], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_rms_norm_agrees_with_its_formula(dtype, shape, grad):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)

    with torch.set_grad_enabled(grad):
        out = kernels.rms_norm(x, weight, 1e-5)

    assert out.dtype is dtype
    assert_no_worse_than(
        out,
        reference.rms_norm(x, weight, 1e-5, truth_dtype(dtype)),
        reference.rms_norm(x, weight, 1e-5, dtype),
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_of_a_row_is_as_exact_in_inference_as_in_training(scale):
    x, weight = (torch.randn(1, 384) * scale).bfloat16(), torch.randn(384).bfloat16()
    truth = reference.rms_norm(x, weight, 1e-6)

    with torch.no_grad():
        inference = kernels.rms_norm(x, weight, 1e-6)
    training = kernels.rms_norm(x, weight, 1e-6)

    assert_no_worse_than(inference, truth, training, factor=1.0, atol=1e-6)


def test_a_norm_with_float32_weights_keeps_the_dtype_of_its_input():
    x, weight = torch.randn(3, 64).bfloat16(), torch.rand(64) + 0.5

    out = kernels.rms_norm(x, weight, 1e-6)

    # A value halfway between two of bfloat16 may be rounded to either.
    torch.testing.assert_close(
        out, reference.rms_norm(x, weight, 1e-6).bfloat16(), rtol=2**-7, atol=0
    )


def test_layer_norm_agrees_with_its_formula():
    x, weight, bias = torch.randn(5, 64) + 2, torch.randn(64), torch.randn(64)

    out = pytorch.layer_norm(x, weight, bias, 1e-5)

    torch.testing.assert_close(out, reference.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_agree_with_their_formulas(function):
    x = torch.randn(5, 64) * 4
    first, second = x.chunk(2, -1)

    plain, gated = (pytorch.activate(x, function, gated=it) for it in (False, True))

    torch.testing.assert_close(plain, reference.activation(x, function))
    torch.testing.assert_close(gated, reference.activation(first, function) * second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_agrees_with_its_formula_and_is_smooth_at_0(dtype):
    x = torch.cat((torch.randn(3, 32) * 4, torch.tensor([0.0, -1e-30, 1e-30, -1e-7] * 8)[None]))
    parameters = torch.tensor([0.3, -1.2])
    positive = parameters[0].exp().log1p().double()
    negative = 0.5 + parameters[1].exp().log1p().double()
    truth = x.to(dtype).double()
    above = positive * truth**2 + 0.5 * truth
    below = (torch.expm1(truth) - truth) * negative + 0.5 * truth

    out = pytorch.xielu(x.to(dtype), parameters)

    assert out.dtype is dtype
    expected = torch.where(truth > 0, above, below)
    torch.testing.assert_close(out.double(), expected.to(dtype).double(), atol=1e-5, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_agrees_with_its_formula(dtype):
    x, angles = torch.randn(7, 5, 16).to(dtype), torch.rand(7, 8) * 100
    cos, sin = kernels.rope_tables(angles, dtype=dtype)

    out = kernels.apply_rope(x, cos, sin)

    assert cos.shape == sin.shape == (7, 1, 16)
    assert_no_worse_than(
        out,
        reference.apply_rope(x, angles, truth_dtype(dtype)),
        reference.apply_rope(x, angles, dtype) if dtype is torch.float32 else out.float() + 0.02,
    )


def test_rope_of_a_batch_equals_rope_of_each_sequence():
    x = torch.randn(2, 7, 5, 16)
    cos, sin = kernels.rope_tables(torch.rand(7, 8))

    out = kernels.apply_rope(x, cos, sin)

    assert torch.equal(out[1], kernels.apply_rope(x[1], cos, sin))


def test_rope_depends_only_on_the_distance():
    q, k = torch.randn(2, 1, 1, 16)
    frequencies = torch.rand(8)

    def score(query_position, key_position):
        rotated = [
            kernels.apply_rope(x, *kernels.rope_tables(position * frequencies[None]))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


def test_the_attention_factor_scales_both_tables():
    angles = torch.rand(3, 4)
    plain, scaled = kernels.rope_tables(angles), kernels.rope_tables(angles, scale=1.5)

    torch.testing.assert_close(scaled[0], plain[0] * 1.5)
    torch.testing.assert_close(scaled[1], plain[1] * 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (9, 130), (2, 3, 8)], ids=str)
def test_silu_and_mul_agrees_with_its_formula(dtype, shape):
    x = torch.randn(shape).to(dtype)

    out = kernels.silu_and_mul(x)

    assert out.shape == (*shape[:-1], shape[-1] // 2)
    assert_no_worse_than(
        out,
        reference.silu_and_mul(x, truth_dtype(dtype)),
        reference.silu_and_mul(x, dtype),
    )
