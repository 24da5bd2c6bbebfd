"""Layouts of the operands of one sequence's products on tensor cores: what a thread reads, and the banks."""

import pytest

from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from kernels.step.gpu import tensor_products

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

LINE = 128
"""Bytes that shared memory delivers at once."""
WARPS, LANES = 8, 32
IN_FP8 = pytest.mark.parametrize("fp8", [False, True])


def places(layout):
    """Return the offset of each element of a layout, by its coordinates."""
    layout = getattr(layout, "value", layout)
    found = [(0,) * len(layout.offset_bases[0])]
    for basis in layout.offset_bases:
        found += [tuple(a ^ b for a, b in zip(it, basis, strict=True)) for it in found]
    assert len(set(found)) == len(found)
    return {coordinates: offset for offset, coordinates in enumerate(found)}


def inner(lane):
    """Return the inner indices of m16n8k16 whose numbers a lane has, of both operands."""
    return [2 * (lane % 4) + i for i in (0, 1, 8, 9)]


def assert_read_at_once(offsets, size):
    """Require each lane's elements to be adjacent and aligned, and each 128 bytes of lanes to be in different banks."""
    count = len(offsets[0])
    starts = [min(it) for it in offsets]
    for start, it in zip(starts, offsets, strict=True):
        assert sorted(it) == list(range(start, start + count))
        assert start % count == 0
    lanes = LINE // (count * size)
    for first in range(0, LANES, lanes):
        assert len({start * size % LINE for start in starts[first : first + lanes]}) == lanes


@IN_FP8
def test_a_thread_reads_eight_adjacent_weights_of_a_row_without_bank_conflicts(fp8):
    at = places(tensor_products.weights_operand(fp8))
    for warp in range(WARPS):
        offsets = [
            [at[warp, lane // 4 + half, k] for half in (0, 8) for k in inner(lane)]
            for lane in range(LANES)
        ]
        assert_read_at_once(offsets, 1 if fp8 else 2)
        for lane, it in enumerate(offsets):
            assert {offset // 256 for offset in it} == {lane // 4}


@IN_FP8
def test_a_thread_reads_four_adjacent_elements_of_the_vector_without_bank_conflicts(fp8):
    at = places(tensor_products.vector_operand(fp8))
    for warp in range(WARPS):
        assert_read_at_once(
            [[at[warp, k, lane // 4] for k in inner(lane)] for lane in range(LANES)], 2
        )


@IN_FP8
def test_the_vector_is_stored_without_bank_conflicts(fp8):
    at = places(tensor_products.vector_layout((1024,), fp8))
    for warp in range(WARPS):
        first = 4 * LANES * warp
        assert_read_at_once(
            [[at[(first + 4 * lane + i,)] for i in range(4)] for lane in range(LANES)], 2
        )


@IN_FP8
def test_both_operands_have_the_same_columns(fp8):
    """Each product of a row's half and its column of the vector adds products of the same columns."""
    log2 = 4 if fp8 else 3
    weights = places(tensor_products.weights_operand(fp8))
    vector = {offset: it for it, offset in places(tensor_products.vector_operand(fp8)).items()}
    stored = places(tensor_products.vector_layout((1024,), fp8))
    for (warp, row, k), offset in weights.items():
        column = offset % 256 ^ (row % 8) << log2
        for part in range(4):
            assert vector[stored[(256 * part + column,)]] == (warp, k, 2 * part + row // 8)


@IN_FP8
def test_a_vector_of_blocks_lies_like_one_of_elements(fp8):
    flat = places(tensor_products.vector_layout((2048,), fp8))
    blocks = places(tensor_products.vector_layout((128, 16), fp8))

    assert all(flat[(16 * row + column,)] == offset for (row, column), offset in blocks.items())
