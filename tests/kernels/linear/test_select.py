"""The selection of a linear layer's kernel, the default launches and the tables, for absent processors."""

from __future__ import annotations

import dataclasses

import pytest

from kernels.arch import CATALOGUE, CPU
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import MATRIX
from kernels.linear.select import LinearLaunch, select_linear
from kernels.linear.tuned import find, linear_table, tuned_linear
from kernels.weight_format import FP8_ROWS, WeightFormat
from tests.kernels.tuning_check import linear_launch_mistakes, linear_mistakes

H100 = CATALOGUE["h100"]
SHAPES = [
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
    (151936, 1024, False), (3072, 2048, False), (2048, 2048, False), (8192, 2048, True),
    (2048, 8192, False), (128256, 2048, False), (6144, 4096, False), (4096, 4096, False),
    (14336, 4096, True), (4096, 14336, False), (128256, 4096, False), (640, 384, False),
    (1, 8, False), (1536, 576, True),
]  # fmt: skip
ROW = {
    "outputs": 1024, "inputs": 2048, "gated": False, "max_rows": 2, "kernel": "vector",
    "launch": {"block_n": 2, "block_k": 2048, "num_warps": 4}, "provenance": "for the test",
}  # fmt: skip


def problem(rows=1, outputs=1024, inputs=2048, dtype="bfloat16", *, gated=False, **more):
    return LinearProblem(rows, outputs, inputs, dtype, gated, **more)


@pytest.mark.parametrize("arch", [a for a in CATALOGUE.values() if a.sm >= 80], ids=lambda a: a.key)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 33, 64, 65, 512])
def test_every_choice_fits_its_kernel(arch, rows):
    for outputs, inputs, gated in SHAPES:
        choice = select_linear(problem(rows, outputs, inputs, gated=gated), arch)

        assert linear_launch_mistakes(choice) == []
        assert choice.why


def test_weights_in_fp8_without_a_kernel_on_tensor_cores_are_multiplied_as_others():
    odd = problem(4, 1000, layer_weights=1, format=FP8_ROWS)

    assert select_linear(problem(2, layer_weights=1, format=FP8_ROWS), H100).spec.name == "vector"
    assert select_linear(odd, H100).spec.name == "vector"
    assert (
        select_linear(problem(4, layer_weights=1, format=FP8_ROWS), CATALOGUE["a100"]).spec.name
        == "vector"
    )


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [(1, "vector"), (4, "vector"), (5, "library"), (512, "library")],
)
def test_the_number_of_rows_decides_the_kernel(rows, kernel):
    assert select_linear(problem(rows), H100).spec.name == kernel


@pytest.mark.parametrize(
    ("asked", "arch", "chosen", "why"),
    [
        (problem(dtype="float32"), CPU, "packed", "needs a GPU"),
        (problem(), CATALOGUE["t4"], "pytorch", "this is sm_75"),
        (problem(dtype="float64"), H100, "pytorch", "no float64"),
        (problem(trainable=True), H100, "pytorch", "not differentiable"),
        (problem(5), H100, "library", "5 rows: others are faster from 5 on"),
        (problem(inputs=1020), H100, "library", "1020 inputs are not a multiple of 8"),
        (problem(3, 8192, gated=True), H100, "library", "3 rows of a wide gate"),
        (
            problem(3, format=FP8_ROWS, layer_weights=1),
            H100,
            "matrix",
            "faster from 3 rows on with weights in FP8",
        ),
    ],
    ids=str,
)
def test_problems_that_the_vector_kernel_does_not_support_give_the_reason(asked, arch, chosen, why):
    choice = select_linear(asked, arch)

    assert choice.spec.name == chosen
    assert choice.launch is None
    assert why in "; ".join(dict(choice.refusals)["vector"])


LAYER = 15_000_000
INT4 = WeightFormat("int4", 4, 128, "group", False, False, 8, "float16")


@pytest.mark.parametrize(
    ("rows", "arch", "chosen", "why"),
    [
        (1, "h100", "groups", None),
        (8, "h100", "groups", None),
        (9, "h100", "matrix", "9 rows: Hopper's tensor cores are faster"),
        (256, "h100", "matrix", "256 rows: Hopper's tensor cores are faster"),
        (257, "h100", "library", "257 rows: others are faster from 17 on"),
        (16, "a100", "groups", None),
        (17, "a100", "library", "17 rows: others are faster from 17 on"),
        (1, "t4", "pytorch", "this is sm_75"),
    ],
)
def test_the_number_of_rows_decides_the_kernel_for_4_bit_weights(rows, arch, chosen, why):
    choice = select_linear(problem(rows, format=INT4, layer_weights=4 * LAYER), CATALOGUE[arch])

    assert choice.spec.name == chosen
    assert "no weights in int4" in dict(choice.refusals)["vector"]
    if why is not None:
        assert why in "; ".join(dict(choice.refusals)["groups"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"inputs": 1016}, "1016 inputs are not a multiple of 32"),
        ({"dtype": "float32"}, "no product on tensor cores with float32"),
        ({"format": dataclasses.replace(INT4, group=96)}, "no weights in int4"),
        ({"format": dataclasses.replace(INT4, bits=8)}, "no weights in int4"),
        ({"format": dataclasses.replace(INT4, scales="row", group=0)}, "no weights in int4"),
        ({"batch_invariant": True}, "for few rows only"),
    ],
    ids=str,
)
def test_other_problems_with_4_bit_weights_give_the_reason(change, why):
    asked = problem(1, **{"format": INT4, "layer_weights": LAYER, **change})

    assert why in "; ".join(dict(select_linear(asked, H100).refusals)["groups"])


