"""Selection of a kernel: the chosen row, and the reasons of the rows that are passed over."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE, CPU
from kernels.attention import functional
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import DTYPES, AttentionProblem, PagedBatch, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, REGISTRY
from kernels.attention.select import select, select_for, select_for_queries
from kernels.attention.spec import KernelSpec
from kernels.errors import NoKernelError, ShapeError
from kernels.fp8 import FP8
from kernels.selection import load

HALF = frozenset({"float16", "bfloat16"})
TILES = TunedLaunch(LaunchConfig(128, 64, 8, 3), None, "a test", measured=False)
LONG = TunedLaunch(LaunchConfig(64, 128, 4, 2), None, "a test", measured=True)
SHORT = TunedLaunch(LaunchConfig(16, 32, 4, 1), 512, "a test", measured=True)
HOPPER = KernelSpec(
    "hopper_prefill",
    Phase.PREFILL,
    "kernels.attention.pytorch.prefill:TorchPrefill",
    HALF,
    sm=frozenset({90}),
    head_dims=frozenset({64, 128}),
    block_sizes=(16, 64),
    sliding_window=False,
    softcap=False,
    launch=TILES.launch,
)
HOPPER_DECODE = dataclasses.replace(HOPPER, name="hopper_decode", phase=Phase.DECODE)
TORCH = tuple(row for row in REGISTRY if row.cpu)
WITH_HOPPER = (HOPPER, HOPPER_DECODE, *TORCH)
ARCHES = [pytest.param(arch, id=arch.key) for arch in CATALOGUE.values()]
PORTABLE = ("a100", "a10", "l4", "rtx4090", "h100", "h200", "b200", "rtx5090")
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)
NO_TENSOR_CORES = "Triton's dot uses tensor cores from sm_80 on"


def problem(phase=Phase.PREFILL, dtype="bfloat16", **more):
    fields = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    return AttentionProblem(phase=phase, dtype=dtype, **fields | {"softmax_scale": 0.1} | more)


def tiles(*_):
    return (TILES,)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"sliding_window": 4096}, {"softcap": 50.0}], ids=str)
def test_every_known_processor_has_a_kernel_and_a_reason(arch, phase, dtype, more):
    selection = kernels.select(problem(phase, dtype, **more), arch)

    assert selection.spec.phase is phase
    assert not selection.spec.unsupported(problem(phase, dtype, **more), arch)
    assert selection.spec.name in selection.why
    assert str(arch) in selection.why
    assert all(refusal.reasons for refusal in selection.refusals)


@pytest.mark.parametrize("arch", PORTABLE)
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_kernels_are_chosen_from_sm_80_on_for_every_head_dim(arch, phase, dtype):
    for head_dim in HEAD_DIMS:
        selection = kernels.select(problem(phase, dtype, head_dim=head_dim), CATALOGUE[arch])

        assert not selection.spec.cpu
        assert selection.spec.phase is phase
        assert selection.launch_for(1 << 20, 8).block_n >= 16


@pytest.mark.parametrize(
    "more",
    [
        {}, {"head_dim": 64}, {"head_dim": 256}, {"dtype": "float16"}, {"num_heads": 8},
        {"num_heads": 64, "num_kv_heads": 1}, {"block_size": 256}, {"block_size": None},
        {"num_heads": 28, "num_kv_heads": 4}, {"causal": False}, {"sliding_window": 1},
        {"softcap": 15.0}, {"lse": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("arch", ["h100", "h200"])
def test_hopper_uses_its_own_prefill(arch, more):
    assert kernels.select(problem(**more), CATALOGUE[arch]).spec.name == "hopper_prefill"


@pytest.mark.parametrize(
    "more",
    [
        {}, {"head_dim": 256}, {"dtype": "float16"}, {"num_heads": 24}, {"head_dim": 96}, {"head_dim": 32},
        {"num_heads": 64, "num_kv_heads": 1}, {"block_size": 256}, {"max_query_tokens": 16},
        {"sliding_window": 1}, {"softcap": 15.0}, {"lse": True},
        {"head_dim": 64, "max_query_tokens": 16}, {"head_dim": 64, "num_heads": 72},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("arch", ["h100", "h200"])
def test_hopper_uses_its_own_decode(arch, more):
    asked = problem(Phase.DECODE, **more)

    assert kernels.select(asked, CATALOGUE[arch]).spec.name == "hopper_decode"


@pytest.mark.parametrize(
    "more",
    [
        {}, {"dtype": "float16"}, {"num_heads": 8}, {"num_heads": 64}, {"block_size": 256}, {"lse": True},
        {"sliding_window": 1}, {"softcap": 15.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("arch", ["h100", "h200"])
def test_hopper_decodes_with_keys_on_m_at_head_dim_64_with_the_launches_that_were_timed(arch, more):
    selection = kernels.select(problem(Phase.DECODE, head_dim=64, **more), CATALOGUE[arch])

    assert selection.spec.name == "hopper_keys_on_m_decode"
    many, any_number = selection.launches
    assert many.measured
    assert many.launch == LaunchConfig(16, 64, 4, 2, programs_per_sm=6)
    assert (many.max_seqlen_k, many.min_num_seqs) == (1024, 66)  # of 8 heads, 4 for each of 132 SMs
    assert any_number.measured
    assert any_number.launch == LaunchConfig(16, 128, 4, 2, programs_per_sm=3)


@pytest.mark.parametrize(
    "more",
    [
        {"num_heads": 128, "num_kv_heads": 1}, {"block_size": 8},
        {"block_size": 48}, {"dtype": "float32"},
    ],
    ids=str,
)  # fmt: skip
def test_problems_that_the_hopper_decode_does_not_support_use_the_portable_decode(more):
    selection = kernels.select(problem(Phase.DECODE, **more), CATALOGUE["h100"])

    assert selection.spec.name == "portable_decode"
    refused = [refusal.kernel for refusal in selection.refusals]
    assert refused == ["hopper_keys_on_m_decode", "hopper_decode"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_heads": 128, "num_kv_heads": 1}, "no groups of 128 query heads"),
        ({"block_size": 8}, "block_size 8 is not from 16 to 256"),
        ({"block_size": 48}, "block_size 48 is not a power of two"),
        ({"dtype": "float32"}, "no float32"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_problems_that_the_hopper_prefill_does_not_support_use_the_portable_prefill(more, reason):
    selection = kernels.select(problem(**more), CATALOGUE["h100"])

    assert selection.spec.name == "portable_prefill"
    (told,) = dict(selection.refusals)["hopper_prefill"]
    assert told.startswith(reason)


@pytest.mark.parametrize("head_dim", [32, 48, 80, 96, 112, 160, 192, 224])
@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("phase", list(Phase))
def test_hopper_uses_its_own_kernels_for_every_group_and_head_dim(phase, group, head_dim):
    asked = problem(phase, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    selection = kernels.select(asked, CATALOGUE["h100"])

    assert selection.spec.name == f"hopper_{phase.value}"
    assert all("to which the kernel pads" in launch.provenance for launch in selection.launches)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", DTYPES)
def test_turing_uses_the_pytorch_rows_and_reports_the_reason(phase, dtype):
    selection = kernels.select(problem(phase, dtype), CATALOGUE["t4"])

    assert selection.spec.name == f"torch_{phase.value}"
    assert selection.launches == ()
    assert "for the CPU, and the fallback for every GPU" in selection.why
    *refused, last = [str(refusal) for refusal in selection.refusals]
    assert all(f"_{phase.value}: needs sm_" in text for text in refused)
    assert last.startswith(f"cpu_{phase.value}: runs on the CPU only")
    assert refused[-1] == (
        f"portable_{phase.value}: needs sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_120 or sm_121, "
        f"this is sm_75 ({NO_TENSOR_CORES})"
    )


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", [None, "there is no library"])
def test_the_cpu_uses_the_library_for_float32_else_pytorch(monkeypatch, phase, dtype, library):
    monkeypatch.setattr("kernels.attention.spec.load", lambda: library)

    selection = kernels.select(problem(phase, dtype), CPU)

    refused = [str(refusal) for refusal in selection.refusals]
    if dtype == "float32" and library is None:
        assert selection.spec.name == f"cpu_{phase.value}"
        assert "equal bits in every batch and chunk" in selection.why
    else:
        assert selection.spec.name == f"torch_{phase.value}"
        assert "for the CPU, and the fallback for every GPU" in selection.why
        *refused, last = refused
        assert (library or f"no {dtype}") in last
    assert all(f"_{phase.value}: needs a GPU" in text for text in refused)
    assert refused[-1] == f"portable_{phase.value}: needs a GPU"


@pytest.mark.parametrize(
    "more",
    [
        {"num_kv_heads": 16}, {"num_heads": 28, "num_kv_heads": 4}, {"num_kv_heads": 1},
        {"num_heads": 9, "num_kv_heads": 3}, {"block_size": 1}, {"block_size": 256},
        {"sliding_window": 1}, {"softcap": 15.0}, {"lse": True}, {"batch_invariant": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("phase", list(Phase))
def test_our_kernels_support_every_shape_and_option_of_their_rows(phase, more):
    for arch in ("a100", "h100"):
        assert not kernels.select(problem(phase, **more), CATALOGUE[arch]).spec.cpu


@pytest.mark.parametrize(
    "asked",
    [
        problem(block_size=None),
        problem(block_size=None, causal=False),
        problem(causal=False),
        problem(Phase.DECODE, max_query_tokens=8),
    ],
    ids=str,
)
def test_only_our_kernels_support_packed_keys_full_attention_and_several_queries(asked):
    assert kernels.select(asked, CATALOGUE["a100"]).spec.name == f"portable_{asked.phase.value}"
    with pytest.raises(NoKernelError):
        kernels.select(asked, CPU)


QUERIES = [
    ("h100", {}, "hopper_decode"),
    ("a100", {}, "portable_decode"),
    ("cpu", {}, "torch_prefill"),
    ("cpu", {"kv_dtype": FP8, "sliding_window": 8}, "torch_prefill"),
    ("t4", {"dtype": "float16"}, "torch_prefill"),
    ("h100", {"batch_invariant": True}, "hopper_invariant_prefill"),
    ("a100", {"batch_invariant": True}, "invariant_prefill"),
]


@pytest.mark.parametrize(("arch", "more", "expected"), QUERIES, ids=str)
def test_rows_of_prefill_take_several_queries_where_no_decode_row_does(arch, more, expected):
    asked = problem(Phase.DECODE, max_query_tokens=4, **more)

    found = select_for_queries(asked, CATALOGUE[arch])

    assert found.spec.name == expected
    if found.spec.phase is Phase.DECODE:
        assert found == kernels.select(asked, CATALOGUE[arch])
        return
    registry = INVARIANT_REGISTRY if asked.batch_invariant else REGISTRY
    rows = [row for row in registry if row.phase is Phase.DECODE]
    assert found.why.startswith("no decode row takes 4 query tokens per sequence here; ")
    assert [it.kernel for it in found.refusals[: len(rows)]] == [row.name for row in rows]
    assert all(it.reasons for it in found.refusals)
    same = [it for it in found.refusals if it.kernel == expected.replace("prefill", "decode")]
    assert same[0].reasons == ("decodes 1 query token per sequence, not 4",)


def test_a_decode_of_one_query_or_an_unsupported_prefill_has_no_other_rows():
    for asked in (problem(Phase.DECODE, lse=True), problem(lse=True)):
        with pytest.raises(NoKernelError):
            select_for_queries(asked, CPU)


@pytest.mark.parametrize("arch", ARCHES)
def test_max_query_tokens_does_not_limit_a_prefill(arch):
    for most in (1, 8):
        assert kernels.select(problem(max_query_tokens=most), arch).spec.phase is Phase.PREFILL


INVARIANT_SHAPES = [
    {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    {"head_dim": 64, "num_heads": 14, "num_kv_heads": 2},
    {"head_dim": 128, "num_heads": 16, "num_kv_heads": 8},
    {"head_dim": 256, "num_heads": 4, "num_kv_heads": 1},
    {"head_dim": 80, "sliding_window": 100, "softcap": 15.0},
    {"head_dim": 128, "block_size": 48},
    {"head_dim": 128, "kv_dtype": FP8},
    {"head_dim": 112},
]


@pytest.mark.parametrize("arch", ["a100", "h100", "b200"])
@pytest.mark.parametrize("shape", INVARIANT_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_invariant_problem_has_one_kernel_and_key_tile_for_both_phases(arch, shape, dtype):
    prefill, decode = (problem(it, dtype, **shape, batch_invariant=True) for it in Phase)
    try:
        first = kernels.select(prefill, CATALOGUE[arch])
    except NoKernelError:
        with pytest.raises(NoKernelError):
            kernels.select(decode, CATALOGUE[arch])
        return
    second = kernels.select(decode, CATALOGUE[arch])

    assert first.spec.target == second.spec.target
    assert len(first.launches) == len(second.launches) == 1
    one, other = first.launches[0].launch, second.launches[0].launch
    assert (one.block_n, one.num_warps) == (other.block_n, other.num_warps)
    assert one == other or first.spec.name == "hopper_invariant_prefill"


@pytest.mark.parametrize("arch", ["a100", "l4", "h100", "b200"])
def test_both_phases_have_the_same_key_tiles_for_every_head_dim(arch):
    for rows in zip(INVARIANT_REGISTRY[::2], INVARIANT_REGISTRY[1::2], strict=True):
        if rows[0].in_library or CATALOGUE[arch].unsupported(rows[0].sm):
            continue
        for dtype, head_dim in itertools.product(rows[0].dtypes, rows[0].head_dims):
            one, other = (
                kernels.select(
                    problem(phase, dtype, head_dim=head_dim, batch_invariant=True),
                    CATALOGUE[arch],
                    registry=rows,
                )
                .launches[-1]
                .launch
                for phase in Phase
            )
            assert one.block_n == other.block_n, (dtype, head_dim)


def test_hopper_has_a_batch_invariant_kernel_of_its_own_for_half_precision():
    def chosen(arch, dtype, **shape):
        asked = problem(dtype=dtype, **shape, batch_invariant=True)
        return kernels.select(asked, CATALOGUE[arch]).spec.name

    for shape in INVARIANT_SHAPES[:5]:
        assert chosen("h100", "bfloat16", **shape) == "hopper_invariant_prefill"
    for shape in INVARIANT_SHAPES[5:7]:
        assert chosen("h100", "bfloat16", **shape) == "invariant_prefill"
    assert chosen("h100", "float32") == "invariant_prefill"
    assert chosen("b200", "bfloat16") == "invariant_prefill"


def test_both_phases_of_a_batch_invariant_kernel_support_the_same_problems():
    for one, other in zip(INVARIANT_REGISTRY[::2], INVARIANT_REGISTRY[1::2], strict=True):
        assert other.name == one.name.replace("_prefill", "_decode")
        assert (one.phase, other.phase) == (Phase.PREFILL, Phase.DECODE)
        same = dataclasses.replace(
            one, name=other.name, phase=Phase.DECODE, tuned_as=other.tuned_as,
            launch=other.launch, row_tiles=other.row_tiles,
        )  # fmt: skip
        assert same == other


@pytest.mark.parametrize("phase", list(Phase))
def test_no_processor_without_tensor_cores_supports_a_batch_invariant_problem(phase):
    for arch in (CPU, CATALOGUE["t4"]):
        with pytest.raises(NoKernelError, match="batch invariant"):
            kernels.select(problem(phase, batch_invariant=True), arch)


def test_the_first_row_that_supports_the_problem_is_chosen_with_its_launch():
    selection = select(problem(), CATALOGUE["h100"], WITH_HOPPER, tiles)

    assert selection.spec is HOPPER
    assert selection.launches == (TILES,)
    assert selection.refusals == ()


def test_the_launch_of_the_smallest_sufficient_length_is_used():
    selection = select(problem(), CATALOGUE["h100"], WITH_HOPPER, lambda *_: (SHORT, LONG))

    assert selection.launch_for(512, 1) is SHORT.launch
    assert selection.launch_for(513, 1) is LONG.launch


def test_tile_sizes_for_many_sequences_come_before_those_for_any_number():
    many = dataclasses.replace(TILES, min_num_seqs=33)
    rows = (many, SHORT, LONG)
    selection = select(problem(), CATALOGUE["h100"], WITH_HOPPER, lambda *_: rows)

    assert selection.launch_for(512, 32) is SHORT.launch
    assert selection.launch_for(512, 33) is many.launch
    assert selection.launch_for(1 << 20, 2048) is many.launch


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(), "cpu", "needs a GPU"),
        (problem(), "a100", "needs sm_90, this is sm_80"),
        (problem(dtype="float32"), "h100", "no float32"),
        (problem(head_dim=96), "h100", "head_dim 96 is not one of [64, 128]"),
        (problem(block_size=8), "h100", "block_size 8 is not from 16 to 64"),
        (problem(block_size=65), "h100", "block_size 65 is not from 16 to 64"),
        (problem(sliding_window=9), "h100", "no sliding window"),
        (problem(softcap=30.0), "h100", "no softcap"),
        (problem(lse=True), "h100", "no log-sum-exp"),
        (problem(batch_invariant=True), "h100", "not batch invariant"),
        (problem(causal=False), "h100", "causal only"),
        (problem(block_size=None), "h100", "no packed keys and values"),
        (
            problem(Phase.DECODE, max_query_tokens=4),
            "h100",
            "decodes 1 query token per sequence, not 4",
        ),
    ],
    ids=[
        "cpu", "sm", "dtype", "head dim", "small block", "large block", "window", "softcap", "lse",
        "batch invariant", "not causal", "packed", "several queries",
    ],
)  # fmt: skip
def test_a_row_that_is_passed_over_reports_its_reason(asked, arch, reason):
    anything = KernelSpec(
        "anything", asked.phase, "m:f", frozenset(DTYPES), cpu=True, sm=None, packed=True,
        non_causal=True, several_queries=True, lse=True, batch_invariant=True,
    )  # fmt: skip
    row = HOPPER if asked.phase is Phase.PREFILL else HOPPER_DECODE

    selection = select(asked, CATALOGUE[arch], (row, anything), tiles)

    assert selection.spec is anything
    assert selection.refusals == ((row.name, (reason,)),)


def test_a_row_for_the_cpu_reports_that_it_runs_on_no_gpu():
    host_only = KernelSpec("host_only", Phase.PREFILL, "m:f", HALF, cpu=True)

    assert host_only.unsupported(problem(), CATALOGUE["h100"]) == ("runs on the CPU only",)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"head_dim": 100}, "head_dim 100 is not one of [32, 64, 80, 96, 128, 192, 256, 512]"),
        ({"block_size": 257}, "block_size 257 is not from 1 to 256"),
    ],
    ids=["head dim", "block size"],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_problems_that_our_kernels_do_not_support_use_the_pytorch_rows(phase, more, reason):
    selection = kernels.select(problem(phase, **more), CATALOGUE["h100"])

    assert selection.spec.name == f"torch_{phase.value}"
    assert selection.refusals[-2] == (f"portable_{phase.value}", (reason,))


def test_a_row_reports_all_of_its_reasons():
    reasons = HOPPER.unsupported(problem(Phase.DECODE, "float32", head_dim=80), CATALOGUE["t4"])

    assert reasons == (
        "solves prefill only",
        "needs sm_90, this is sm_75",
        "no float32",
        "head_dim 80 is not one of [64, 128]",
    )


@pytest.mark.parametrize("phase", list(Phase))
def test_a_gpu_that_the_assembler_does_not_support_uses_the_pytorch_rows(phase):
    thor = dataclasses.replace(CATALOGUE["b200"], key="thor", name="NVIDIA Thor", sm=110)

    selection = kernels.select(problem(phase), thor)

    assert selection.spec.name == f"torch_{phase.value}"
    for refusal in selection.refusals[:-1]:
        (reason, *_) = refusal.reasons
        assert "this is sm_110, which the ptxas 12.9 bundled with Triton 3.6.0 cannot" in reason


def test_rows_name_the_generation_of_flash_attention_that_they_follow():
    generations = {row.name: row.flash_attention for row in REGISTRY}

    assert generations == {
        "blackwell_prefill": 4, "hopper_fp8_prefill": 3, "hopper_prefill": 3, "hopper_unpacked_prefill": 3,
        "portable_prefill": 2, "hopper_keys_on_m_decode": 3, "hopper_decode": 3,
        "portable_decode": 2, "cpu_prefill": 2, "cpu_decode": 2, "torch_prefill": None, "torch_decode": None,
    }  # fmt: skip


def test_rows_of_the_other_phase_are_not_reported_as_passed_over():
    selection = kernels.select(problem(Phase.DECODE), CPU)

    refused = [refusal.kernel for refusal in selection.refusals]
    assert "portable_decode" in refused
    assert all(name.endswith("_decode") for name in refused)


@pytest.mark.parametrize("head_dim", [64, 112, 128])
def test_a_row_that_copies_keys_names_the_row_for_many_long_sequences_only_if_there_is_one(
    head_dim,
):
    asked, h100 = problem(head_dim=head_dim, kv_dtype=FP8), CATALOGUE["h100"]
    selection = kernels.select(asked, h100)
    ends, lengths = torch.arange(4097, dtype=torch.int32), torch.full((4096,), 100_000)
    batch = PagedBatch(ends, lengths, torch.empty(4096, 0), 4096, 1, 100_000)

    taken = select_for(selection, asked, batch).spec.name

    clause = f"for many long sequences {taken}"
    assert selection.why.endswith(clause) == (taken != selection.spec.name)
    assert ("for many long sequences" in selection.why) == (head_dim != 112)


def test_without_a_kernel_the_error_lists_every_row_of_the_phase_and_all_its_reasons():
    cpu_only = KernelSpec("host_only", Phase.PREFILL, "m:f", HALF, cpu=True)
    decode = KernelSpec("a_decode", Phase.DECODE, "m:f", HALF)

    with pytest.raises(NoKernelError) as caught:
        select(problem(dtype="float32"), CATALOGUE["t4"], (HOPPER, decode, cpu_only), tiles)

    assert str(caught.value) == (
        "no kernel for prefill float32 H=16 K=8 D=128 S=16 on NVIDIA T4 (sm_75): "
        "hopper_prefill: needs sm_90, this is sm_75; no float32; "
        "host_only: runs on the CPU only; no float32"
    )


def test_a_registry_without_the_problems_phase_is_named_as_such():
    with pytest.raises(NoKernelError, match="the registry has no row for decode"):
        select(problem(Phase.DECODE), CATALOGUE["h100"], (HOPPER,), tiles)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; attention takes one of float32, bfloat16, float16"),
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"num_heads": 9}, "num_heads 9 is not a multiple of num_kv_heads 8"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1 token"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be above 0 and finite"),
        ({"softcap": math.inf}, "softcap is inf; it must be above 0 and finite"),
        ({"softcap": math.nan}, "softcap is nan; it must be above 0 and finite"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0; it must be above 0 and finite"),
        ({"softmax_scale": math.inf}, "softmax_scale is inf; it must be above 0 and finite"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_problem_out_of_range_is_rejected_with_its_value(fields, message):
    with pytest.raises(ShapeError, match=message):
        problem(**fields)


def test_names_in_the_registry_are_unique_and_their_targets_exist():
    names = [row.name for row in REGISTRY]

    assert len(set(names)) == len(names)
    assert all(callable(load(row.target)) for row in REGISTRY if row.cpu)


def decode_batch():
    return PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32),
        num_tokens=1,
        max_seqlen_q=1,
        max_seqlen_k=5,
    )


@pytest.mark.parametrize(
    ("arch", "level"), [("cpu", logging.DEBUG), ("t4", logging.WARNING)], ids=["cpu", "t4"]
)
def test_the_choice_is_logged_once_and_a_gpu_fallback_is_a_warning(caplog, arch, level):
    caplog.set_level(logging.DEBUG, logger="kernels")
    functional._select_once.cache_clear()

    for _ in range(3):
        kernels.plan_attention(problem(Phase.DECODE), decode_batch(), CATALOGUE[arch])

    assert [record.levelno for record in caplog.records] == [level]
    assert "torch_decode" in caplog.text
