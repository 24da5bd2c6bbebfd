"""What loading changes in the tensors of a checkpoint, and that saving and sharding agree with it."""

import pytest
import torch

from model.checkpoint.parameter_parts import ParameterPart, Rows
from model.network.parallel import Section

HEADS, KV_HEADS, DIM, COLUMNS = 4, 2, 6, 5
ORDER = (0, 2, 4, 1, 3, 5)
QKV = {
    "plain": (Rows(24), Rows(12), Rows(12)),
    "in another order": (Rows(24, order=ORDER), Rows(12, order=ORDER), Rows(12)),
    "with a factor": (Rows(24, factor=0.3), Rows(12, factor=3.0), Rows(12)),
    "with an offset": (Rows(24, offset=1.0), Rows(12), Rows(12, factor=2.0, offset=-1.0)),
    "of one module": (Rows(48, order=ORDER),),
}


def part(rows, shape=(48, COLUMNS), **options):
    return ParameterPart("qkv", torch.empty(shape), rows, **options)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rows", QKV.values(), ids=QKV)
def test_a_saved_tensor_is_that_which_was_loaded(rows, transposed):
    stored = torch.randn((COLUMNS, 48) if transposed else (48, COLUMNS))
    held = part(rows, transposed=transposed)

    assert held.stored_shape == stored.shape
    held.load(stored)

    torch.testing.assert_close(held.to_stored(torch.float32), stored, rtol=1e-6, atol=1e-6)


def test_rows_of_a_head_are_loaded_in_the_stated_order_with_factor_and_offset():
    stored = torch.arange(48.0)
    held = part((Rows(24, order=ORDER), Rows(12, factor=0.5), Rows(12, offset=1.0)), (48,))

    held.load(stored)

    assert held.values[:12].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(held.values[24:36], stored[24:36] / 2)
    assert torch.equal(held.values[36:], stored[36:] + 1)


def test_rows_that_are_grouped_by_key_value_heads_are_loaded_by_module():
    q, k, v = torch.randn(HEADS, DIM, COLUMNS), *torch.randn(2, KV_HEADS, DIM, COLUMNS)
    groups = [torch.cat((*q[2 * i : 2 * i + 2], k[i], v[i])) for i in range(KV_HEADS)]
    stored = torch.cat(groups)
    held = part(QKV["plain"], grouped_by=DIM)

    held.load(stored)

    assert torch.equal(held.values, torch.cat([it.flatten(0, 1) for it in (q, k, v)]))
    assert torch.equal(held.to_stored(torch.float32), stored)


@pytest.mark.parametrize("grouped_by", [None, DIM], ids=["stacked", "grouped"])
@pytest.mark.parametrize("rows", [QKV["plain"], QKV["in another order"]], ids=["plain", "order"])
def test_a_rank_gets_its_heads_of_each_module(rows, grouped_by):
    stored = torch.randn(48, COLUMNS)
    whole = part(rows, grouped_by=grouped_by)
    whole.load(stored)
    halves = [
        Rows(it.count // 2, order=it.order, sections=(Section(it.count // 2, it.count, 1),))
        for it in rows
    ]

    for rank in range(2):
        held = part(tuple(halves), (24, COLUMNS), grouped_by=grouped_by)
        held.load(stored, rank)

        modules = whole.values.split([it.count for it in rows])
        assert torch.equal(held.values, torch.cat([it.chunk(2)[rank] for it in modules]))


def test_a_rank_gets_its_rows_of_each_section_of_a_module():
    stored = torch.arange(20.0)
    sections = Section(4, 8, 1), Section(2, 4, 1), Section(8, 8, 2)

    for rank in range(2):
        held = part((Rows(14, sections=sections),), (14,))
        held.load(stored, rank)

        ranges = range(4 * rank, 4 * rank + 4), range(8 + 2 * rank, 10 + 2 * rank), range(12, 20)
        assert held.values.tolist() == [float(it) for their in ranges for it in their]