FP8_BLOCKS = WeightFormat("fp8-blocks", 8, 128, "block")


@pytest.mark.parametrize(
    ("rows", "arch", "changes", "chosen"),
    [
        (1, "h100", {}, "groups"),
        (8, "h100", {}, "groups"),
        (9, "h100", {}, "matrix"),
        (256, "h100", {}, "matrix"),
        (257, "h100", {}, "library"),
        (1, "a100", {}, "groups"),
        (16, "l4", {}, "groups"),
        (17, "a100", {}, "library"),
        (1, "t4", {}, "pytorch"),
        (16, "h100", {"group": 64}, "groups"),
        (17, "h100", {"group": 64}, "library"),
        (9, "h100", {"group": 256, "scales": "group"}, "matrix"),
        (1, "h100", {"group": 96}, "library"),
    ],
)
def test_the_number_of_rows_decides_the_kernel_for_fp8_in_blocks(rows, arch, changes, chosen):
    form = dataclasses.replace(FP8_BLOCKS, **changes)
    asked = problem(rows, format=form, layer_weights=4 * LAYER)

    assert select_linear(asked, CATALOGUE[arch]).spec.name == chosen


@pytest.mark.parametrize(
    ("asked", "arch", "why"),
    [
        (problem(5, layer_weights=LAYER), "h100", None),
        (problem(256, layer_weights=LAYER), "h200", None),
        (problem(16, layer_weights=LAYER, bias=True), "h100", None),
        (problem(16, layer_weights=LAYER, bias=True, residual=True), "h100", "no bias with a gate or a residual"),
        (problem(16, layer_weights=LAYER, bias=True, gated=True), "h100", "no bias with a gate or a residual"),
        (problem(3, layer_weights=LAYER, format=FP8_ROWS), "h100", None),
        (problem(256, layer_weights=LAYER, format=FP8_ROWS), "h100", None),
        (problem(64, layer_weights=4 * LAYER, format=FP8_ROWS), "h100", None),
        (problem(65, layer_weights=4 * LAYER, format=FP8_ROWS), "h100", "65 rows: others are faster outside 3 to 64"),
        (problem(16, batch_invariant=True, format=FP8_ROWS), "h100", "weights are quantized"),
        (problem(17, format=dataclasses.replace(FP8_BLOCKS, group=64), layer_weights=LAYER), "h100",
         "FP8 in groups of 64, not of a multiple of 128"),
        (problem(16, inputs=96, layer_weights=LAYER), "h100", "a size of 96 is not a multiple of 64"),
        (problem(16, dtype="float32", layer_weights=LAYER), "h100", "no float32"),
        (problem(16, layer_weights=LAYER, trainable=True), "h100", "not differentiable"),
        (problem(16), "h100", "for the projections of a decoder layer only"),
        (problem(257, layer_weights=LAYER), "h100", "257 rows: others are faster outside 5 to 256"),
        (problem(129, layer_weights=4 * LAYER), "h100", "129 rows: others are faster outside 5 to 128"),
        (problem(16, layer_weights=LAYER), "a100", "needs sm_90, this is sm_80"),
        (problem(16, layer_weights=LAYER), "cpu", "needs a GPU"),
    ],
    ids=str,
)  # fmt: skip
def test_projections_of_5_to_256_rows_use_the_matrix_kernel_or_give_the_reason(asked, arch, why):
    choice = select_linear(asked, CATALOGUE[arch])

    if why is None:
        assert choice.spec is MATRIX
    else:
        assert choice.spec is not MATRIX
        assert why in "; ".join(dict(choice.refusals)["matrix"])


