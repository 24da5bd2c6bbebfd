import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.linear.cpu.packed import PackedLinear, fits_half, unsupported
from kernels.linear.problem import LinearProblem
from kernels.linear.pytorch import PyTorchLinear
from kernels.linear.registry import PACKED
from kernels.weight_format import FP8_ROWS
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references.problems import assert_no_worse_than

PROBLEM = LinearProblem(1, 40, 48)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bfloat16_weight(*shape):
    return (random(*shape) * 0.02).bfloat16().float()


WEIGHTS = {
    "float32": random(40, 48) * 0.02,
    "float32 that float16 holds": bfloat16_weight(40, 48),
    "bfloat16": (random(40, 48) * 0.02).bfloat16(),
}
PACKABLE = {
    name: w for name, w in WEIGHTS.items() if not unsupported(str(w.dtype).removeprefix("torch."))
}


@pytest.mark.skipif(not PACKABLE, reason="only processors with x86 instructions pack weights")
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_a_dtype_is_packed_where_the_processor_has_the_instructions(weight):
    try:
        PackedLinear(linear_weights(weight), PROBLEM)
    except RuntimeError as error:  # bfloat16 needs AVX-512
        assert "needs the cpu support" in str(error)  # noqa: PT017  # raised on some processors only
        packs = False
    else:
        packs = True

    assert bool(unsupported(str(weight.dtype).removeprefix("torch."))) != packs


@pytest.mark.parametrize("weight", PACKABLE.values(), ids=PACKABLE.keys())
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [(1,), (2,), (8,), (33,), (2, 5)], ids=str)
def test_a_packed_weight_multiplies_like_a_plain_one(weight, with_bias, rows):
    x = random(*rows, 48).to(weight.dtype)
    bias = random(40, seed=1).to(weight.dtype) if with_bias else None

    with torch.inference_mode():
        weights = linear_weights(weight, bias)
        plain, packed = PyTorchLinear(weights, PROBLEM)(x), PackedLinear(weights, PROBLEM)(x)

    tolerance = 2e-6 if weight.dtype is torch.float32 else 2**-8
    assert packed.shape == plain.shape
    assert packed.dtype == plain.dtype
    assert (packed - plain).abs().max() <= tolerance * plain.abs().max()


def test_other_rows_change_a_row_by_rounding_at_most():
    weight = bfloat16_weight(640, 384)
    x, multiply = random(40, 384), PackedLinear(linear_weights(weight), PROBLEM)
    truth, plain = x.double() @ weight.double().T, x @ weight.T

    with torch.inference_mode():
        for count in (1, 2, 3, 7, 8, 16, 40):
            assert_no_worse_than(multiply(x[:count]), truth[:count], plain[:count], atol=0)


@pytest.mark.parametrize("engine", torch.backends.quantized.supported_engines)
def test_weights_of_a_bfloat16_checkpoint_fit_float16_where_fbgemm_multiplies(monkeypatch, engine):
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)

    assert fits_half(bfloat16_weight(256, 256)) == (engine in ("x86", "fbgemm"))


@pytest.mark.parametrize(
    "weight",
    [
        random(64, 64),
        torch.full((4, 4), 1e6),
        torch.full((4, 4), 1e-7),
        torch.full((4, 4), torch.nan),
    ],
    ids=["too many digits", "too large", "too small", "not a number"],
)
def test_weights_that_float16_would_change_do_not_fit(weight):
    assert not fits_half(weight)


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({"dtype": "float16"}, CPU, "no float16"),
        ({"dtype": "float32"}, CATALOGUE["h100"], "needs a CPU"),
        ({"dtype": "float32", "trainable": True}, CPU, "not differentiable"),
        ({"dtype": "float32", "format": FP8_ROWS}, CPU, "weights are quantized"),
    ],
)
def test_only_float32_and_bfloat16_on_a_cpu_are_packed(changes, arch, reason):
    assert reason in PACKED.unsupported(dataclasses.replace(PROBLEM, **changes), arch)


def test_weights_are_not_packed_on_processors_other_than_x86(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")

    assert unsupported("float32") == ("packed on x86-64 only",)
