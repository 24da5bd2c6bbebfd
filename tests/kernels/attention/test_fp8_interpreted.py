"""Attention over an FP8 cache in Triton's interpreter, against the reference on the dequantized cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from kernels.fp8 import FP8
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_portable_interpreted import (
    PHASES,
    SMALL_GPU,
    check,
    problem,
    queries,
    select,
)
from tests.kernels.references.problems import Layout, make_case

pytestmark = triton_interpreter.interpreted


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


def fp8_problem(phase, dtype="bfloat16", **more):
    return problem(phase, dtype, kv_dtype=FP8, **more)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_lengths_around_block_boundaries_agree_with_the_reference(phase, block_size):
    lengths = [max(block_size - 1, 1), block_size, block_size + 1, 1, 2 * block_size + 1]
    asked = fp8_problem(phase, block_size=block_size, kv_heads=1, heads=3)
    case = make_case(asked, queries(phase, 1, 1, 2, 1, 3), lengths, layout=Layout.FRAGMENTED)

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dim_and_dtype_agrees_with_the_reference(phase, head_dim, dtype):
    asked = fp8_problem(phase, dtype, heads=4, kv_heads=2, head_dim=head_dim)
    case = make_case(asked, queries(phase, 5, 33), [37, 33], layout=Layout.TWO_RUNS)

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (14, 2), (8, 1)])
def test_every_group_size_agrees_with_the_reference(phase, heads, kv_heads):
    asked = fp8_problem(phase, heads=heads, kv_heads=kv_heads)

    check(make_case(asked, queries(phase, 20, 1, 5), [33, 50, 71]))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": 17},
        {"sliding_window": 1},
        {"softcap": 2.0, "softmax_scale": 0.7},
        {"sliding_window": 40, "softcap": 3.0, "lse": True},
    ],
    ids=str,
)
def test_windows_softcaps_and_the_log_sum_exp_agree_with_the_reference(phase, more):
    asked = fp8_problem(phase, **more)

    check(make_case(asked, queries(phase, 1, 40, 20), [16, 100, 90], layout=Layout.FRAGMENTED))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("one_loop", [False, True], ids=["three loops", "one loop"])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_kind_of_tile_agrees_with_the_reference(phase, one_loop, block_n):
    case = make_case(fp8_problem(phase, sliding_window=50), queries(phase, 70, 15), [130, 15])

    check(case, block_m=16, block_n=block_n, one_loop=one_loop)


@pytest.mark.parametrize("num_sms", [1, 200])
def test_a_decode_agrees_with_the_reference_for_any_number_of_splits(num_sms):
    case = make_case(fp8_problem(Phase.DECODE, lse=True), [1] * 4, [500, 3, 0, 129])

    check(case, arch=dataclasses.replace(SMALL_GPU, num_sms=num_sms))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_several_queries_per_decoded_sequence_agree_with_the_reference(group):
    asked = fp8_problem(
        Phase.DECODE, heads=group, kv_heads=1, max_query_tokens=4, sliding_window=20
    )

    check(make_case(asked, [1, 4, 0, 3, 2], [5, 33, 20, 190, 17], layout=Layout.FRAGMENTED))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4])
@pytest.mark.parametrize("phase", PHASES)
def test_values_of_any_size_agree_with_the_reference(phase, size):
    case = make_case(fp8_problem(phase), queries(phase, 5, 20), [200, 70])
    case.kv_scale[1] *= size
    out, _ = case.attend(select(phase))
    truth, plain = case.expected(torch.float64), case.expected(out.dtype)

    error, allowed = (float((x.double() - truth).abs().max()) for x in (out, plain))
    assert error <= 2 * allowed
    assert error <= 0.02 * float(truth.abs().max())


def test_many_small_weights_beside_one_large_weight_are_accurate():
    # Like the first token of a sequence in many models: its weight is large, its value almost zero.
    case = make_case(fp8_problem(Phase.DECODE, heads=1, kv_heads=1, softmax_scale=1.0), [1], [3000])
    first = case.block_table[0][0]
    case.q[:] = 1.0
    # Scores are 14 for the first key and 0 for the others; e^14 is 400 times the number of the others.
    case.kv[0] = 0.0
    case.kv[0, first, 0] = 14 / 64
    case.kv_scale[0] = 1.0
    case.kv[1, first, 0] = 0.0
    expected = case.expected(torch.float64)

    out = check(case)

    assert float((out.double() - expected).norm() / expected.norm()) < 0.005


@pytest.mark.parametrize("phase", PHASES)
def test_keys_values_and_scales_outside_the_window_are_never_read(phase):
    case = make_case(fp8_problem(phase, sliding_window=20), queries(phase, 5), [200])
    for block in case.block_table[0][:10]:
        case.kv[:, block] = float("nan")
        case.kv_scale[:, block] = float("nan")

    assert torch.isfinite(check(case)).all()


def test_queries_past_the_range_of_float16_give_finite_outputs():
    case = make_case(fp8_problem(Phase.DECODE), [1, 1], [40, 90])
    case.q[:, :, 0] = 1e30

    out, _ = case.attend(select(Phase.DECODE))

    assert torch.isfinite(out).all()


def test_decode_reads_the_rows_that_the_scatter_kernel_wrote():
    from kernels.attention.portable.write_kv import write_kv

    case = make_case(fp8_problem(Phase.DECODE), [1], [60])
    rows = torch.randn((2, 60, 2, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = torch.tensor(case.block_table[0], dtype=torch.int32)
    slots = (blocks[:, None] * 16 + torch.arange(16, dtype=torch.int32)).view(-1)[:60].contiguous()
    write_kv(rows[0], rows[1], case.kv, slots, case.kv_scale)

    plan = kernels.plan_attention(case.problem, case.batch, selection=select(Phase.DECODE))
    out = torch.empty_like(case.q)
    kernels.decode_attention(case.q, case.kv, plan, out, kv_scale=case.kv_scale)

    case.check(out)
