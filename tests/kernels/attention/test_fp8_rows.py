"""The CPU's rows over an FP8 cache, what the door refuses, and what the rounding costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.pytorch import rows as torch_rows
from kernels.attention.registry import REGISTRY
from kernels.fp8 import FP8
from kernels.testing import reference
from kernels.testing.problems import Layout, make_case

ROWS = [pytest.param(row, id=row.name) for row in REGISTRY if row.cpu]
PHASES = [pytest.param(phase, id=phase.value) for phase in Phase]
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def problem(phase, dtype="bfloat16", heads=6, kv_heads=2, head_dim=32, block_size=16, **more):
    more = {"kv_dtype": FP8} | more
    return AttentionProblem(
        phase, dtype, heads, kv_heads, head_dim, block_size, head_dim**-0.5, **more
    )


def queries(phase, *prefill):
    return [1] * len(prefill) if phase is Phase.DECODE else list(prefill)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_row_agrees_with_the_reference_over_poisoned_memory(row, layout, dtype):
    lengths = [1, 15, 16, 17, 33, 100, 1500]
    asked = problem(row.phase, dtype)
    case = make_case(asked, queries(row.phase, 1, 15, 2, 17, 1, 70, 130), lengths, layout=layout)

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("block_size", [1, 48])
@pytest.mark.parametrize("more", [{}, {"sliding_window": 20}, {"softcap": 3.0}], ids=str)
def test_windows_softcaps_and_block_sizes_agree_with_the_reference(row, block_size, more):
    asked = problem(row.phase, "float32", block_size=block_size, **more)
    case = make_case(asked, queries(row.phase, 40, 1, 5), [70, 45, 5], layout=Layout.FRAGMENTED)

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
def test_blocks_outside_the_window_are_never_read(row):
    case = make_case(problem(row.phase, sliding_window=20), queries(row.phase, 5), [200])
    for block in case.block_table[0][:10]:
        case.kv[:, block] = float("nan")
        case.kv_scale[:, block] = float("nan")

    out = case.run(row)

    assert torch.isfinite(out).all()
    case.check(out)


@pytest.mark.parametrize("row", ROWS)
def test_sequences_that_share_blocks_and_ones_without_tokens_agree_with_the_reference(row):
    case = make_case(problem(row.phase), queries(row.phase, 3, 2), [40, 40])
    table = case.batch.block_table.clone()
    table[1, 0] = table[0, 0]
    batch = dataclasses.replace(case.batch, block_table=table)
    tables = [case.block_table[0], [case.block_table[0][0], *case.block_table[1][1:]]]

    shared = dataclasses.replace(case, batch=batch, block_table=tables)

    shared.check(shared.run(row))


def test_rows_without_tokens_become_zero():
    case = make_case(problem(Phase.DECODE), [1, 1], [0, 0])

    assert torch.equal(case.run(), torch.zeros_like(case.q))


def test_a_step_of_many_sequences_is_dequantised_some_at_a_time(monkeypatch):
    copied = []

    class Noted(torch_rows.TorchDecode):
        def __call__(self, q, kv, out, lse=None, *, kv_scale=None):
            copied.append(kv.shape[1])
            super().__call__(q, kv, out, lse)

    monkeypatch.setattr(torch_rows, "TorchDecode", Noted)
    # Eight blocks of 16 tokens, 2 heads and 32 numbers; one sequence has more.
    monkeypatch.setattr(torch_rows, "COPIED_BYTES", 8 * 2 * 4 * 16 * 2 * 32)
    lengths = [50, 0, 33, 70, 200, 16, 16]
    case = make_case(problem(Phase.DECODE), [1] * 7, lengths, layout=Layout.FRAGMENTED)

    case.check(case.run())

    assert copied == [7, 5, 13, 2]


def test_sequences_that_lie_in_the_same_blocks_take_the_memory_of_those_that_do_not():
    # As in the steps before the first request, by which memory is measured.
    case = make_case(problem(Phase.DECODE), [1] * 3, [40, 40, 40])
    batch = dataclasses.replace(case.batch, block_table=torch.zeros((3, 3), dtype=torch.int32))

    kernel = torch_rows.make_decode(case.problem, batch)

    assert sum(len(part.blocks) for part in kernel._parts) == 9


def largest_error(case, keys, values):
    """Of attention over other keys and values, against that over the case's own."""
    rules = {"softmax_scale": case.problem.softmax_scale, "dtype": torch.float64}
    q = case.q[: case.query_lens[0]]
    exact = reference.attention(q, *case.keys_and_values(0), **rules)
    return float((reference.attention(q, keys, values, **rules) - exact).abs().max())


