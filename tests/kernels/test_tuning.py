"""The tables of launch configurations are complete, within limits, and used for the right architecture."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from kernels.arch import CATALOGUE, TENSOR_CORES
from kernels.attention import tuned as tuning
from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import DTYPES, AttentionProblem, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from kernels.attention.tuned import table, table_for, tables, tuned_launches
from kernels.fp8 import FP8
from tests.kernels.tuning_check import mistakes, shared_memory_estimate

TRITON_ROWS = [row for row in (*REGISTRY, *PREFIX_REGISTRY, *INVARIANT_REGISTRY) if row.launch]
EVERYWHERE = [row for row in TRITON_ROWS if row.sm == TENSOR_CORES]
PREFILL = next(row for row in EVERYWHERE if row.phase is Phase.PREFILL)
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)
SMALL = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1, "programs_per_sm": 2}


def problem(phase, dtype="bfloat16", **more):
    fields = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | more
    return AttentionProblem(phase=phase, dtype=dtype, softmax_scale=0.1, **fields)


def gpu(sm):
    return dataclasses.replace(CATALOGUE["h100"], sm=sm)


@pytest.mark.parametrize("sm", tables())
def test_a_committed_table_has_no_mistakes(sm):
    assert mistakes(sm, table(sm)) == []


def test_every_catalogue_gpu_with_triton_tensor_cores_has_its_own_table():
    wanted = {arch.sm for arch in CATALOGUE.values() if arch.has_triton_tensor_cores}

    assert wanted == set(tables())


@pytest.mark.parametrize(
    ("spec", "arch"),
    [
        pytest.param(spec, arch, id=f"{spec.name}-{arch.key}")
        for spec in TRITON_ROWS
        for arch in CATALOGUE.values()
        if arch.sm in spec.sm
    ],
)
def test_every_head_dim_and_dtype_has_a_row_for_any_length(spec, arch):
    kv_dtype = FP8 if spec.quantized_only else None
    for dtype in spec.dtypes:
        for head_dim in spec.head_dims:
            asked = problem(spec.phase, dtype, head_dim=head_dim, kv_dtype=kv_dtype)
            launches = tuned_launches(spec, asked, arch)

            assert launches[-1].max_seqlen_k is None
            assert "safe default" not in launches[-1].provenance


@pytest.mark.parametrize(
    ("sm", "source"),
    [
        (80, 80),
        (86, 86),
        (87, 86),
        (89, 89),
        (90, 90),
        (100, 100),
        (103, 100),
        (120, 120),
        (121, 120),
    ],
)
def test_an_architecture_uses_its_own_table_or_the_nearest_lower_one_of_its_generation(sm, source):
    assert table_for(gpu(sm)) == source


@pytest.mark.parametrize("sm", [75, 110, 129 + 10])
def test_a_generation_without_a_table_has_none(sm):
    assert table_for(gpu(sm)) is None


def test_a_row_from_another_table_says_so_and_counts_as_not_measured(monkeypatch):
    row = sound_table()[0] | {"measured": True, "provenance": "timed there"}
    monkeypatch.setattr(tuning, "table", lambda sm: (row,))

    own, borrowed = (
        tuned_launches(PREFILL, problem(Phase.PREFILL, head_dim=32), gpu(sm))[0] for sm in (86, 87)
    )

    assert (own.provenance, own.measured) == ("timed there", True)
    assert borrowed.provenance == "table of sm_86, sm_87 has none; timed there"
    assert not borrowed.measured


def test_a_problem_without_a_table_row_gets_the_safe_default_and_says_so(monkeypatch):
    spec = PREFILL
    (without_table,) = tuned_launches(spec, problem(spec.phase), gpu(110))
    monkeypatch.setattr(tuning, "table", lambda sm: ())
    (without_row,) = tuned_launches(spec, problem(spec.phase), gpu(90))

    assert without_table.launch == without_row.launch == spec.launch
    assert without_table.provenance == "safe default of portable_prefill: sm_110 has no table"
    assert "no table has this head dim and dtype" in without_row.provenance


def test_rows_are_ordered_by_number_and_length_and_a_batch_invariant_problem_gets_the_last(
    monkeypatch,
):
    long, short = (sound_table()[0] | {"max_seqlen_k": length} for length in (None, 512))
    many = long | {"min_heads_per_sm": 2}
    monkeypatch.setattr(tuning, "table", lambda sm: (long, many, short))
    asked = problem(Phase.PREFILL, head_dim=32)
    invariant = dataclasses.replace(asked, batch_invariant=True)

    launches = tuned_launches(PREFILL, asked, gpu(90))

    found = [(row.min_num_seqs, row.max_seqlen_k) for row in launches]
    assert found == [(33, None), (0, 512), (0, None)]
    assert tuned_launches(PREFILL, invariant, gpu(90)) == launches[-1:]


@pytest.mark.parametrize(("num_kv_heads", "fewest"), [(1, 264), (5, 53), (8, 33), (300, 1)])
def test_the_minimum_of_sequences_follows_from_the_minimum_of_heads_per_sm(
    monkeypatch, num_kv_heads, fewest
):
    row = sound_table()[0]
    monkeypatch.setattr(tuning, "table", lambda sm: (row | {"min_heads_per_sm": 2}, row))
    asked = problem(Phase.PREFILL, head_dim=32, num_kv_heads=num_kv_heads, num_heads=num_kv_heads)

    launches = tuned_launches(PREFILL, asked, gpu(90))

    assert [row.min_num_seqs for row in launches] == [fewest, 0]


def test_a_quantized_cache_uses_its_own_rows_or_else_others_and_says_so(monkeypatch):
    plain, own = (
        sound_table()[1] | {"provenance": "timed there", "measured": True} | more
        for more in ({}, {"kv_dtypes": [FP8], "head_dims": [64], "dtypes": ["bfloat16"]})
    )
    monkeypatch.setattr(tuning, "table", lambda sm: (plain, own))
    spec = next(row for row in REGISTRY if row.name == plain["kernel"])

    def rows_for(**more):
        return tuned_launches(spec, problem(spec.phase, **more), gpu(90))

    (for_own,) = rows_for(head_dim=64, kv_dtype=FP8)
    (for_other,) = rows_for(head_dim=128, kv_dtype=FP8)
    (unquantized,) = rows_for(head_dim=64)
    assert (for_own.provenance, for_own.measured) == ("timed there", True)
    assert (unquantized.provenance, unquantized.measured) == ("timed there", True)
    assert for_other.provenance == (
        "row for a cache of the queries' dtype, none is for float8_e4m3fn; timed there"
    )
    assert not for_other.measured


def sound_table():
    """Return a table in which `mistakes` finds nothing."""
    return [
        {
            "kernel": spec.name,
            "dtypes": list(DTYPES),
            "head_dims": list(HEAD_DIMS),
            "max_seqlen_k": None,
            "launch": dict(SMALL),
            "provenance": "a test",
            "measured": False,
        }
        for spec in EVERYWHERE
    ]


def test_a_sound_table_has_no_mistakes():
    assert mistakes(86, sound_table()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "hopper"}, "row 0: kernel 'hopper' is none of portable_prefill"),
        ({"kernel": "torch_prefill"}, "kernel 'torch_prefill' is none of"),
        ({"dtypes": ["int8"]}, "dtypes ['int8'] are not among float32"),
        ({"dtypes": []}, "dtypes [] are not among"),
        ({"head_dims": [100]}, "head_dims [100] are not among [32, 64,"),
        ({"head_dims": []}, "head_dims [] are not among"),
        ({"max_seqlen_k": 0}, "max_seqlen_k is 0; it must be null or at least 1"),
        ({"max_seqlen_k": "all"}, "max_seqlen_k is 'all'"),
        ({"min_heads_per_sm": 0}, "min_heads_per_sm is 0; it must be at least 1"),
        ({"min_heads_per_sm": True}, "min_heads_per_sm is True"),
        ({"min_heads_per_sm": 2}, "no row for any length"),
        ({"measured": 1}, "measured is 1; it must be true or false"),
        ({"provenance": " "}, "provenance is ' '; it must say where"),
        ({"block_m": 48}, "block_m is 48; it must be a power of two from 16 to 256"),
        ({"block_n": 8}, "block_n is 8; it must be a power of two from 16"),
        ({"block_m": 64.0}, "block_m is 64.0"),
        ({"num_warps": 6}, "num_warps is 6; it must be a power of two from 1 to 16"),
        ({"num_stages": 0}, "num_stages is 0; it must be from 1 to 8"),
        ({"programs_per_sm": True}, "programs_per_sm is True"),
        ({"launch": dict(SMALL, one_loop=0)}, "one_loop is 0; it must be true or false"),
        ({"launch": dict(SMALL, blocks=0)}, "launch has the keys"),
        (
            {"block_n": 128, "num_stages": 3},
            "needs about 1048576 bytes of shared memory in float32; the limit is 101376",
        ),
        ({"note": "x"}, "has the keys"),
        ({"kv_dtypes": ["int8"]}, "kv_dtypes ['int8'] are not what"),
        ({"kv_dtypes": []}, "kv_dtypes [] are not what"),
        ({"kv_dtypes": [FP8]}, "are not what"),  # its dtypes include float32
    ],
    ids=str,
)
def test_a_broken_row_is_named_with_its_value_and_the_limit(changes, message):
    rows = sound_table()
    for key, value in changes.items():
        (rows[0]["launch"] if key in rows[0]["launch"] else rows[0])[key] = value

    assert any(message in text for text in mistakes(86, rows)), mistakes(86, rows)


@pytest.mark.parametrize("block_m", [64, 96, 256, "128"])
def test_a_row_tile_that_the_kernel_does_not_have_is_a_mistake(block_m):
    rows = [dict(row) for row in table(90)]
    row = next(row for row in rows if row["kernel"] == "hopper_prefill")
    assert {128, 192} >= {row["launch"]["block_m"]}
    row["launch"] = row["launch"] | {"block_m": block_m}

    (found,) = mistakes(90, rows)

    assert found.endswith(f"block_m is {block_m!r}; this kernel has [128, 192]")


def test_a_missing_field_is_named():
    rows = sound_table()
    del rows[1]["launch"]["num_warps"]

    assert mistakes(86, rows)[0].startswith("row 1: launch has the keys")


def test_a_field_with_a_default_may_be_left_out():
    rows = sound_table()
    del rows[1]["launch"]["programs_per_sm"]

    assert mistakes(86, rows) == []


def test_a_row_for_many_heads_may_accompany_the_row_for_any():
    rows = sound_table()
    rows.append(copy.deepcopy(rows[0]) | {"min_heads_per_sm": 2})

    assert mistakes(86, rows) == []
    again = [*rows, copy.deepcopy(rows[-1])]
    assert mistakes(86, again)[0].endswith("two rows with max_seqlen_k None")


def test_two_rows_for_the_same_case_are_a_mistake():
    rows = sound_table()
    rows.append(copy.deepcopy(rows[0]) | {"head_dims": [64], "dtypes": ["float16"]})

    assert mistakes(86, rows) == [
        "portable_prefill float16 head_dim 64: two rows with max_seqlen_k None"
    ]


@pytest.mark.parametrize(
    "change", [{"max_seqlen_k": 4096}, {"head_dims": [32]}, {"dtypes": ["float32"]}]
)
def test_a_case_without_a_row_for_any_length_is_a_mistake(change):
    rows = sound_table()
    rows[1] |= change

    found = mistakes(86, rows)

    assert found
    assert all(text.endswith("no row for any length (max_seqlen_k null)") for text in found)


def test_a_table_for_an_unknown_gpu_is_a_mistake():
    assert mistakes(87, sound_table()) == ["sm_87 is no GPU of the catalogue"]


def test_shared_memory_is_estimated_from_the_tiles_in_flight():
    launch = LaunchConfig(128, 64, 8, 3)

    assert shared_memory_estimate(launch, "bfloat16", 128) == 2 * 64 * 128 * 2 * 2
    assert shared_memory_estimate(launch, "float8_e4m3fn", 128) == 2 * 64 * 128 * 2
    assert shared_memory_estimate(launch, "float32", 128) == 2 * 2 * 64 * 128 * 2 * 2
