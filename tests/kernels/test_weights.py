"""Matrices in every format: their values by plain loops, their parts, and changes that keep the values."""

import dataclasses
import itertools

import pytest
import torch

from kernels.linear.problem import LinearProblem
from kernels.weight_format import (
    FP8_ROWS,
    INT4_GROUPS,
    INT8_ROWS,
    WeightFormat,
    unquantized,
)
from kernels.weights import Weight, quantize, stacked_format

BLOCKS = WeightFormat("blocks", 8, group=4, scales="block")
GROUPS = WeightFormat("groups", 8, group=4, scales="group")
QUANTIZED = {
    "fp8 rows": FP8_ROWS,
    "fp8 blocks": BLOCKS,
    "fp8 groups": GROUPS,
    "int8 rows": INT8_ROWS,
    "signed rows": WeightFormat("signed", 8, scales="row", float=False),
    "int4 groups": dataclasses.replace(INT4_GROUPS, group=4),
    "int4 groups with shifts": WeightFormat("shifts", 4, 6, "group", shifts=True, float=False),
    "int4 groups in bfloat16": WeightFormat(
        "narrow", 4, 4, "group", shifts=True, float=False, scale_dtype="bfloat16"
    ),
    "int8 blocks with shifts": WeightFormat("shifts", 8, 4, "block", shifts=True, float=False),
}
FORMATS = QUANTIZED | {it: unquantized(it) for it in ("float32", "bfloat16")}
SHAPE = (10, 14)
"""The last blocks of 4 are not whole."""


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def weight(request):
    return random_weight(request.param)


