"""The persistent product on a CPU: results, rings and stores; its tiles, and where it is chosen."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.linear.matrix_tiles import plan_invariant_matrix
from kernels.linear.persistent_tiles import (
    COLUMNS,
    INVARIANT_FEWEST_ROWS,
    ROW_COUNTS,
    PersistentLaunch,
    estimate,
    fits,
    plan_persistent,
    rounded_rows,
    shared_bytes,
    sized,
)
from kernels.linear.problem import LinearProblem
from kernels.linear.projection import SWIGLU, Operations, Purpose, bind_projection
from kernels.linear.select import select_linear
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references import reference
from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from kernels.linear.gpu import persistent
    from tests.kernels.linear.persistent_on_cpu import PersistentOnCPU

H100 = CATALOGUE["h100"]
KINDS = ("plain", "bias", "gated", "residual")
SHAPES = (
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 1536), (17920, 1536), (1536, 8960), (960, 576),
    (576, 576), (3072, 576), (576, 1536), (64, 64), (192, 320), (128, 64), (151936, 1024),
)  # fmt: skip


def problem(outputs, inputs, kind, rows=1, **more):
    """Describe a projection by the rows of its weights."""
    gated = kind == "gated"
    layer = {"layer_weights": 15_000_000, "bias": kind == "bias", "residual": kind == "residual"}
    return LinearProblem(rows, outputs // (1 + gated), inputs, gated=gated, **(layer | more))


def whole_numbers(*shape, seed):
    """Return random numbers whose products and sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "launch"),
    [
        ("plain", 320, 320, PersistentLaunch(128, 128, group=2)),
        ("plain", 64, 64, PersistentLaunch(128, 256)),
        ("plain", 704, 384, PersistentLaunch(128, 256, stages=3, group=2, skew=2)),
        ("plain", 192, 640, PersistentLaunch(128, 64, stages=3, skew=0)),
        ("bias", 576, 448, PersistentLaunch(128, 256, group=4, skew=1)),
        ("gated", 576, 640, PersistentLaunch(128, 256, group=2)),
        ("gated", 192, 384, PersistentLaunch(128, 64)),
        ("gated", 256, 384, PersistentLaunch(256, 128, group=1)),
        ("residual", 192, 768, PersistentLaunch(128, 128, splits=2)),
        ("residual", 192, 768, PersistentLaunch(128, 128, splits=4)),
        ("residual", 320, 64, PersistentLaunch(128, 64)),
        ("residual", 512, 512, PersistentLaunch(128, 128, splits=8, stages=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "num_sms", "pdl"), [(1, 8, False), (300, 2, True)])
def test_every_output_is_the_formula(kind, outputs, inputs, launch, rows, num_sms, pdl):
    weight, x = whole_numbers(outputs, inputs, seed=1), whole_numbers(rows, inputs, seed=2)
    bias = whole_numbers(outputs, seed=3) if kind == "bias" else None
    linear = persistent.PersistentLinear(
        linear_weights(weight, bias), problem(outputs, inputs, kind)
    )
    linear._num_sms = num_sms
    with mock.patch.object(persistent, "persistent_linear", PersistentOnCPU()):
        found = linear.run(x, sized(launch, linear._problem), pdl=pdl)

    parts = x.float().unflatten(1, (launch.splits, -1)).transpose(0, 1)
    parts = parts @ weight.float().unflatten(1, (launch.splits, -1)).permute(1, 2, 0)
    if kind == "residual":
        assert found.dtype is torch.float32
        assert torch.equal(found, parts.sum(0)[None])
        return
    expected = parts.sum(0) + (0 if bias is None else bias.float())
    if kind == "gated":
        expected = reference.silu_and_mul(expected, torch.float32)
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
def test_tiles_of_a_group_of_rows_come_one_after_the_other():
    named = {"BLOCK_M": 128, "GROUP_M": 4, "COLUMN_TILES": 6}
    c = mock.Mock(**named)
    with mock.patch.object(persistent, "gl", mock.Mock(minimum=min)):
        places = [persistent.place_of.fn(tile, 1100, c) for tile in range(9 * 6)]

    assert len(set(places)) == len(places) == persistent.num_tiles.fn(1100, c)
    assert {row for row, _ in places} == {128 * i for i in range(9)}
    assert [row // 128 for row, _ in places[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [row // 128 for row, _ in places[-3:]] == [8, 8, 8]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_planned_tiles_divide_the_columns_and_fit_shared_memory(outputs, inputs, kind, invariant):
    asked = problem(outputs, inputs, kind, batch_invariant=invariant)
    for rows in ROW_COUNTS:
        launch = plan_persistent(asked, rows)
        chunks = inputs // launch.splits // COLUMNS

        assert inputs % (launch.splits * COLUMNS) == 0
        assert launch.splits == 1 or kind == "residual"
        assert 0 <= launch.skew < min(chunks, launch.stages)
        assert not launch.skew or chunks + launch.skew > launch.stages
        assert not (launch.splits > 1 and (launch.skew or launch.outputs > 128))
        assert fits(launch, asked)
        assert shared_bytes(launch, asked) + 1024 <= H100.shared_memory_bytes
        assert launch.stages >= 4


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_batch_invariant_layer_has_the_splits_of_fewer_rows(outputs, inputs):
    few = plan_invariant_matrix(outputs, inputs, may_split=True)
    launches = {
        plan_persistent(problem(outputs, inputs, "residual", batch_invariant=True), rows)
        for rows in ROW_COUNTS
    }

    assert {it.splits for it in launches} == {it.splits for it in few.values()}


def test_large_tiles_are_planned_for_prompts_and_enough_programs_for_steps():
    prompt = plan_persistent(problem(17920, 1536, "gated"), 4096)
    assert (prompt.rows, prompt.outputs, prompt.splits) == (128, 256, 1)
    for inputs in (4096, 14336):
        step = plan_persistent(problem(4096, inputs, "residual"), 256)
        assert 100 <= 2 * (4096 // step.outputs) <= 132


@pytest.mark.parametrize(
    ("rows", "rounded"), [(1, 128), (128, 128), (129, 256), (2049, 4096), (9999, 4096)]
)
def test_rows_are_rounded_up_to_those_that_tiles_are_planned_for(rows, rounded):
    assert rounded_rows(rows) == rounded


def test_more_columns_take_more_time():
    launch = PersistentLaunch(128, 256)
    short, long = (problem(4096, inputs, "plain") for inputs in (1024, 2048))
    assert estimate(launch, long, 4096) > estimate(launch, short, 4096)


@pytest.mark.parametrize(
    ("rows", "kind", "changes", "chosen"),
    [
        (257, "gated", {}, "persistent"),
        (256, "gated", {}, "matrix"),
        (129, "gated", {"layer_weights": (32 << 20) + 1}, "persistent"),
        (128, "gated", {"layer_weights": (32 << 20) + 1}, "matrix"),
        (100_000, "gated", {"dtype": "float16"}, "persistent"),
        (4096, "plain", {}, "library"),
        (4096, "residual", {}, "library"),
        (4096, "gated", {"bias": True}, "library"),
        (4096, "gated", {"layer_weights": 0}, "library"),
        (4096, "gated", {"inputs": 1000}, "library"),
        (4096, "gated", {"dtype": "float32"}, "library"),
        *((INVARIANT_FEWEST_ROWS, kind, {"batch_invariant": True}, "persistent") for kind in KINDS),
        (
            INVARIANT_FEWEST_ROWS,
            "plain",
            {"batch_invariant": True, "layer_weights": 0},
            "persistent",
        ),
        (INVARIANT_FEWEST_ROWS - 1, "gated", {"batch_invariant": True}, "matrix"),
    ],
    ids=str,
)
def test_where_the_kernel_is_chosen(rows, kind, changes, chosen):
    asked = dataclasses.replace(problem(4096, 1024, kind, rows), **changes)

    assert select_linear(asked, H100).spec.name == chosen
    assert select_linear(asked, CATALOGUE["a100"]).spec.name != "persistent"


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
@pytest.mark.parametrize(
    ("kind", "layer_weights", "purpose", "expected"),
    [
        ("gated", 1 << 20, Purpose.SERVING, (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        ("gated", 1 << 30, Purpose.SERVING, (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        ("plain", 1 << 20, Purpose.SERVING, (1, 2, 4, 16, 32, 64, 128, 256)),
        ("plain", 1 << 20, Purpose.DETERMINISTIC_SERVING, (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
    ],
)  # fmt: skip
def test_every_kernel_of_a_projection_is_compiled_by_its_numbers_of_rows(
    kind, layer_weights, purpose, expected
):
    layer = bind_projection(
        linear_weights(torch.empty(256, 128, dtype=torch.bfloat16)),
        torch.bfloat16,
        H100,
        Operations(activation=SWIGLU if kind == "gated" else None),
        layer_weights=layer_weights,
        purpose=purpose,
    )

    assert layer.row_counts == expected
