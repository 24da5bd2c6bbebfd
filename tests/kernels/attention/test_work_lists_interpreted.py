"""The kernels that list a step's work on the device, and the scatter kernel, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.registry import REGISTRY
from kernels.attention.select import Selection
from kernels.attention.splits import splits_wanted
from tests.kernels import triton_interpreter
from tests.kernels.attention.reference_splits import plan_splits
from tests.kernels.references import reference

pytestmark = triton_interpreter.interpreted


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


# Query tokens and keys of each sequence.
STEPS = [
    [(1, 1)],
    [(1, 0)],
    [(1, 31), (1, 32), (1, 33)],
    [(1, 5000), (1, 3), (2, 0), (1, 700), (0, 40)],
    [(3, 3), (4, 4000), (1, 4000), (2, 64)],
]


def plan(phase, step, launch, num_sms=20, packed=False, **more):
    """Plan a step with the portable kernel of a phase."""
    from kernels.attention.portable.launch import PortableDecode, PortablePrefill

    size = None if packed else 16
    problem = AttentionProblem(phase, "float16", 6, 2, 64, size, 1.0, max_query_tokens=4, **more)
    tuned = TunedLaunch(launch, None, "for the test", measured=False)
    arch = dataclasses.replace(CATALOGUE["a100"], num_sms=num_sms)
    selection = Selection(REGISTRY[0], arch, (tuned,), "for the test", ())
    bounds = {
        "num_tokens": sum(queries for queries, _ in step),
        "max_seqlen_q": max(queries for queries, _ in step),
        "max_seqlen_k": max(keys for _, keys in step),
    }
    queries, keys = (
        torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*step, strict=True)
    )
    if packed:
        batch = PackedBatch(offsets(queries), offsets(keys), **bounds)
    else:
        table = torch.zeros((len(step), 1), dtype=torch.int32)
        batch = PagedBatch(offsets(queries), keys, table, **bounds)
    return (PortableDecode if phase is Phase.DECODE else PortablePrefill)(problem, batch, selection)


def offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def random_step():
    pick = random.Random(7)
    return [(pick.randint(0, 4), pick.choice((0, 16, 100, 3000))) for _ in range(9)]


@pytest.mark.parametrize("step", [*STEPS, random_step()], ids=lambda step: f"{len(step)} seqs")
@pytest.mark.parametrize("window", [None, 100])
def test_the_device_splits_a_decode_like_the_reference(step, window):
    launch = LaunchConfig(16, 32, 4, 1, programs_per_sm=2)

    made = plan(Phase.DECODE, step, launch, sliding_window=window)

    firsts = [max(0, keys - queries - window + 1) if window else 0 for queries, keys in step]
    ranges = [(first, keys) for first, (_, keys) in zip(firsts, step, strict=True)]
    wanted = splits_wanted(20, 2, made._arguments["arrivals"].shape[1])
    expected = plan_splits(ranges, 32, wanted)
    found = [tuple(row) for row in made._arguments["work"].tolist() if row[0] >= 0]
    assert [(seq, begin, end) for seq, _, _, _, begin, end, _, _ in found] == expected
    starts = offsets(torch.tensor([queries for queries, _ in step]))
    for seq, start, queries, keys, _, _, _, count in found:
        assert (start, queries, keys) == (starts[seq], *step[seq])
        assert [row[6] for row in found if row[0] == seq] == list(range(count))
    assert torch.equal(made._arguments["arrivals"], torch.zeros_like(made._arguments["arrivals"]))


@pytest.mark.parametrize("step", [*STEPS, random_step()], ids=lambda step: f"{len(step)} seqs")
@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
@pytest.mark.parametrize("block_m", [16, 64])
def test_the_tiles_of_a_prefill_cover_every_row_once_in_order_of_length(step, packed, block_m):
    made = plan(Phase.PREFILL, step, LaunchConfig(block_m, 32, 4, 1), packed=packed)

    tiles = [tuple(row) for row in made._arguments["work"].tolist() if row[0] >= 0]
    group = 3
    expected = {
        (seq, row)
        for seq, (queries, _) in enumerate(step)
        for row in range(0, queries * group, block_m)
    }
    assert sorted(tile[:2] for tile in tiles) == sorted(expected)
    q_starts, k_starts = (offsets(torch.tensor(lengths)) for lengths in zip(*step, strict=True))
    for seq, _, q_start, queries, k_start, keys in tiles:
        assert (q_start, queries, keys) == (q_starts[seq], *step[seq])
        assert k_start == (k_starts[seq] if packed else 0)
    # Sequences are ordered by length, the tiles of a sequence by the keys that their last row sees.
    assert [tile[5] for tile in tiles] == sorted((tile[5] for tile in tiles), reverse=True)
    for seq in range(len(step)):
        rows = [tile[1] for tile in tiles if tile[0] == seq]
        assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [[7], [-1], [5, -1, 0], [47, 2, 17, 16, 15]], ids=str)
def test_the_scatter_writes_to_its_slots_and_nowhere_else(dtype, index, slots):
    from kernels.attention.portable.write_kv import write_kv

    kv = torch.randn(2, 3, 16, 3, 40).to(dtype)
    wide = torch.randn(len(slots), 10, 40).to(dtype)
    k, v = wide[:, 3:6], wide[:, 6:9]
    expected = reference.write_kv(k, v, kv, slots)

    write_kv(k, v, kv, torch.tensor(slots, dtype=index))

    assert torch.equal(kv, expected)


def test_the_scatter_supports_any_strides_of_tokens_and_heads():
    from kernels.attention.portable.write_kv import write_kv

    kv = torch.randn(2, 3, 16, 2, 64)
    k = torch.randn(2, 4, 64).transpose(0, 1)
    v = torch.randn(4, 2, 70)[:, :, 3:67]
    expected = reference.write_kv(k, v, kv, [9, 3, -1, 40])

    write_kv(k, v, kv, torch.tensor([9, 3, -1, 40], dtype=torch.int32))

    assert torch.equal(kv, expected)


def test_the_scatter_writes_past_two_to_the_thirty_one_elements():
    from kernels.attention.portable.write_kv import write_kv

    blocks = 2**31 // (16 * 2 * 64) + 8
    kv = triton_interpreter.huge_cache(blocks, 16, 2, 64)
    k, v = torch.randn(2, 1, 2, 64, dtype=torch.bfloat16)

    write_kv(k, v, kv, torch.tensor([16 * blocks - 3], dtype=torch.int32))

    assert torch.equal(kv[0, -1, 13], k[0])
    assert torch.equal(kv[1, -1, 13], v[0])
