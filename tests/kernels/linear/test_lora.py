"""What adapters add to the rows of a step, in PyTorch and in Triton's interpreter."""

import pytest
import torch

from kernels.linear.lora import LoraRows, LoraWeights, add_lora
from tests.kernels import triton_interpreter
from tests.kernels.references.problems import assert_no_worse_than

PARTS = {"qkv": (64, 32, 32), "gate and up": (80, 80), "down": (72,)}
SEQUENCES = {
    "mixed": [(0, 1, 2), (1, 2, -1), (2, 3, 0), (3, 4, 2), (4, 9, 1), (9, 30, -1), (30, 37, 2)],
    "none": [(0, 5, -1)],
    "one row": [(0, 1, 1)],
    "one for all": [(0, 20, 1)],
}


def weights(parts, rank=16, inputs=136, dtype=torch.float32, slots=3):
    a = torch.randn(slots, len(parts), rank, inputs) * inputs**-0.5
    b = torch.randn(slots, rank, sum(parts)) * rank**-0.5
    a[1, :, rank // 2 :] = 0  # an adapter of a lower rank
    return LoraWeights(a.to(dtype), b.to(dtype), parts)


def rows_of(sequences):
    slots = torch.full((sequences[-1][1],), -1, dtype=torch.int32)
    for first, stop, slot in sequences:
        slots[first:stop] = slot
    return LoraRows(slots, None, [it for it in sequences if it[2] >= 0])


def on_a_gpu(rows, *, listed=True):
    """Return rows as the kernels read them, with or without a list of tiles."""
    from kernels.linear.gpu.lora import sorted_rows

    found = sorted_rows(rows.slots)
    return found if listed else found._replace(tiles=None)


def formula(x, y, it, slots):
    """Compute row by row."""
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for part, (start, stop) in enumerate(it.bounds):
                low = it.a[slot, part].to(x.dtype) @ x[row]
                expected[row, start:stop] += low @ it.b[slot, :, start:stop].to(x.dtype)
    return expected


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_each_row_gets_the_result_of_its_adapter(parts, sequences):
    it, rows = weights(parts), rows_of(sequences)
    x, y = torch.randn(len(rows.slots), 136), torch.randn(len(rows.slots), sum(parts))
    expected = formula(x, y, it, rows.slots)

    found = add_lora(x, y.clone(), it, rows)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    without = rows.slots < 0
    assert torch.equal(found[without], y[without])


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_on_a_cpu_a_row_has_the_same_bits_beside_any_other_adapters(rank):
    it = weights(PARTS["qkv"], rank)
    x, y = torch.randn(40, 136), torch.randn(40, 128)
    alone = {}
    for slot in range(3):
        rows = rows_of([(0, 3, -1), (3, 4, slot), (4, 30, -1), (30, 37, slot), (37, 40, -1)])
        alone[slot] = add_lora(x, y.clone(), it, rows)

    for first in range(3):
        for second in range(3):
            others = [(0, 3, second), (3, 4, first), (4, 30, first), (30, 37, second), (37, 40, 1)]
            mixed = add_lora(x, y.clone(), it, rows_of(others))
            assert torch.equal(mixed[3], alone[first][3])
            assert torch.equal(mixed[30:37], alone[second][30:37])


@triton_interpreter.interpreted
@pytest.mark.parametrize("count", [1, 15, 40, 256])
def test_tiles_are_neighbours_of_one_slot_and_have_every_row_with_an_adapter_once(count):
    from kernels.linear.gpu.lora import sorted_rows

    for slots in (1, 3, 64):
        of_rows = torch.randint(-1, slots, (count,), dtype=torch.int32)
        with triton_interpreter.poisoned_memory():
            rows = sorted_rows(of_rows)

        found = []
        for first, stop, slot in rows.tiles.T.tolist():
            of_tile = rows.order[first:stop]
            assert len(of_tile) <= 16
            assert (slot >= 0) == (len(of_tile) > 0)
            assert (of_rows[of_tile] == slot).all()
            found += of_tile.tolist()
        assert sorted(found) == (of_rows >= 0).nonzero().flatten().tolist()
        used = int((rows.tiles[2] >= 0).sum())
        assert (rows.tiles[2, :used] >= 0).all()
        assert used <= min(count, -(-count // 16) + slots)


@triton_interpreter.interpreted
@pytest.mark.parametrize("listed", [True, False], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_the_kernels_agree_with_the_formula(parts, sequences, dtype, listed):
    from kernels.linear.gpu.lora import begin_lora

    inputs = 1100  # several parts of the columns, none of which is a multiple of a tile
    it, rows = weights(parts, inputs=inputs, dtype=dtype), rows_of(sequences)
    x = torch.randn(len(rows.slots), inputs).to(dtype)
    y = torch.randn(len(rows.slots), sum(parts)).to(dtype)
    truth = formula(x.double(), y.double(), it, rows.slots)
    plain = add_lora(x, y.clone(), it, rows)

    with triton_interpreter.poisoned_memory():
        found = begin_lora(x, it, on_a_gpu(rows, listed=listed))(y.clone())

    assert_no_worse_than(found, truth, plain, atol=1e-5)
    without = rows.slots < 0
    assert torch.equal(found[without], y[without])


@triton_interpreter.interpreted
@pytest.mark.parametrize("rank", [16, 64, 128])
def test_a_row_of_the_kernels_has_the_same_bits_beside_any_other_adapters(rank):
    from kernels.linear.gpu.lora import begin_lora

    it = weights(PARTS["qkv"], rank, inputs=1100, dtype=torch.bfloat16)
    x, y = torch.randn(40, 1100).bfloat16(), torch.randn(40, 128).bfloat16()
    found = {}
    for slot in range(3):
        alone = on_a_gpu(rows_of([(0, 11, -1), (11, 12, slot)]))
        found[slot] = begin_lora(x[:12], it, alone)(y[:12].clone())[11]

    for first in range(3):
        for slot in range(3):
            rows = rows_of([(0, 5, first), (5, 11, 2), (11, 12, slot), (12, 30, -1), (30, 40, 0)])
            for listed in (True, False):
                mixed = on_a_gpu(rows, listed=listed)
                assert torch.equal(begin_lora(x, it, mixed)(y.clone())[11], found[slot])