@pytest.mark.parametrize(
    ("rows", "arch", "changes", "kernel", "why"),
    [
        (4, "h100", {}, "vector", "enough programs"),
        (5, "h100", {}, "library_fp8", "5 rows"),
        (256, "l4", {"dtype": "float16"}, "library_fp8", "256 rows"),
        (5, "a100", {}, "library", "needs sm_89, "),
        (5, "h100", {"dtype": "float32"}, "library", "no product in FP8 with float32"),
        (5, "h100", {"inputs": 2056}, "library", "multiples of 16"),
        (5, "h100", {"outputs": 1001}, "library", "multiples of 16"),
        (5, "h100", {"outputs": 1000, "gated": True}, "library_fp8", "5 rows"),
        (3, "h100", {"outputs": 28672, "inputs": 4096, "gated": True}, "library_fp8", "3 rows of a wide gate"),
    ],
)  # fmt: skip
def test_fp8_weights_use_the_fp8_product_where_it_is_supported(rows, arch, changes, kernel, why):
    asked = dataclasses.replace(problem(rows), format=FP8_ROWS, **changes)
    choice = select_linear(asked, CATALOGUE[arch], tuned_linear)

    assert choice.spec.name == kernel
    assert why in "; ".join([choice.why, *(r for _, reasons in choice.refusals for r in reasons)])
    assert linear_launch_mistakes(choice) == []
    assert asked.weight_bytes == asked.matrices * asked.outputs * asked.inputs


def test_fp8_weights_are_converted_by_bit_operations_without_an_instruction():
    asked = dataclasses.replace(problem(), format=FP8_ROWS)
    choices = {key: select_linear(asked, CATALOGUE[key]) for key in ("a100", "l4", "h100")}

    assert {key: choice.unpacks for key, choice in choices.items()} == {
        "a100": True, "l4": False, "h100": False,
    }  # fmt: skip
    assert not select_linear(problem(), CATALOGUE["a100"]).unpacks


def test_a_default_fills_the_gpu():
    for outputs, inputs, gated in SHAPES[:15]:
        choice = select_linear(problem(1, outputs, inputs, gated=gated), H100)

        assert choice.tiles * choice.launch.num_warps >= H100.num_sms * 16


def test_weights_are_counted_once_for_each_half():
    assert problem(64, 3072, 1024, gated=True).weight_bytes == 2 * 3072 * 1024 * 2
    assert problem(1, 3072, 1024, "float32").weight_bytes == 3072 * 1024 * 4


def test_weights_of_twice_the_size_use_no_more_registers():
    half, single = (select_linear(problem(dtype=d), H100).launch for d in ("float16", "float32"))

    assert half.ahead == 2
    assert single.ahead * 2 * single.block_n <= 2 * half.ahead * half.block_n


def test_a_row_of_a_table_comes_before_the_default():
    chosen = select_linear(problem(2), H100, lambda asked, arch: find(asked, [ROW]))

    assert chosen.launch == LinearLaunch(2, 2048, 4)
    assert chosen.measured
    assert chosen.why == "for the test"
    assert not select_linear(problem(3), H100, lambda asked, arch: find(asked, [ROW])).measured


def test_the_table_row_with_the_smallest_sufficient_max_rows_is_used():
    library = ROW | {"max_rows": 32, "kernel": "library", "launch": None}

    assert find(problem(2), [library, ROW]).kernel == "vector"
    assert find(problem(3), [library, ROW]).kernel == "library"
    assert find(problem(33), [library, ROW]) is None
    assert find(problem(gated=True), [library, ROW]) is None


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({}, None),
        ({"kernel": "library", "launch": None}, None),
        ({"more": 1}, "has the keys"),
        ({"provenance": " "}, "provenance must say"),
        ({"launch": None}, "has no launch"),
        ({"kernel": "library"}, "the library takes no launch"),
        ({"max_rows": 16}, "16 rows are too many"),
        ({"launch": {"block_n": 3, "block_k": 2048, "num_warps": 4}}, "block_n is 3"),
        ({"launch": {"block_n": 2, "block_k": 512, "num_warps": 4}}, "less than 256 for each warp"),
        ({"launch": {"block_n": 2, "block_k": 2048, "num_warps": 4, "ahead": 0}}, "ahead is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_each_mistake_of_a_table_is_found(change, mistake):
    found = linear_mistakes([ROW | change])

    assert found == [] if mistake is None else mistake in "; ".join(found)


def test_a_case_in_two_rows_is_found():
    assert "a second row" in linear_mistakes([ROW, ROW])[0]


@pytest.mark.parametrize("arch", CATALOGUE.values(), ids=lambda a: a.key)
def test_the_tables_hold_no_mistakes(arch):
    assert linear_mistakes(linear_table(arch.sm)) == []


def test_a_shape_without_a_table_row_has_no_measured_launch():
    assert tuned_linear(problem(1, 7, 8), H100) is None


def test_float32_does_not_use_measurements_of_16_bit_types():
    assert tuned_linear(problem(), H100) is not None
    assert tuned_linear(problem(dtype="float32"), H100) is None
