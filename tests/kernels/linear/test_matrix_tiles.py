"""Tile sizes for the tensor cores: valid for every shape, and enough programs for common models."""

from __future__ import annotations

import pytest

from kernels.linear.matrix_tiles import (
    MANY_ROWS,
    ROW_COUNTS,
    estimate,
    most_rows,
    plan_invariant_matrix,
    plan_matrix,
)

HOPPER_SHARED_BYTES = 227 << 10
LAYERS = {
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "smallest": ((64, 64), (64, 64), (64, 64), (64, 64)),
    "odd": ((192, 320), (320, 192), (1600, 320), (320, 832)),
}


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize(("outputs", "inputs"), sorted(set().union(*LAYERS.values())))
def test_tiles_divide_the_layer_and_fit_shared_memory(outputs, inputs, rows, may_split):
    launch = plan_matrix(outputs, inputs, rows, may_split=may_split)
    stages = launch.stages(inputs)

    assert outputs % launch.outputs == 0
    assert inputs % (launch.splits * launch.columns) == 0
    assert launch.splits == 1 or may_split
    assert launch.rows <= rows
    assert 1 <= stages <= inputs // launch.splits // launch.columns
    assert 2 * stages * (launch.outputs + launch.rows) * launch.columns < HOPPER_SHARED_BYTES


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"])
def test_a_layer_that_may_be_split_has_a_program_for_nearly_every_sm(model, rows, bits):
    for outputs, inputs in (LAYERS[model][1], LAYERS[model][3]):
        launch = plan_matrix(outputs, inputs, rows, may_split=True, bits=bits)

        programs = -(-rows // launch.rows) * (outputs // launch.outputs) * launch.splits
        assert 100 <= programs <= 132, launch


def test_the_estimate_never_decreases_with_more_rows():
    for outputs, inputs in set().union(*LAYERS.values()):
        times = [
            estimate(plan_matrix(outputs, inputs, rows, may_split=True), outputs, inputs, rows)
            for rows in ROW_COUNTS
        ]
        assert times == sorted(times)


def test_large_layers_use_the_library_beyond_128_rows():
    weights = {name: sum(n * k for n, k in layers) for name, layers in LAYERS.items()}

    assert most_rows(weights["qwen3-0.6b"]) == 256
    assert most_rows(weights["llama-3.2-1b"]) == most_rows(weights["llama-3.1-8b"]) == 128


def test_large_layers_in_fp8_use_the_library_beyond_64_rows():
    weights = {name: sum(n * k for n, k in layers) for name, layers in LAYERS.items()}

    assert most_rows(weights["qwen3-0.6b"], bits=8) == 256
    assert most_rows(weights["llama-3.1-8b"], bits=8) == 64


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_in_groups_use_the_library_beyond_256_rows(bits):
    assert most_rows(1 << 30, bits=bits, in_groups=True) == 256


def test_a_program_has_at_most_so_many_rows_as_it_is_told():
    for outputs, inputs in set().union(*LAYERS.values()):
        for rows in ROW_COUNTS:
            assert plan_matrix(outputs, inputs, rows, may_split=True, most_tile=64).rows <= 64


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), sorted(set().union(*LAYERS.values())))
def test_a_batch_invariant_layer_has_one_number_of_splits_for_any_number_of_rows(
    outputs, inputs, may_split
):
    launches = plan_invariant_matrix(outputs, inputs, may_split=may_split)

    assert list(launches) == [*ROW_COUNTS, MANY_ROWS]
    assert len({launch.splits for launch in launches.values()}) == 1
    for rows, launch in launches.items():
        assert outputs % launch.outputs == 0
        assert inputs % (launch.splits * launch.columns) == 0
        assert launch.rows <= min(rows, ROW_COUNTS[-1])
