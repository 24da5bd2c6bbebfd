"""The list of tiles and parts of a batch-invariant step, made in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from tests.kernels import triton_interpreter

pytestmark = triton_interpreter.interpreted

GROUP, BLOCK_M, PART, COUNTERS = 4, 64, 64, 3
# Query tokens and keys of each sequence.
STEPS = [
    [(1, 1)],
    [(1, 0)],
    [(0, 40), (1, 64)],
    [(1, 65), (1, 640), (1, 64), (1, 300)],
    [(200, 200), (16, 300), (0, 40), (17, 170), (1, 900), (5, 5), (1, 0)],
]


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


def random_step():
    pick = random.Random(3)
    queries = [pick.choice((0, 1, 16, 90)) for _ in range(20)]
    return [(new, new + pick.choice((0, 0, 100, 700))) for new in queries]


def listed(monkeypatch, step, window=None, most_rows=1 << 20, shares=1):
    """Return the list, and its used records in order."""
    from kernels.attention.portable import part_list

    monkeypatch.setattr(part_list, "MOST_PART_ROWS", most_rows)
    queries, keys = (
        torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*step, strict=True)
    )
    offsets = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    table = torch.zeros((len(step), 1), dtype=torch.int32)
    most = int(queries.max()), int(keys.max())
    batch = PagedBatch(offsets, keys, table, int(queries.sum()), *most)
    asked = AttentionProblem(
        Phase.PREFILL, "bfloat16", 4, 1, 64, 16, 0.125, window, batch_invariant=True
    )
    made = part_list.PartList(
        asked, batch, group=GROUP, block_m=BLOCK_M, part_tokens=PART, counters=COUNTERS, shares=shares
    )  # fmt: skip
    first, *records = made.records.tolist()
    assert all(record[0] == -1 for record in records[first[0] :])
    return made, records[: first[0]]


def expected_parts(queries, keys, window):
    """Return the parts of a sequence whose queries are a single tile; None if it has a single one."""
    first = max(keys - queries - window + 1, 0) // PART if window else 0
    parts = range(first, -(-keys // PART))
    return list(parts) if len(parts) > 1 else None


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("step", [*STEPS, random_step()], ids=lambda step: f"{len(step)} seqs")
def test_every_tile_is_listed_once_or_in_parts(step, window, monkeypatch):
    made, records = listed(monkeypatch, step, window)

    expected, lines, start = [], 0, 0
    for seq, (queries, keys) in enumerate(step):
        rows = range(0, queries * GROUP, BLOCK_M)
        parts = expected_parts(queries, keys, window) if len(rows) == 1 else None
        if parts is None:
            entries = [(row, -1, len(rows), n) for n, row in enumerate(reversed(rows))]
        else:
            entries = [(0, part, len(parts), n) for n, part in enumerate(parts)]
            assert made.arrivals[lines].tolist() == [0] * COUNTERS
        expected += [
            [seq, row, start, queries, keys, part, lines, count, made.part_rows, n]
            for row, part, count, n in entries
        ]
        lines += len(parts or ())
        start += queries
    assert sorted(records) == sorted(expected)


def test_entries_with_more_keys_come_first_and_the_last_tiles_before_the_first(monkeypatch):
    _, records = listed(monkeypatch, random_step())

    keys = [PART if part >= 0 else num_keys for _, _, _, _, num_keys, part, *_ in records]
    assert keys == sorted(keys, reverse=True)
    for seq in {record[0] for record in records}:
        rows = [record[1] for record in records if record[0] == seq]
        assert rows == sorted(rows, reverse=True)


def test_no_more_parts_are_listed_than_have_memory(monkeypatch):
    # The second sequence has ten parts, which do not fit; the counts of those after it do not either.
    made, records = listed(monkeypatch, STEPS[3], most_rows=8 * GROUP)

    assert made.most_parts == 8
    assert [(record[0], record[5]) for record in records if record[5] >= 0] == [(0, 0), (0, 1)]
    assert sorted(record[0] for record in records if record[5] < 0) == [1, 2, 3]


def test_the_tiles_of_a_key_value_head_share_the_memory_for_parts(monkeypatch):
    made, records = listed(monkeypatch, STEPS[3], most_rows=8 * GROUP, shares=3)

    assert made.most_parts == 2
    assert [(record[0], record[5]) for record in records if record[5] >= 0] == [(0, 0), (0, 1)]