def paged(case, keys, values):
    """The case's cache with other keys and values of its only sequence."""
    kv = case.kv.clone()
    slots = torch.tensor(case.block_table[0])[:, None] * 16 + torch.arange(16)
    kv.flatten(1, 2)[:, slots.flatten()[: len(keys)]] = torch.stack((keys, values))
    return kv


def unquantised(**more):
    return make_case(
        problem(Phase.PREFILL, "float32", head_dim=64, kv_dtype=None, **more), [60], [200]
    )


def test_a_number_is_off_by_a_sixteenth_at_most_or_by_half_a_step_of_the_smallest():
    case = unquantised()
    rows = torch.cat(case.keys_and_values(0))
    numbers, scale = reference.quantize(rows)

    error = (reference.dequantize(numbers, scale) - rows).abs()

    # Three bits behind the leading one; below 2^-6 numbers are 2^-9 apart.
    allowed = torch.maximum(rows.abs() / 16, scale[..., None] * 2.0**-10)
    assert (error <= allowed * (1 + 1e-6)).all()


def test_attention_is_off_by_no_more_than_its_keys_and_values_are():
    case = unquantised()
    keys, values = case.keys_and_values(0)
    keys8, values8 = (reference.dequantize(*reference.quantize(x)) for x in (keys, values))
    heads = case.problem.group_size
    # A score is off by at most |q| . |key's error|; weights by a factor of its exponential at most, twice
    # since their sum is off too; the rest is what the values are off by.
    shift = torch.einsum(
        "mhd,nhd->hmn", case.q[:60].abs(), (keys8 - keys).abs().repeat_interleave(heads, 1)
    ).max()
    factor = float(torch.expm1(2 * shift * case.problem.softmax_scale))
    allowed = factor * float(values.abs().max()) + float((values8 - values).abs().max())

    assert largest_error(case, keys8, values8) <= allowed
    # The bound is that of the worst case: rounding errors of different keys mostly cancel.
    assert largest_error(case, keys8, values8) <= 0.1 * float(values.abs().max())


def test_a_scale_for_each_row_beats_one_for_all_where_some_rows_are_outliers():
    case = unquantised(heads=2)
    keys, values = (rows.clone() for rows in case.keys_and_values(0))
    # The last queries see the outlier, a key opposite to them, with a weight of nothing.
    keys[0] = -10 * case.q[59]
    # Numbers with all their bits span a factor of 2^15: a smaller outlier would cost the others none.
    values[0] *= 50_000
    case = dataclasses.replace(case, kv=paged(case, keys, values), q=case.q[59:], query_lens=[1])

    def one_scale(rows):
        scale = rows.abs().max() / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    by_row = (reference.dequantize(*reference.quantize(rows)) for rows in (keys, values))
    assert 2 * largest_error(case, *by_row) < largest_error(
        case, one_scale(keys), one_scale(values)
    )


