"""Attention problems that the GPU tests share, and the tolerance check of a result.

Every combination of dtype, heads, head dim, block size and feature takes 1 to 4 seconds to compile,
so the lists pair each value with a few values of the others instead of all of them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from tests.kernels.references.problems import (
    Layout,
    assert_no_worse_than,
    make_case,
    make_packed_case,
    truth_dtype,
)

DEVICE = "cuda"
# (query length, key length) pairs at tile edges, including keys shorter than queries and lengths of 0.
SHORT_PAIRS = [
    (1, 1), (0, 0), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 192), (239, 1), (5, 0),
    (799, 3), (113, 203), (128, 217), (0, 9), (113, 211), (108, 256), (256, 512), (384, 256),
    (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
]  # fmt: skip
LONG_PAIRS = [
    (37, 54), (17, 97), (127, 512), (577, 2048), (37, 16384), (17, 9999), (127, 32767), (1763, 1763),
    (2048, 2048), (4096, 4096), (99, 4224), (4224, 4224), (11, 11),
]  # fmt: skip
LONG_LENGTHS = [54, 97, 512, 2048, 16384, 11, 99, 1763, 9999, 32767]

# dtype, query heads, key-value heads, head dim, block size, features.
COMBINATIONS = [
    ("bfloat16", 6, 6, 64, 16, {}),
    ("bfloat16", 6, 2, 80, 48, {"sliding_window": 37}),
    ("bfloat16", 8, 2, 128, 16, {"lse": True}),
    ("bfloat16", 7, 1, 192, 64, {"softcap": 15.0}),
    ("bfloat16", 8, 1, 256, 256, {}),
    ("bfloat16", 8, 2, 96, 256, {"sliding_window": 300, "softcap": 15.0, "lse": True}),
    ("float16", 6, 2, 32, 64, {"softcap": 15.0}),
    ("float16", 8, 2, 64, 48, {"sliding_window": 1, "lse": True}),
    ("float16", 7, 1, 128, 256, {"softmax_scale": 0.3}),
    ("float16", 6, 6, 256, 16, {"sliding_window": 128}),
    ("float16", 8, 1, 80, 16, {"lse": True}),
    ("float32", 8, 2, 32, 16, {"sliding_window": 64}),
    ("float32", 7, 1, 64, 16, {"lse": True}),
    ("float32", 6, 2, 128, 48, {"softcap": 15.0}),
    ("float32", 6, 6, 256, 64, {}),
    ("float32", 8, 1, 96, 256, {"softmax_scale": 0.05}),
]
LONG_COMBINATIONS = [COMBINATIONS[index] for index in (0, 2, 5, 8, 12)]
PACKED_COMBINATIONS = [
    ("bfloat16", 8, 2, 128, None, {}),
    ("bfloat16", 6, 2, 64, None, {"causal": False, "lse": True}),
    ("float16", 7, 1, 80, None, {"sliding_window": 65}),
    ("float16", 6, 6, 256, None, {"causal": False, "softcap": 15.0}),
    ("float32", 8, 1, 96, None, {"lse": True}),
]
NON_CAUSAL_COMBINATIONS = [
    ("bfloat16", 8, 2, 128, 16, {"causal": False}),
    ("float16", 6, 2, 192, 48, {"causal": False, "sliding_window": 100, "lse": True}),
]
SEVERAL_QUERIES_COMBINATIONS = [
    ("bfloat16", 8, 2, 128, 16, {"max_query_tokens": 2}),
    ("float16", 6, 2, 64, 48, {"max_query_tokens": 3, "lse": True}),
    ("bfloat16", 7, 1, 96, 64, {"max_query_tokens": 5, "sliding_window": 90}),
    ("float32", 8, 1, 128, 16, {"max_query_tokens": 8, "softcap": 15.0}),
]


def rows(phase):
    """Return the GPU kernels of a phase, without those that read quantized caches only, which other tests cover."""
    found = [
        row for row in REGISTRY if row.phase is phase and not row.cpu and not row.quantized_only
    ]
    return [pytest.param(row, id=row.name) for row in found]


def named(combinations):
    """Return pytest parameters with readable ids."""
    return [
        pytest.param(
            combination, id="-".join(str(part) for part in (*combination[:5], *combination[5]))
        )
        for combination in combinations
    ]


RAGGED_LENGTHS = [0, 1, *((index * 7919) % 1500 for index in range(40))]
"""Lengths of 42 sequences, from 0 to 1499."""


def make_problem(phase, combination):
    dtype, heads, kv_heads, head_dim, block_size, features = combination
    scale = features.get("softmax_scale", head_dim**-0.5)
    others = {"unmeasured": True, **features}
    others.pop("softmax_scale", None)
    return AttentionProblem(phase, dtype, heads, kv_heads, head_dim, block_size, scale, **others)


def make(problem, query_lens, seq_lens, **options):
    """Return a case on the GPU, with a fragmented block table by default."""
    if problem.block_size is None:
        return make_packed_case(problem, query_lens, seq_lens, device=DEVICE, **options)
    options = {"layout": Layout.FRAGMENTED} | options
    return make_case(problem, query_lens, seq_lens, device=DEVICE, **options)


def selection_of(row, problem):
    """Select `row`; skip the test if the row does not support the problem on this GPU."""
    arch = kernels.detect(DEVICE)
    if reasons := row.unsupported(problem, arch):
        required = row.name.startswith("portable") and arch.has_triton_tensor_cores
        assert not required, f"{row.name} does not support {problem}: {reasons}"
        pytest.skip(f"{row.name}: {'; '.join(reasons)}")
    return kernels.select(problem, arch, registry=(row,))


def every_launch(selection):
    """Return one selection per launch, without length conditions; `[selection]` if it has no launches."""
    alone = [
        dataclasses.replace(tuned, max_seqlen_k=None, min_num_seqs=0)
        for tuned in selection.launches
    ]
    return [dataclasses.replace(selection, launches=(tuned,)) for tuned in alone] or [selection]


def run(row, case):
    """Run `case` through the public API on registry row `row`; return output and log-sum-exp."""
    return case.attend(selection_of(row, case.problem))


def judge(case, out, lse=None):
    """Check the result: at most twice the error of plain PyTorch, three times with a softcap."""
    factor = 3.0 if case.problem.softcap is not None else 2.0
    truth = case.expected(truth_dtype(out.dtype))
    assert_no_worse_than(out, truth, case.expected(out.dtype), factor=factor)
    if case.problem.lse:
        case.check_lse(lse)


def around_block_boundaries(block_size):
    """Return lengths one below, at and one above multiples of the block size and tile sizes."""
    edges = {block_size, 2 * block_size, 5 * block_size, 16, 32, 64, 128, 256, 1024}
    return sorted({1, 2, *(edge + step for edge in edges for step in (-1, 0, 1))})


def one_sequence(case, index):
    """Return the batch and the queries of one sequence of a paged case."""
    first = sum(case.query_lens[:index])
    count, length = case.query_lens[index], case.seq_lens[index]
    batch = dataclasses.replace(
        case.batch,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=case.q.device),
        seq_lens=case.batch.seq_lens[index : index + 1].clone(),
        block_table=case.batch.block_table[index : index + 1].clone(),
        num_tokens=count,
        max_seqlen_q=count,
        max_seqlen_k=length,
    )
    return batch, case.q[first : first + count].clone()


def attend(problem, batch, q, kv, selection, out=None):
    """Plan and run one step; return the output."""
    plan = kernels.plan_attention(problem, batch, selection=selection)
    out = torch.full_like(q, float("nan")) if out is None else out
    call = kernels.decode_attention if problem.phase is Phase.DECODE else kernels.prefill_attention
    call(q, kv, plan, out)
    return out