def random_weight(form, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = Weight.empty(form, shape, "cpu")
    if form.float:
        made.numbers.copy_(torch.randn(shape, generator=generator))
    else:
        info = torch.iinfo(made.numbers.dtype)
        made.numbers.random_(info.min, info.max + 1, generator=generator)
    for scale in made.scales.values():
        scale.copy_(torch.randn(scale.shape, generator=generator))
    return made


def by_loops(weight):
    """Return the values in float64, element by element."""
    form, (outputs, inputs) = weight.format, weight.shape
    values = torch.empty(weight.shape, dtype=torch.float64)
    for n, c in itertools.product(range(outputs), range(inputs)):
        if form.bits == 4:
            byte = int(weight.numbers[n, c // 2])
            number = byte // 16 if c % 2 else byte % 16
        else:
            number = float(weight.numbers[n, c])
        place = {
            "none": None,
            "row": n,
            "group": (n, c // form.group if form.group else 0),
            "block": (n // form.group, c // form.group) if form.group else None,
        }[form.scales]
        shift = 0.0 if weight.shift is None else float(weight.shift[place])
        scale = 1.0 if weight.scale is None else float(weight.scale[place])
        values[n, c] = (number - form.offset) * scale + shift
    return values


def test_values_are_those_of_plain_loops(weight):
    torch.testing.assert_close(
        weight.dequantize(torch.float64), by_loops(weight), rtol=2**-21, atol=2**-21
    )


def test_values_are_float32_or_those_of_full_numbers_unless_a_dtype_is_asked_for(weight):
    expected = torch.float32 if weight.format.is_quantized else weight.numbers.dtype

    assert weight.dequantize().dtype is expected
    found = weight.dequantize(torch.float16)
    assert torch.equal(found, weight.dequantize().half())


def test_tensors_have_the_shapes_and_dtypes_of_the_format(weight):
    form = weight.format

    assert str(weight.numbers.dtype) == f"torch.{form.dtype}"
    assert weight.numbers.shape == (
        SHAPE[0],
        SHAPE[1] * form.bits // 8 if form.bits < 8 else SHAPE[1],
    )
    assert all(it.shape == form.scale_shape(SHAPE) for it in weight.scales.values())
    assert len(weight.tensors) == 1 + form.is_quantized + form.shifts


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_has_the_values_of_the_whole_wherever_it_begins_and_ends(weight, dim):
    whole, even = weight.dequantize(), dim == 1 and weight.format.bits == 4
    for start, stop in itertools.combinations(range(0, SHAPE[dim] + 1, 1 + even), 2):
        part = weight.rows(start, stop) if dim == 0 else weight.columns(start, stop)

        assert torch.equal(part.dequantize(), whole.narrow(dim, start, stop - start))
        assert part.shape == part.dequantize().shape
        assert (
            part.numbers.untyped_storage().data_ptr() == weight.numbers.untyped_storage().data_ptr()
        )


def test_a_part_that_divides_no_scale_is_a_view_in_the_same_format(weight):
    step = 12 if weight.format.group else 2
    for part in (weight.rows(step // 3, 10), weight.columns(0, step), weight.columns(step, 14)):
        assert part.format == weight.format
        for name, tensor in weight.tensors.items():
            found = part.tensors[name].untyped_storage().data_ptr()
            assert found == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("dim", "ends", "scales", "group"),
    [
        (0, (8,), "block", 4),
        (0, (6,), "group", 4),
        (1, (8, 12), "block", 4),
        (1, (6,), "group", 2),
        (1, (5, 8), "group", 1),
    ],
)
def test_a_block_that_would_be_divided_gets_more_scales(dim, ends, scales, group):
    found = BLOCKS.divided(dim, *ends)

    assert (found.name, found.scales, found.group) == ("blocks", scales, group)


def test_a_byte_with_two_numbers_is_not_divided():
    weight = random_weight(QUANTIZED["int4 groups"])

    with pytest.raises(ValueError, match="3 to 14 of 14 inputs divides a byte of int4"):
        weight.columns(3, 14)
    with pytest.raises(ValueError, match="divides a byte"):
        weight.columns(0, 5)


def test_stacked_matrices_are_views_that_can_be_written(weight):
    sizes = [4, 4, 2]
    for seed, part in enumerate(weight.split_with_sizes(sizes)):
        part.copy_(random_weight(weight.format, part.shape, seed=7 + seed))

    expected = [
        random_weight(weight.format, (size, 14), seed=7 + i) for i, size in enumerate(sizes)
    ]
    assert torch.equal(weight.dequantize(), torch.cat([it.dequantize() for it in expected]))


def test_stacked_matrices_that_share_scales_are_refused():
    with pytest.raises(ValueError, match=r"outputs \[6, 4\] divide blocks of 4"):
        random_weight(BLOCKS).split_with_sizes([6, 4])
    assert [it.shape for it in random_weight(GROUPS).split_with_sizes([6, 4])] == [(6, 14), (4, 14)]


@pytest.mark.parametrize("factor", [0.25, "of each output"])
def test_a_factor_multiplies_the_values(weight, factor):
    if factor == "of each output":
        factor = torch.rand(SHAPE[0])
    found = weight.scaled(factor)

    column = factor[:, None] if isinstance(factor, torch.Tensor) else factor
    expected = weight.dequantize(torch.float32) * column
    torch.testing.assert_close(found.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-7)
    if weight.format.is_quantized:
        assert found.numbers is weight.numbers
        assert found.format.name == weight.format.name
    else:
        assert found.numbers.dtype is torch.float32


def test_a_factor_of_all_outputs_keeps_blocks():
    weight = random_weight(BLOCKS)

    assert weight.scaled(2.0).format == BLOCKS
    assert weight.scaled(torch.rand(10)).format == dataclasses.replace(BLOCKS, scales="group")


ORDERS = {
    "within blocks": [3, 1, 2, 0, 4, 5, 7, 6, 9, 8],
    "of blocks": [4, 5, 6, 7, 0, 1, 2, 3, 8, 9],
    "across blocks": [9, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    "some": [2, 3, 0],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_outputs_are_permuted(weight, order):
    order = torch.tensor(order)

    found = weight.permuted(order)

    assert found.shape == (len(order), SHAPE[1])
    assert torch.equal(found.dequantize(), weight.dequantize()[order])


@pytest.mark.parametrize("index", [[9, 0, 0, 5], [3], []], ids=["any", "one", "none"])
def test_outputs_are_gathered_in_any_order_and_number(weight, index):
    index = torch.tensor(index, dtype=torch.int64)

    found = weight.gather(index)

    assert torch.equal(found.dequantize(), weight.dequantize()[index])


def test_blocks_keep_their_scales_where_their_outputs_stay_together():
    weight = random_weight(BLOCKS)

    found = {name: weight.permuted(torch.tensor(it)).format.scales for name, it in ORDERS.items()}

    assert found == {
        "within blocks": "block", "of blocks": "block", "across blocks": "group", "some": "block",
    }  # fmt: skip


def test_a_copy_into_a_finer_format_loses_nothing():
    source = random_weight(BLOCKS)
    target = Weight.empty(BLOCKS.divided(0, 3).divided(1, 6), SHAPE, "cpu")

    target.copy_(source)

    assert target.format.group == 2
    assert torch.equal(target.dequantize(), source.dequantize())


def test_a_copy_into_another_format_is_rounded(weight):
    wide, rounded = (
        Weight.empty(unquantized("bfloat16"), SHAPE, "cpu"),
        Weight.empty(FP8_ROWS, SHAPE, "cpu"),
    )

    wide.copy_(weight)
    rounded.copy_(weight)

    assert torch.equal(wide.numbers, weight.dequantize(torch.bfloat16))
    expected = weight if weight.format == FP8_ROWS else quantize(weight.dequantize(), FP8_ROWS)
    assert torch.equal(rounded.dequantize(), expected.dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_rounded(bad):
    values = torch.ones(SHAPE)
    values[3, 4] = bad

    with pytest.raises(ValueError, match="not finite, which float8_e4m3fn cannot hold"):
        Weight.empty(FP8_ROWS, SHAPE, "cpu").copy_(Weight.full(values))
    held = Weight.empty(unquantized("float32"), SHAPE, "cpu")
    held.copy_(Weight.full(values))
    assert torch.equal(held.numbers.isfinite(), values.isfinite())


@pytest.mark.parametrize("form", [FP8_ROWS, BLOCKS, GROUPS, INT8_ROWS], ids=lambda it: it.name)
def test_rounding_is_at_most_half_a_step_away(form):
    values = torch.randn(9, 64) * torch.rand(9, 1) * 3
    values[2] = 0

    found = quantize(values, form)

    error = (found.dequantize() - values).abs()
    largest = found.scale.abs()
    if form.scales != "row":
        largest = largest.repeat_interleave(form.group, 1)
        largest = (
            largest if form.scales == "group" else largest.repeat_interleave(form.group, 0)[:9]
        )
    largest = largest.view(9, -1)
    steps = torch.maximum(values.abs() / 8, largest * 2**-9) if form.float else largest
    assert (error <= 0.5001 * steps).all()
    assert (found.dequantize()[2] == 0).all()


def test_groups_of_4_bits_are_rounded_no_worse_than_with_the_largest_value_at_the_end():
    values = torch.randn(90, 64) * torch.rand(90, 1) * 3
    values[2] = 0
    groups = values.view(90, 2, INT4_GROUPS.group)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    plain = (extreme / -8).half().float()
    numbers = torch.where(plain != 0, groups / plain, 0).round().clamp(-8, 7)

    found = quantize(values, INT4_GROUPS).dequantize()

    error = (groups.abs() * (found.view_as(groups) - groups).square()).sum(-1)
    plain_error = (groups.abs() * (numbers * plain - groups).square()).sum(-1)
    assert (error <= plain_error * 1.0001).all()
    assert (found[2] == 0).all()


def test_float8_blocks_and_groups_use_all_numbers():
    for form in (BLOCKS, GROUPS):
        numbers = quantize(torch.randn(8, 8), form).numbers.float().abs()
        largest = numbers.unfold(1, 4, 4).amax(2)
        largest = largest.unfold(0, 4, 4).amax(2) if form.scales == "block" else largest
        assert (largest == 448).all()


def test_rows_of_one_number_have_the_scales_of_float8_rows():
    values = torch.randn(5, 16)
    one_group = WeightFormat("one", 8, group=16, scales="group")

    found, expected = quantize(values, one_group), quantize(values, FP8_ROWS)

    assert torch.equal(found.scale[:, 0], expected.scale)
    assert torch.equal(found.dequantize(), expected.dequantize())


BFLOAT16 = unquantized("bfloat16")
FOUR_BITS = WeightFormat("four", 4, 4, "group", shifts=True, float=False, scale_dtype="float16")
SIX_BITS = WeightFormat("six", 8, 2, "group", float=False)
UNSIGNED = WeightFormat("unsigned", 8, 4, "group", float=False, offset=128, scale_dtype="float16")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(BLOCKS, 8), (BLOCKS, 4), (BLOCKS, 3)], BLOCKS),
        ([(BLOCKS, 6), (BLOCKS, 2)], dataclasses.replace(BLOCKS, scales="group")),
        ([(BLOCKS, 8), (dataclasses.replace(BLOCKS, scales="group"), 4)], dataclasses.replace(BLOCKS, scales="group")),
        (
            [(BLOCKS, 8), (dataclasses.replace(BLOCKS, scales="group", group=2), 4)],
            dataclasses.replace(BLOCKS, scales="group", group=2),
        ),
        ([(FP8_ROWS, 3), (FP8_ROWS, 5)], FP8_ROWS),
        ([(BLOCKS, 8), (BFLOAT16, 8)], None),
        ([(BFLOAT16, 8), (BLOCKS, 8)], None),
        ([(BFLOAT16, 8), (BFLOAT16, 8)], None),
        (
            [(FOUR_BITS, 3), (SIX_BITS, 5)],
            WeightFormat("four+six", 8, 2, "group", shifts=True, float=False, scale_dtype="float32"),
        ),
        (
            [(FOUR_BITS, 3), (dataclasses.replace(FOUR_BITS, name="other", offset=8), 2), (UNSIGNED, 1)],
            WeightFormat("four+other+unsigned", 8, 4, "group", shifts=True, float=False, scale_dtype="float16"),
        ),
        ([(FOUR_BITS, 3), (dataclasses.replace(UNSIGNED, offset=0, name="wide"), 5)],
         WeightFormat("four+wide", 8, 4, "group", shifts=True, float=False, scale_dtype="float16")),
        ([(FOUR_BITS, 3), (dataclasses.replace(UNSIGNED, offset=7), 5)], None),
        ([(FOUR_BITS, 3), (INT8_ROWS, 5)], None),
        ([(FOUR_BITS, 3), (GROUPS, 5)], None),
        ([(FOUR_BITS, 3), (BFLOAT16, 5)], None),
    ],
)  # fmt: skip
def test_stacked_matrices_have_the_format_that_holds_all_of_them(parts, expected):
    weights = [random_weight(form, (rows, 14)) for form, rows in parts]

    found = stacked_format(weights)

    assert found == expected
    if found is not None:
        stacked = Weight.empty(found, (sum(rows for _, rows in parts), 14), "cpu")
        for part, weight in zip(
            stacked.split_with_sizes([rows for _, rows in parts]), weights, strict=True
        ):
            part.copy_(weight)
        assert torch.equal(stacked.dequantize(), torch.cat([it.dequantize() for it in weights]))


def test_parts_can_be_planned_without_memory(weight):
    planned = Weight.empty(weight.format, SHAPE, "meta")
    order = torch.randperm(10)

    for change in (
        lambda it: it.rows(3, 9).columns(2, 8),
        lambda it: it.permuted(order),
        lambda it: it.scaled(torch.ones(10)) if it.format.is_quantized else it,
    ):
        found, expected = change(planned), change(weight)
        assert found.format == expected.format
        shapes = {name: it.shape for name, it in found.tensors.items()}
        assert shapes == {name: it.shape for name, it in expected.tensors.items()}


def test_a_problem_has_the_bytes_of_its_numbers():
    found = {
        form.name: LinearProblem(1, 64, 32, format=form).weight_bytes
        for form in (FP8_ROWS, INT4_GROUPS, unquantized("float32"))
    }

    # Without scales, full numbers have the dtype of the inputs.
    assert found == {"float8_e4m3fn": 64 * 32, "int4": 64 * 16, "float32": 64 * 32 * 2}


def test_formats_are_compared_by_value():
    assert unquantized(torch.bfloat16) == unquantized("bfloat16")
    assert {INT4_GROUPS, dataclasses.replace(INT4_GROUPS), INT8_ROWS} == {INT4_GROUPS, INT8_ROWS}


@pytest.fixture(params=["int4 groups with shifts", "fp8 rows", "signed rows", "fp8 groups"])
def ordered(request):
    """A matrix, and one with its columns sorted."""
    plain = random_weight(QUANTIZED[request.param])
    return plain, plain.with_columns_sorted(torch.randperm(SHAPE[1]).int())


def test_a_matrix_has_its_columns_in_their_own_order_again(ordered):
    plain, weight = ordered
    stored = plain.unpacked()[:, weight.order]
    assert torch.equal(weight.in_stored_order().unpacked(), stored)
    with pytest.raises(AssertionError, match="gather the inputs"):
        weight.unpacked()
    assert weight.tensors.keys() == {*plain.tensors, "order"}

    values = weight.dequantize()

    assert torch.equal(values[:, weight.order], weight.in_stored_order().dequantize())
    x = torch.randn(3, SHAPE[1])
    torch.testing.assert_close(
        x @ values.t(), x[:, weight.order] @ weight.in_stored_order().dequantize().t()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.rows(2, 9),
        lambda it: it.permuted(torch.tensor([3, 1, 8])),
        lambda it: it.scaled(torch.arange(1.0, 11)),
        lambda it: it.detach(),
        lambda it: it.to(torch.device("cpu")),
        lambda it: it.columns(0, SHAPE[1]),
    ],
)
def test_what_changes_outputs_keeps_the_order(ordered, change):
    weight = ordered[1]

    found = change(weight)

    assert found.format.ordered
    full = change(Weight.full(weight.dequantize()))
    torch.testing.assert_close(found.dequantize(), full.dequantize())


def test_some_inputs_of_a_matrix_with_an_order_are_full_numbers(ordered):
    weight = ordered[1]

    found = weight.columns(2, 8)

    assert not found.format.is_quantized
    assert torch.equal(found.numbers, weight.dequantize()[:, 2:8])


def test_matrices_are_stacked_with_one_order_only(ordered):
    weight = ordered[1]
    same = dataclasses.replace(weight, order=weight.order.clone())
    other = dataclasses.replace(weight, order=weight.order.flip(0))

    assert stacked_format([weight, same]) == weight.format
    assert stacked_format([weight, other]) is None
    assert stacked_format([weight, weight.in_stored_order()]) is None
    stacked = Weight.empty(weight.format, (2 * SHAPE[0], SHAPE[1]), "cpu")
    for part, its in zip(stacked.split_with_sizes([SHAPE[0]] * 2), (weight, same), strict=True):
        part.copy_(its)
    assert torch.equal(stacked.dequantize(), weight.dequantize().repeat(2, 1))


def test_matrices_whose_numbers_mean_something_else_are_not_stacked():
    plain = random_weight(WeightFormat("it", 8, scales="row", float=False))
    for form in (
        dataclasses.replace(plain.format, offset=128),
        dataclasses.replace(plain.format, shifts=True),
        dataclasses.replace(plain.format, scales="group", group=4),
    ):
        assert stacked_format([plain, random_weight(form)]) is None


def test_the_bytes_of_a_matrix_are_those_of_its_tensors(ordered):
    for weight in ordered:
        bits = sum(it.nbytes for it in weight.tensors.values())
        assert weight.format.num_bytes(SHAPE) == bits


@pytest.mark.parametrize("shifts", [False, True], ids=["", "shifts"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", ["row", "group", "block"])
def test_whole_numbers_of_any_format_are_at_most_half_a_step_away(shifts, bits, scales):
    form = WeightFormat("it", bits, 4 if scales != "row" else 0, scales, shifts, float=False)
    form = dataclasses.replace(form, offset=2 ** (bits - 1))
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    found = quantize(values, form)

    steps = found.scale
    if scales == "block":
        steps = steps.repeat_interleave(4, 0)[: SHAPE[0]]
    steps = steps[:, None] if scales == "row" else steps.repeat_interleave(4, 1)[:, : SHAPE[1]]
    assert bool(((found.dequantize() - values).abs() <= 0.501 * steps).all())