def test_what_is_written_is_read_back():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, 40, 2, 32), generator=generator)
    kv = torch.full((2, 4, 16, 2, 32), float("nan")).to(torch.float8_e4m3fn)
    scale = torch.full((2, 4, 2, 16), float("nan"))
    slots = torch.randperm(64, generator=generator)[:40].to(torch.int32)

    kernels.write_kv(rows[0], rows[1], kv, slots, kv_scale=scale)

    read = reference.dequantize(kv, scale.transpose(2, 3)).flatten(1, 2)
    assert ((read[:, slots.long()] - rows).abs() <= rows.abs().amax(-1, keepdim=True) / 16).all()
    unwritten = torch.ones(64, dtype=torch.bool)
    unwritten[slots.long()] = False
    assert read[:, unwritten].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda case: {"kv_scale": None},
            "kv_scale is not given; the plan's cache is float8_e4m3fn",
        ),
        (lambda case: {"kv_scale": case.kv_scale.double()}, "expected [2, "),
        (lambda case: {"kv_scale": case.kv_scale.transpose(2, 3)}, "not contiguous; expected [2, "),
        (lambda case: {"kv_scale": case.kv_scale[:, 1:]}, "expected [2, "),
        (lambda case: {"kv": case.kv.float()}, "torch.float8_e4m3fn"),
    ],
)
def test_the_door_refuses_scales_that_are_not_those_of_the_cache(change, message):
    case = make_case(problem(Phase.DECODE), [1], [40])
    plan = kernels.plan_attention(case.problem, case.batch)
    arguments = {"kv": case.kv, "kv_scale": case.kv_scale} | change(case)
    kv, kv_scale = arguments["kv"], arguments["kv_scale"]

    with pytest.raises(kernels.ShapeError) as error:
        kernels.decode_attention(case.q, kv, plan, torch.empty_like(case.q), kv_scale=kv_scale)

    assert message in str(error.value)


def test_the_door_refuses_scales_for_a_cache_that_has_none():
    case = make_case(problem(Phase.PREFILL, kv_dtype=None), [3], [40])
    plan = kernels.plan_attention(case.problem, case.batch)
    out, scale = torch.empty_like(case.q), torch.ones(())

    with pytest.raises(
        kernels.ShapeError, match="kv_scale is given; the plan's cache is not quant"
    ):
        kernels.prefill_attention(case.q, case.kv, plan, out, kv_scale=scale)


@pytest.mark.parametrize(
    ("dtype", "scale", "message"),
    [
        (torch.float8_e4m3fn, None, "kv_scale is not given; the cache is torch.float8_e4m3fn"),
        (torch.float32, torch.ones((2, 3, 2, 16)), "kv_scale is given; the cache is torch.float32"),
        (torch.float8_e4m3fn, torch.ones((2, 3, 16, 2)), "expected [2, 3, 2, 16] torch.float32"),
        (torch.float8_e5m2, None, "kv torch.float8_e4m3fn"),
    ],
)
def test_writing_refuses_scales_that_are_not_those_of_the_cache(dtype, scale, message):
    rows = torch.zeros((2, 2, 32))
    kv = torch.zeros((2, 3, 16, 2, 32)).to(dtype)

    with pytest.raises(kernels.ShapeError) as error:
        kernels.write_kv(rows, rows, kv, torch.zeros(2, dtype=torch.int32), kv_scale=scale)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'; it must be None or one of float8_e4m3fn"),
        ({"block_size": None}, "packed keys and values have no scales"),
    ],
)
def test_a_problem_with_a_cache_that_cannot_be_is_refused(changes, message):
    with pytest.raises(kernels.ShapeError) as error:
        problem(Phase.PREFILL, **changes)

    assert message in str(error.value)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("arch", "dtype", "kernel", "reason"),
    [
        ("h100", "bfloat16", "portable", None),
        ("l4", "float16", "portable", None),
        ("a100", "bfloat16", "torch", "this is sm_80 (older GPUs have no instruction"),
        ("h100", "float32", "torch", "no float32 queries over a float8_e4m3fn cache"),
    ],
)
def test_a_gpu_takes_our_kernels_where_it_converts_float8_itself(
    phase, arch, dtype, kernel, reason
):
    selection = kernels.select(problem(phase, dtype, head_dim=64), CATALOGUE[arch])

    refused = {refusal.kernel: "; ".join(refusal.reasons) for refusal in selection.refusals}
    assert selection.spec.name == f"{kernel}_{phase.value}"
    assert reason is None or reason in refused[f"portable_{phase.value}"]
    if arch == "h100" and phase is Phase.PREFILL:
        assert "no float8_e4m3fn cache" in refused["hopper_prefill"]
