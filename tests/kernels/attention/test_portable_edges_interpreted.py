"""The portable attention kernels at the limits of their arguments, in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import PackedBatch, PagedBatch, Phase
from kernels.errors import ShapeError
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_portable_interpreted import (
    PHASES,
    check,
    problem,
    queries,
    select,
)
from tests.kernels.references.problems import UNUSED_BLOCK, make_case, make_packed_case

pytestmark = triton_interpreter.interpreted

FAR = 2**30 + 16
"""Elements between heads: every stride fits in 32 bits, the offset of the third head does not."""


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


def far_apart(tensor, stride):
    """Return a copy whose heads are `FAR` elements apart; the memory between them is never touched."""
    size = 2 * FAR + tensor.numel()
    copy = triton_interpreter.untouched_memory((size,), tensor.dtype).as_strided(
        tensor.shape, stride
    )
    return copy.copy_(tensor)


@pytest.mark.parametrize("phase", PHASES)
def test_heads_of_queries_past_two_to_the_thirty_one_elements_are_rejected(phase):
    case = make_case(problem(phase, "bfloat16", 3, 1), [1, 1], [5, 40])
    plan = kernels.plan_attention(case.problem, case.batch, selection=select(phase))
    out = torch.empty_like(case.q)

    with pytest.raises(ShapeError, match=f"the 3 heads of q lie {FAR} elements apart"):
        plan.run(far_apart(case.q, (64, FAR, 1)), case.kv, out)

    plan.run(far_apart(case.q, (64, FAR - 17, 1)), case.kv, out)
    case.check(out)


def test_packed_heads_of_keys_past_two_to_the_thirty_one_elements_are_read_correctly():
    case = make_packed_case(problem(Phase.PREFILL, "bfloat16", 3, 3, block_size=None), [5], [5])
    far = far_apart(case.kv, (5 * 64, 64, FAR, 1))

    assert torch.equal(check(dataclasses.replace(case, kv=far)), check(case))


@pytest.mark.parametrize("phase", PHASES)
def test_the_stride_of_a_cache_dimension_of_one_does_not_matter(phase):
    for block_size, kv_heads in ((1, 2), (16, 1)):
        asked = problem(phase, heads=4, kv_heads=kv_heads, block_size=block_size)
        case = make_case(asked, queries(phase, 3, 5), [20, 33])
        stride = [
            stride if size > 1 else 12345
            for size, stride in zip(case.kv.shape, case.kv.stride(), strict=True)
        ]
        odd = case.kv.as_strided(case.kv.shape, stride)
        assert odd.is_contiguous()

        check(dataclasses.replace(case, kv=odd))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40], ids=["31 bits", "32 bits", "41 bits"])
def test_a_window_wider_than_any_sequence_hides_nothing(phase, window):
    # If there are more queries than keys, the first queries precede the first key.
    case = make_case(
        problem(phase, sliding_window=window, max_query_tokens=8, lse=True), [8, 1, 3], [1, 40, 33]
    )

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("one_loop", [False, True], ids=["three loops", "one loop"])
@pytest.mark.parametrize("window", [1, 20, 70])
def test_keys_before_every_window_are_never_read(phase, one_loop, window):
    query_lens = queries(phase, 5, 1)
    case = make_case(problem(phase, sliding_window=window), query_lens, [200, 150])
    for seq, count in enumerate(query_lens):
        gone = case.seq_lens[seq] - count - window + 1
        blocks, rest = divmod(gone, 16)
        case.kv[:, case.block_table[seq][:blocks]] = float("nan")
        case.kv[:, case.block_table[seq][blocks], :rest] = float("nan")
        case.batch.block_table[seq, :blocks] = UNUSED_BLOCK

    # Tiles of 128 keys extend over the window's lower edge.
    check(case, block_n=128, one_loop=one_loop)


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_without_sequences_writes_nothing(phase):
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    batches = [(16, PagedBatch(zero, none, none.view(0, 4), 3, 0, 0))]
    if phase is Phase.PREFILL:
        batches.append((None, PackedBatch(zero, zero, 3, 0, 0)))
    for block_size, batch in batches:
        asked = problem(phase, block_size=block_size)
        plan = kernels.plan_attention(asked, batch, selection=select(phase))
        out = torch.full((3, 6, 64), 7.0, dtype=torch.float16)
        slots = (2,) if block_size is None else (2, 16)

        plan.run(torch.zeros_like(out), torch.zeros((2, *slots, 2, 64)).half(), out)

        assert bool((out == 7.0).all())


def test_the_scatter_supports_tokens_of_any_size():
    from kernels.attention.portable.write_kv import write_kv

    kv = torch.randn(2, 3, 1, 71, 256).half()
    k, v = torch.randn(2, 2, 71, 256).half()
    expected = kv.clone()
    expected[0, [2, 0], 0], expected[1, [2, 0], 0] = k, v

    write_kv(k, v, kv, torch.tensor([2, 0], dtype=torch.int32))

    assert torch.equal(kv, expected)


def test_the_scatter_reads_heads_past_two_to_the_thirty_one_elements():
    from kernels.attention.portable.write_kv import write_kv

    kv = torch.randn(2, 2, 16, 3, 64).bfloat16()
    k = torch.randn(1, 3, 64).bfloat16()

    write_kv(far_apart(k, (64, FAR, 1)), k, kv, torch.tensor([20], dtype=torch.int32))

    assert torch.equal(kv[0, 1, 4], k[0])
    assert torch.equal(kv[1, 1, 4], k[0])
