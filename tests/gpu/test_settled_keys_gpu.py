"""`keys_settled` lets a decode load earlier keys before the kernel that writes the step's own keys has finished."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels import PagedBatch
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from kernels.rope.cache import CacheSlots, TritonRotation
from tests.gpu.attention_cases import make_problem, selection_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

LENGTHS = (1, 2, 16, 17, 63, 64, 65, 128, 129, 191, 192, 193, 300, 1000, 2049)
SIZE = 16
LAYERS = 8
REPEATS = 30


@pytest.fixture(params=["hopper_keys_on_m_decode", "hopper_decode"])
def row(request):
    """Return a row of the registry; on other GPUs than Hopper, none."""
    if kernels.detect("cuda").sm != 90:
        return None
    return next(row for row in REGISTRY if row.name == request.param)


@pytest.fixture(params=[1, 3, 5], ids=["15 sequences", "45", "75"])
def step(request, row):
    """Return a function that computes a step: per layer a matrix product, rotary embedding and a decode.

    The numbers of sequences select different tile sizes of the decode kernel.
    """
    if kernels.detect("cuda").sm < 90:
        pytest.skip("dependent launches need compute capability 9.0")
    problem = make_problem(Phase.DECODE, ("bfloat16", 8, 4, 128, SIZE, {}))
    heads, kv_heads, size = problem.num_heads, problem.num_kv_heads, problem.head_dim
    dtype = getattr(torch, problem.dtype)
    seq_lens = LENGTHS * request.param
    needed = [-(-length // SIZE) for length in seq_lens]
    blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).split(needed)
    table = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).int().cuda()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    rows = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device="cuda")
    batch = PagedBatch(rows, lengths, table, len(seq_lens), 1, max(LENGTHS))
    last = (lengths - 1).long()
    slots = (table[rows[:-1], last // SIZE] * SIZE + last % SIZE).int()
    generator = torch.Generator("cuda").manual_seed(1)
    widths = (len(seq_lens), 4096), (4096, (heads + 2 * kv_heads) * size)
    x, weight = (torch.randn(s, device="cuda", generator=generator).to(dtype) / 64 for s in widths)
    shape = (LAYERS, 2, sum(needed), SIZE, kv_heads, size)
    cache = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    angles = torch.rand(max(LENGTHS), 1, size // 2, device="cuda", generator=generator)
    rope = kernels.rope_tables(angles, 1.0, dtype)

    places = slots.long()
    selection = selection_of(row, problem) if row else None

    def compute(*, settled, pdl):
        settled_batch = dataclasses.replace(batch, keys_settled=settled)
        plan = kernels.plan_attention(problem, settled_batch, selection=selection)
        # A decode that reads the step's keys too early reads NaN.
        cache.view(LAYERS, 2, -1, kv_heads, size).index_fill_(2, places, float("nan"))
        found = []
        for kv in cache:
            qkv = x @ weight
            q = TritonRotation(rope, last, pdl=pdl)(qkv, CacheSlots(kv, slots, None), None)
            found.append(torch.empty_like(q))
            kernels.decode_attention(q, kv, plan, found[-1])
        return torch.stack(found)

    return compute


def test_early_loads_do_not_change_a_bit(step):
    expected = step(settled=False, pdl=False)
    assert expected.isfinite().all()
    for _ in range(REPEATS):
        assert torch.equal(step(settled=True, pdl=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(settled=True, pdl=True)
    for _ in range(REPEATS):
        graph.replay()
        assert torch.equal(found, expected)
