"""The host side of the Hopper prefill: its checks, and the arguments that it passes to the kernel."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.errors import ShapeError
from tests.kernels import triton_interpreter
from tests.kernels.references.problems import make_case, make_packed_case
from tests.kernels.triton_interpreter import HAS_TRITON, interpreted

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")


@pytest.fixture
def hopper():
    from kernels.attention.hopper import prefill as hopper_prefill

    return hopper_prefill


def aligned(*shape, first=0):
    """Return an uninitialized bfloat16 tensor that begins `first` elements after a multiple of 64 bytes."""
    memory = torch.empty(math.prod(shape) + first + 32, dtype=torch.bfloat16)
    first += -memory.data_ptr() % 64 // 2
    return memory[first : first + math.prod(shape)].view(shape)


def strides(hopper, tensor):
    return hopper.bulk_strides("q", tensor, tensor.stride()[:2])


def test_aligned_tensors_are_addressed_by_their_strides(hopper):
    wide = aligned(10, 12, 64)

    assert strides(hopper, wide) == (768, 64)
    assert strides(hopper, wide[:, 4:8]) == (768, 64)


def test_an_address_that_is_no_multiple_of_16_bytes_is_rejected(hopper):
    with pytest.raises(ShapeError, match=r"q is at address 0x\w+ .* multiples of 16 bytes"):
        strides(hopper, aligned(10, 8, 64, first=4))


def odd_tokens():
    return aligned(10, 8 * 64 + 4)[:, : 8 * 64].unflatten(1, (8, 64))


def test_a_stride_that_is_no_multiple_of_16_bytes_is_rejected(hopper):
    for odd in (odd_tokens(), aligned(10, 8, 68)[..., :64]):
        with pytest.raises(ShapeError, match="strides"):
            strides(hopper, odd)


def test_the_stride_of_a_single_token_or_head_does_not_matter(hopper):
    assert strides(hopper, odd_tokens()[:1]) == (512, 64)
    assert strides(hopper, aligned(10, 8, 64)[:, :1]) == (512, 64)
    assert strides(hopper, aligned(1, 1, 64)) == (64, 64)


def problem(block_size=16, **more):
    return AttentionProblem(Phase.PREFILL, "bfloat16", 8, 2, 64, block_size, 0.125, **more)


@pytest.mark.parametrize("score", [-300.0, -3.0, 0.0, 0.5, 40.0, 5000.0])
def test_the_softcap_is_computed_with_one_exponential(hopper, score):
    scale, softcap = hopper.exponents(problem(softcap=15.0))

    capped = softcap - 2.0 * softcap / (float(torch.tensor(score * scale).exp2()) + 1.0)

    assert capped * math.log(2) == pytest.approx(15.0 * math.tanh(score * 0.125 / 15.0), abs=1e-5)


def test_without_a_softcap_scores_are_scaled_to_units_of_log2(hopper):
    scale, softcap = hopper.exponents(problem())

    assert (2**scale, softcap) == (pytest.approx(math.exp(0.125)), 0.0)


@interpreted
def test_a_misaligned_tensor_is_rejected_before_a_launch(hopper):
    case = make_case(problem(), [20, 3], [40, 300])
    row = next(row for row in REGISTRY if row.name == "hopper_prefill")
    selection = kernels.select(problem(), CATALOGUE["h100"], registry=(row,))
    plan = kernels.plan_attention(problem(), case.batch, selection=selection)
    odd = aligned(*case.q.shape, first=1)
    out = torch.full_like(case.q, 7.0)

    with pytest.raises(ShapeError, match="q is at address"):
        kernels.prefill_attention(odd, case.kv, plan, out)

    assert bool((out == 7.0).all())


@interpreted
def test_a_step_with_no_query_or_no_key_launches_nothing(hopper):
    row = next(row for row in REGISTRY if row.name == "hopper_prefill")
    asked = problem(block_size=None, lse=True)
    selection = kernels.select(asked, CATALOGUE["h100"], registry=(row,))
    for queries, keys in (([20, 3], [0, 0]), ([0], [5])):
        case = make_packed_case(asked, queries, keys)

        out, lse = case.attend(selection)

        assert out.shape[0] == sum(queries)
        assert not bool(out.any())
        assert bool((lse == float("-inf")).all())


ROLES = [
    ("bfloat16", 8, 2, 64, 16, {}),
    ("float16", 7, 1, 128, 32, {"sliding_window": 70, "lse": True}),
    ("bfloat16", 2, 1, 256, 64, {"softcap": 15.0}),
    ("bfloat16", 6, 3, 80, 16, {"sliding_window": 1}),
    ("bfloat16", 24, 1, 64, 16, {"lse": True}),
    ("float16", 4, 4, 48, None, {"causal": False, "lse": True}),
    ("bfloat16", 3, 1, 128, None, {}),
    ("bfloat16", 10, 2, 192, 256, {"softcap": 15.0, "sliding_window": 130, "lse": True}),
]


@interpreted
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("shape", ROLES, ids=str)
def test_the_roles_compute_attention(hopper, monkeypatch, shape, consumers):
    from tests.kernels.attention.hopper_roles_on_cpu import KernelOnCPU

    dtype, heads, kv_heads, head_dim, block_size, features = shape
    asked = AttentionProblem(
        Phase.PREFILL, dtype, heads, kv_heads, head_dim, block_size, head_dim**-0.5, **features
    )
    row = next(row for row in REGISTRY if row.name == "hopper_prefill")
    arch = dataclasses.replace(CATALOGUE["h100"], num_sms=2)
    selection = kernels.select(asked, arch, registry=(row,))
    launch = dataclasses.replace(
        selection.launches[-1].launch, block_m=64 * consumers, block_n=16, num_stages=2
    )
    tuned = dataclasses.replace(selection.launches[-1], launch=launch, max_seqlen_k=None)
    selection = dataclasses.replace(selection, launches=(tuned,))
    make = make_case if block_size else make_packed_case
    case = make(asked, [20, 90, 1, 0, 33, 70], [100, 90, 200, 5, 64, 71])
    monkeypatch.setattr(hopper, "prefill", KernelOnCPU(hopper.prefill))
    with triton_interpreter.poisoned_memory():
        out, lse = case.attend(selection)

    case.check(out)
    if asked.lse:
        case.check_lse(lse)
