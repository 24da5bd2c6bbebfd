"""Attention of the C library over a paged cache, against the reference, over poisoned memory."""

import dataclasses

import pytest
import torch

from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.cpu import workers
from kernels.cpu.library import load
from tests.kernels.references.problems import Layout, make_case

LIBRARY = load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
ROWS = {row.phase: row for row in REGISTRY if row.in_library}


@pytest.fixture(autouse=True)
def several_threads():
    workers.set_num_threads(3)
    with torch.inference_mode():
        yield
    workers.set_num_threads(torch.get_num_threads())


def problem(phase, heads=6, kv_heads=2, head_dim=32, block_size=16, **more):
    scale = head_dim**-0.5
    return AttentionProblem(phase, "float32", heads, kv_heads, head_dim, block_size, scale, **more)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 16), (8, 2, 256), (7, 1, 48), (16, 1, 64), (4, 4, 80), (32, 8, 96)],
)
def test_every_shape_agrees_with_the_reference(phase, heads, kv_heads, head_dim):
    query_lens = [1, 1, 1, 1] if phase is Phase.DECODE else [33, 3, 70, 1]
    shape = problem(phase, heads, kv_heads, head_dim)
    case = make_case(shape, query_lens, [33, 70, 71, 1], layout=Layout.FRAGMENTED)

    case.check(case.run(ROWS[phase]))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 17, 64])
def test_blocks_windows_and_caps_of_scores_agree_with_the_reference(
    phase, block_size, softcap, window
):
    query_lens = [1, 1, 1] if phase is Phase.DECODE else [20, 1, 90]
    shape = problem(phase, block_size=block_size, softcap=softcap, sliding_window=window)
    case = make_case(shape, query_lens, [40, 5, 91], layout=Layout.TWO_RUNS)

    case.check(case.run(ROWS[phase]))


def test_rows_without_tokens_become_zero():
    case = make_case(problem(Phase.DECODE), [1, 1, 1], [0, 20, 0])

    out = case.run(ROWS[Phase.DECODE])

    assert torch.equal(out[[0, 2]], torch.zeros(2, 6, 32))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("window", [None, 20])
def test_a_query_has_the_same_bits_in_any_part_of_a_prompt_and_beside_any_others(softcap, window):
    more = {"sliding_window": window, "softcap": softcap}
    whole = make_case(problem(Phase.PREFILL, **more), [90, 33], [90, 40])
    out = whole.run(ROWS[Phase.PREFILL])
    whole.check(out)

    for first, end in ((0, 1), (0, 7), (7, 64), (63, 90), (89, 90)):
        for phase in Phase:
            if phase is Phase.DECODE and end - first > 1:
                continue
            batch = dataclasses.replace(
                whole.batch,
                cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_table=whole.batch.block_table[:1],
                num_tokens=end - first,
                max_seqlen_q=end - first,
                max_seqlen_k=end,
            )
            part = dataclasses.replace(
                whole, problem=problem(phase, **more), batch=batch, q=whole.q[first:end]
            )
            found = part.run(ROWS[phase])

            assert torch.equal(found, out[first:end])
