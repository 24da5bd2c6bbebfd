"""Cascade attention on the host: which problems support it, and when it is faster."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE, CPU
from kernels.attention.cascade import prefix_selection, rest_of, shared_prefix_is_faster
from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.attention.registry import PREFIX_REGISTRY, REGISTRY
from kernels.attention.splits import prefix_parts
from kernels.errors import NoKernelError

H100 = CATALOGUE["h100"]


def problem(phase=Phase.DECODE, dtype="bfloat16", **more):
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | more
    return AttentionProblem(phase=phase, dtype=dtype, softmax_scale=0.1, **fields)


@pytest.mark.parametrize("arch", [a for a in CATALOGUE.values() if a.sm >= 80], ids=lambda a: a.key)
@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"max_query_tokens": 4}, {"lse": True}])
def test_every_gpu_from_sm_80_on_reads_a_shared_prefix_once(arch, more):
    selection = prefix_selection(problem(**more), arch)

    assert selection is not None
    assert selection.spec in PREFIX_REGISTRY
    assert selection.launches


@pytest.mark.parametrize(
    ("asked", "arch"),
    [
        (problem(), CPU),
        (problem(), CATALOGUE["t4"]),
        (problem(sliding_window=4096), H100),
        (problem(batch_invariant=True), H100),
        (problem(head_dim=112), H100),
        (problem(block_size=512), H100),
        (problem(Phase.PREFILL), H100),
    ],
    ids=["cpu", "turing", "window", "batch invariant", "head dim", "block size", "prefill"],
)
def test_unsupported_problems_have_no_prefix_kernel(asked, arch):
    assert prefix_selection(asked, arch) is None
    assert not shared_prefix_is_faster(asked, arch, 256, 8192)


def test_prefix_rows_are_not_selected_for_an_ordinary_decode():
    assert not {row.name for row in PREFIX_REGISTRY} & {row.name for row in REGISTRY}
    with pytest.raises(NoKernelError, match="causal only"):
        kernels.select(problem(causal=False), H100)


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "faster"),
    # 4 KiB per token; an H100 transfers 100.6 MB in 30 us; partial results are 65 KiB per sequence.
    [
        (1, 1 << 20, False),
        (2, 8192, False),
        (2, 24_500, False),
        (2, 24_700, True),
        (64, 384, False),
        (64, 416, True),
        (256, 80, False),
        (256, 128, True),
        (256, 0, False),
    ],
)
def test_a_cascade_is_faster_if_it_saves_more_bytes_than_memory_transfers_during_two_launches(
    num_seqs, num_tokens, faster
):
    assert shared_prefix_is_faster(problem(), H100, num_seqs, num_tokens) is faster


def test_slower_memory_needs_a_shorter_prefix_and_unknown_memory_the_longest():
    unknown = dataclasses.replace(H100, memory_bandwidth_gbs=0)

    assert shared_prefix_is_faster(problem(), CATALOGUE["l4"], 64, 64)
    assert not shared_prefix_is_faster(problem(), H100, 64, 64)
    assert shared_prefix_is_faster(problem(), H100, 64, 600)
    assert not shared_prefix_is_faster(problem(), unknown, 64, 600)
    assert shared_prefix_is_faster(problem(), unknown, 64, 1200)


def test_the_rest_of_a_batch_has_the_tokens_and_blocks_after_the_prefix():
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    lengths = torch.tensor([65, 0, 100], dtype=torch.int32)
    batch = PagedBatch(torch.arange(4, dtype=torch.int32), lengths, table, 3, 1, 128, 64)

    rest = rest_of(batch, 16)

    assert rest.seq_lens.tolist() == [1, 0, 36]
    assert rest.seq_lens.dtype is torch.int32
    assert rest.block_table.tolist() == table[:, 4:].tolist()
    assert rest.block_table.data_ptr() == table[:, 4:].data_ptr()
    assert (rest.max_seqlen_k, rest.shared_prefix, rest.num_tokens) == (64, 0, 3)


@pytest.mark.parametrize(
    ("num_keys", "wanted", "parts"), [(16, 8, 1), (64, 8, 1), (65, 8, 2), (8192, 8, 8), (512, 1, 1)]
)
def test_a_prefix_is_split_until_the_gpu_is_full_or_each_part_is_a_tile(num_keys, wanted, parts):
    assert prefix_parts(num_keys, 64, wanted) == parts
