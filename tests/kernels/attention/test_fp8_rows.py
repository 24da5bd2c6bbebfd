"""The CPU rows over an FP8 cache, the checks of scales, and the error of FP8 rounding."""

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
from tests.kernels.references import reference
from tests.kernels.references.problems import Layout, make_case

ROWS = [pytest.param(row, id=row.name) for row in REGISTRY if row.cpu and row.quantized]
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


def test_a_step_of_many_sequences_is_dequantized_in_parts(monkeypatch):
    copied = []

    class Noted(torch_rows.TorchDecode):
        def __call__(self, q, kv, out, lse=None, *, kv_scale=None):
            copied.append(kv.shape[1])
            super().__call__(q, kv, out, lse)

    monkeypatch.setattr(torch_rows, "TorchDecode", Noted)
    # The limit is eight blocks of 16 tokens, 2 heads and 32 elements; one sequence has more.
    monkeypatch.setattr(torch_rows, "COPIED_BYTES", 8 * 2 * 4 * 16 * 2 * 32)
    lengths = [50, 0, 33, 70, 200, 16, 16]
    case = make_case(problem(Phase.DECODE), [1] * 7, lengths, layout=Layout.FRAGMENTED)

    case.check(case.run())

    assert copied == [7, 5, 13, 2]


def test_sequences_that_share_blocks_need_as_much_memory_as_those_that_do_not():
    # The dummy steps that measure memory at startup put all sequences into the same blocks.
    case = make_case(problem(Phase.DECODE), [1] * 3, [40, 40, 40])
    batch = dataclasses.replace(case.batch, block_table=torch.zeros((3, 3), dtype=torch.int32))

    kernel = torch_rows.make_decode(case.problem, batch)

    assert sum(len(part.blocks) for part in kernel._parts) == 9


def largest_error(case, keys, values):
    """Return the largest error of attention over other keys and values, relative to the case's own."""
    rules = {"softmax_scale": case.problem.softmax_scale, "dtype": torch.float64}
    q = case.q[: case.query_lens[0]]
    exact = reference.attention(q, *case.keys_and_values(0), **rules)
    return float((reference.attention(q, keys, values, **rules) - exact).abs().max())


def paged(case, keys, values):
    """Return the case's cache with other keys and values for its only sequence."""
    kv = case.kv.clone()
    slots = torch.tensor(case.block_table[0])[:, None] * 16 + torch.arange(16)
    kv.flatten(1, 2)[:, slots.flatten()[: len(keys)]] = torch.stack((keys, values))
    return kv


def unquantized(**more):
    return make_case(
        problem(Phase.PREFILL, "float32", head_dim=64, kv_dtype=None, **more), [60], [200]
    )


def test_the_rounding_error_of_a_number_is_at_most_a_sixteenth_or_half_the_smallest_step():
    case = unquantized()
    rows = torch.cat(case.keys_and_values(0))
    numbers, scale = reference.quantize_kv(rows)

    error = (reference.dequantize(numbers, scale) - rows).abs()

    # e4m3 has three mantissa bits; below 2^-6 its numbers are 2^-9 apart.
    allowed = torch.maximum(rows.abs() / 16, scale[..., None] * 2.0**-10)
    assert (error <= allowed * (1 + 1e-6)).all()


def test_the_errors_of_keys_and_values_bound_the_error_of_attention():
    case = unquantized()
    keys, values = case.keys_and_values(0)
    keys8, values8 = (reference.dequantize(*reference.quantize_kv(x)) for x in (keys, values))
    heads = case.problem.group_size
    # The error of a score is at most |q| . |key's error|. A weight changes by at most the exponential of twice that,
    # since the sum of weights changes too. The errors of the values are added.
    shift = torch.einsum(
        "mhd,nhd->hmn", case.q[:60].abs(), (keys8 - keys).abs().repeat_interleave(heads, 1)
    ).max()
    factor = float(torch.expm1(2 * shift * case.problem.softmax_scale))
    allowed = factor * float(values.abs().max()) + float((values8 - values).abs().max())

    assert largest_error(case, keys8, values8) <= allowed
    # The bound is the worst case: rounding errors of different keys mostly cancel.
    assert largest_error(case, keys8, values8) <= 0.1 * float(values.abs().max())


def test_a_scale_per_row_is_more_exact_than_one_per_tensor_if_some_rows_are_outliers():
    case = unquantized(heads=2)
    keys, values = (rows.clone() for rows in case.keys_and_values(0))
    # The outlier key points opposite to the last query, so its weight is almost zero.
    keys[0] = -10 * case.q[59]
    # e4m3 has full precision over a factor of 2^15: a smaller outlier would not make the other rows less exact.
    values[0] *= 50_000
    case = dataclasses.replace(case, kv=paged(case, keys, values), q=case.q[59:], query_lens=[1])

    def one_scale(rows):
        scale = rows.abs().max() / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    by_row = (reference.dequantize(*reference.quantize_kv(rows)) for rows in (keys, values))
    assert 2 * largest_error(case, *by_row) < largest_error(
        case, one_scale(keys), one_scale(values)
    )


def test_written_rows_are_read_back():
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
def test_decode_rejects_scales_that_do_not_fit_the_cache(change, message):
    case = make_case(problem(Phase.DECODE), [1], [40])
    plan = kernels.plan_attention(case.problem, case.batch)
    arguments = {"kv": case.kv, "kv_scale": case.kv_scale} | change(case)
    kv, kv_scale = arguments["kv"], arguments["kv_scale"]

    with pytest.raises(kernels.ShapeError) as error:
        kernels.decode_attention(case.q, kv, plan, torch.empty_like(case.q), kv_scale=kv_scale)

    assert message in str(error.value)


def test_prefill_rejects_scales_for_an_unquantized_cache():
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
def test_writing_rejects_scales_that_do_not_fit_the_cache(dtype, scale, message):
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
def test_a_problem_with_an_unsupported_cache_is_rejected(changes, message):
    with pytest.raises(kernels.ShapeError) as error:
        problem(Phase.PREFILL, **changes)

    assert message in str(error.value)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("arch", "dtype", "kernel", "reason"),
    [
        ("l4", "float16", "portable", None),
        ("a100", "bfloat16", "torch", "this is sm_80 (older GPUs have no instruction"),
        ("h100", "float32", "torch", "no float32 queries over a float8_e4m3fn cache"),
    ],
)
def test_a_gpu_with_float8_conversion_instructions_uses_our_kernels(
    phase, arch, dtype, kernel, reason
):
    selection = kernels.select(problem(phase, dtype, head_dim=64), CATALOGUE[arch])

    refused = {refusal.kernel: "; ".join(refusal.reasons) for refusal in selection.refusals}
    assert selection.spec.name == f"{kernel}_{phase.value}"
    assert reason is None or reason in refused[f"portable_{phase.value}"]


def test_hopper_decodes_over_it_with_a_portable_kernel():
    selection = kernels.select(problem(Phase.DECODE, "bfloat16", head_dim=64), CATALOGUE["h100"])

    refused = {refusal.kernel: "; ".join(refusal.reasons) for refusal in selection.refusals}
    assert selection.spec.name == "portable_decode"
    assert "no float8_e4m3fn cache" in refused["hopper_decode"]
