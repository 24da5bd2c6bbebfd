"""The choice of a kernel: pure, and never without a reason."""

from __future__ import annotations

import logging

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE, CPU
from kernels.errors import NoKernelError, ShapeError
from kernels.plan import AttentionProblem, KernelSpec, LaunchConfig, PagedBatch, Phase, select
from kernels.registry import REGISTRY

HALF = frozenset({"float16", "bfloat16"})
TILES = LaunchConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
HOPPER = KernelSpec(
    "hopper_prefill",
    Phase.PREFILL,
    "kernels.attention.torch_prefill:TorchPrefill",
    HALF,
    sm=(90, 90),
    head_dims=frozenset({64, 128}),
    block_multiple=16,
    max_group_size=8,
    sliding_window=False,
    softcap=False,
    launch=TILES,
)
WITH_HOPPER = (HOPPER, *REGISTRY)
ARCHES = [pytest.param(arch, id=arch.key) for arch in CATALOGUE.values()]


def problem(phase=Phase.PREFILL, dtype="bfloat16", **more):
    fields = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | more
    return AttentionProblem(phase=phase, dtype=dtype, softmax_scale=0.1, **fields)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("more", [{}, {"sliding_window": 4096}, {"softcap": 50.0}], ids=str)
def test_every_known_processor_has_a_kernel_and_a_reason(arch, phase, dtype, more):
    selection = kernels.select(problem(phase, dtype, **more), arch)

    assert selection.spec.phase is phase
    assert not selection.spec.refuse(problem(phase, dtype, **more), arch)
    assert selection.spec.name in selection.why
    assert str(arch) in selection.why
    assert all(refusal.reasons for refusal in selection.refusals)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_pytorch_row_says_that_it_is_the_fallback_of_a_gpu(arch, phase):
    selection = kernels.select(problem(phase), arch)

    if selection.spec.name.startswith("torch_"):
        assert "the kernel of the CPU, the fallback of every GPU" in selection.why


def test_the_first_row_that_accepts_is_chosen_with_its_launch():
    selection = select(problem(), CATALOGUE["h100"], WITH_HOPPER)

    assert selection.spec is HOPPER
    assert selection.launch is TILES
    assert selection.refusals == ()


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(), "cpu", "needs a GPU"),
        (problem(), "a100", "needs sm_90 to sm_90, this is sm_80"),
        (problem(dtype="float32"), "h100", "no float32"),
        (problem(head_dim=96), "h100", "head_dim 96 is not one of [64, 128]"),
        (problem(block_size=8), "h100", "block_size 8 is not a multiple of 16"),
        (problem(num_kv_heads=1), "h100", "16 query heads per key-value head, at most 8"),
        (problem(sliding_window=9), "h100", "no sliding window"),
        (problem(softcap=30.0), "h100", "no softcap"),
    ],
    ids=["cpu", "sm", "dtype", "head dim", "block size", "group", "window", "softcap"],
)
def test_a_row_that_is_passed_over_says_why(asked, arch, reason):
    selection = select(asked, CATALOGUE[arch], WITH_HOPPER)

    assert selection.spec.name == "torch_prefill"
    assert [(refusal.kernel, refusal.reasons) for refusal in selection.refusals] == [
        ("hopper_prefill", (reason,))
    ]


def test_a_row_names_all_of_its_reasons():
    reasons = HOPPER.refuse(problem(Phase.DECODE, "float32", head_dim=80), CATALOGUE["t4"])

    assert reasons == (
        "solves prefill only",
        "needs sm_90 to sm_90, this is sm_75",
        "no float32",
        "head_dim 80 is not one of [64, 128]",
    )


def test_rows_of_the_other_phase_are_not_reported_as_passed_over():
    selection = kernels.select(problem(Phase.DECODE), CPU)

    assert selection.refusals == ()


def test_without_a_kernel_the_error_lists_every_row_and_all_its_reasons():
    cpu_only = KernelSpec("host_only", Phase.PREFILL, "m:f", HALF, cpu=True)

    with pytest.raises(NoKernelError) as caught:
        select(problem(dtype="float32"), CATALOGUE["t4"], (HOPPER, cpu_only))

    assert str(caught.value) == (
        "no kernel for prefill float32 H=16 K=8 D=128 S=16 on NVIDIA T4 (sm_75):\n"
        "  hopper_prefill: needs sm_90 to sm_90, this is sm_75; no float32\n"
        "  host_only: runs on the CPU only; no float32"
    )


def test_an_empty_registry_is_named_as_such():
    with pytest.raises(NoKernelError, match="the registry is empty"):
        select(problem(), CPU, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; attention takes one of float32, bfloat16, float16"),
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"num_heads": 9}, "num_heads 9 is not a multiple of num_kv_heads 8"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1 token"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be above 0"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_problem_out_of_range_is_refused_with_its_value(fields, message):
    with pytest.raises(ShapeError, match=message):
        problem(**fields)


def test_names_in_the_registry_are_unique_and_their_targets_exist():
    names = [row.name for row in REGISTRY]

    assert len(set(names)) == len(names)
    assert all(callable(kernels._factory(row.target)) for row in REGISTRY if row.cpu)


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
    ("arch", "level"), [("cpu", logging.INFO), ("t4", logging.WARNING)], ids=["cpu", "t4"]
)
def test_the_choice_is_logged_once_and_a_gpu_fallback_is_a_warning(caplog, arch, level):
    caplog.set_level(logging.INFO, logger="kernels")
    kernels._select_once.cache_clear()

    for _ in range(3):
        kernels.plan_attention(problem(Phase.DECODE), decode_batch(), CATALOGUE[arch])

    assert [record.levelno for record in caplog.records] == [level]
    assert "torch_decode" in caplog.text
