"""The work items of a Hopper prefill: every tile once for every head, the short tiles of the last heads at the end.

The list is made in Triton's interpreter; the device function that looks up items in it runs as Python.
"""

from __future__ import annotations

import random
import types
from types import SimpleNamespace

import pytest
import torch

from kernels.attention.problem import PackedBatch, PagedBatch
from tests.kernels import triton_interpreter

pytestmark = triton_interpreter.interpreted

GROUP, BLOCK_M = 4, 64


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


# Query tokens and keys of each sequence.
STEPS = [
    [(1, 1)],
    [(1, 0)],
    [(0, 40)],
    [(200, 200)] * 2,
    [(100, 100), (16, 16), (0, 40), (170, 170), (64, 900), (5, 3), (5, 0)],
    [(40, 7), (33, 20), (90, 4096)],
]


def random_step():
    pick = random.Random(3)
    queries = [pick.choice((0, 1, 40, 90)) for _ in range(12)]
    return [(new, max(0, new + pick.choice((-30, 0, 0, 100)))) for new in queries]


def plan(step, *, num_heads, num_sms, causal=True, window=None, packed=False):
    from kernels.attention.hopper.work_items import plan_items

    queries, keys = (
        torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*step, strict=True)
    )
    bounds = {
        "num_tokens": int(queries.sum()),
        "max_seqlen_q": int(queries.max()),
        "max_seqlen_k": int(keys.max()),
    }
    if packed:
        batch = PackedBatch(offsets(queries), offsets(keys), **bounds)
    else:
        batch = PagedBatch(
            offsets(queries), keys, torch.zeros((len(step), 1), dtype=torch.int32), **bounds
        )
    return plan_items(
        batch, GROUP, BLOCK_M, num_heads=num_heads, num_sms=num_sms, causal=causal, window=window
    )


def offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def taken(items, num_heads):
    """Return (head, tile) of every item in the order in which thread blocks fetch them, without unused entries."""
    from kernels.attention.hopper import producer as hopper_producer

    memory = items.tiles.flatten().tolist()
    num_long = int(items.tiles[-1, 0])
    language = SimpleNamespace(
        load=memory.__getitem__, where=lambda asked, yes, no: yes if asked else no, maximum=max
    )
    look_up = types.FunctionType(
        hopper_producer.read_item.fn.__code__, {"gl": language, "TILE_FIELDS": 6}
    )
    heads = SimpleNamespace(HEADS=num_heads * GROUP, GROUP=GROUP)
    found = [
        look_up(0, item, items.num_entries, items.late_heads, num_long, heads)
        for item in range(items.num_entries * num_heads)
    ]
    return [(head, (seq, *rest)) for seq, head, *rest in found if seq >= 0]


def seen(tile, causal=True):
    """Return the keys that a tile's last row sees; negative if its queries precede the first key."""
    _, row, _, queries, _, keys = tile
    last = min((row + BLOCK_M - 1) // GROUP, queries - 1)
    return keys - queries + last + 1 if causal else keys


@pytest.mark.parametrize("step", [*STEPS, random_step()], ids=lambda step: f"{len(step)} seqs")
@pytest.mark.parametrize(
    ("kind", "num_sms", "num_heads"),
    [("paged", 1, 3), ("packed", 7, 3), ("full", 1000, 1), ("window", 2, 3)],
)
def test_every_head_has_every_tile_once(step, kind, num_sms, num_heads):
    more = {"packed": kind == "packed", "causal": kind != "full"}
    window = 50 if kind == "window" else None
    items = plan(step, num_heads=num_heads, num_sms=num_sms, window=window, **more)

    q_starts, k_starts = (offsets(torch.tensor(lengths)) for lengths in zip(*step, strict=True))
    assert sorted(taken(items, num_heads)) == [
        (
            head,
            (seq, row, q_starts[seq], queries, k_starts[seq] if kind == "packed" else 0, keys),
        )
        for head in range(num_heads)
        for seq, (queries, keys) in enumerate(step)
        for row in range(0, queries * GROUP, BLOCK_M)
    ]


@pytest.mark.parametrize("step", [*STEPS, random_step()], ids=lambda step: f"{len(step)} seqs")
@pytest.mark.parametrize(("kind", "num_sms"), [("paged", 1), ("full", 2), ("window", 2)])
def test_a_launch_ends_with_short_tiles_longest_first(step, kind, num_sms):
    causal = kind != "full"
    window = 50 if kind == "window" else None
    items = plan(step, num_heads=3, num_sms=num_sms, causal=causal, window=window)
    order = taken(items, 3)
    num_long = int(items.tiles[-1, 0])
    first_late = 3 - items.late_heads
    tiles = len(order) // 3
    split = tiles * first_late + num_long * items.late_heads
    most = max([keys for _, keys in step], default=0)
    most = min(most, window or most)

    short = [seen(tile, causal) for _, tile in order[split:]]
    assert short == sorted(short, reverse=True)
    assert all(keys <= most * 3 / 4 for keys in short)
    assert {head for head, _ in order[split:]} <= set(range(first_late, 3))
    long = [(head, -tile[5]) for head, tile in order[:split]]
    assert long == sorted(long)
    for head in range(3):
        for seq in range(len(step)):
            rows = [tile[1] for h, tile in order[:split] if (h, tile[0]) == (head, seq)]
            assert rows == sorted(rows, reverse=True)


def test_at_most_eight_tiles_per_sm_are_short_and_they_are_the_shortest():
    items = plan([(256, 256)] * 2, num_heads=1, num_sms=1)

    assert int(items.tiles[-1, 0]) == 32 - 8
    assert [seen(tile) for _, tile in taken(items, 1)[-8:]] == [64, 64, 48, 48, 32, 32, 16, 16]


def test_the_last_heads_are_as_few_as_fill_the_gpu():
    step = [(256, 256)] * 2

    assert [plan(step, num_heads=8, num_sms=n).late_heads for n in (1, 10, 132)] == [1, 2, 8]


def test_no_tile_is_short_if_histories_are_long():
    items = plan([(256, 5000)] * 2, num_heads=2, num_sms=132)

    assert int(items.tiles[-1, 0]) == 32
