"""The portable attention kernels in Triton's interpreter, against the reference, over poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.attention.select import Selection
from tests.kernels import triton_interpreter
from tests.kernels.references.problems import Layout, make_case, make_packed_case

pytestmark = triton_interpreter.interpreted

ROWS = {Phase.PREFILL: "portable_prefill", Phase.DECODE: "portable_decode"}
LAUNCHES = {
    Phase.PREFILL: LaunchConfig(32, 32, 4, 2),
    Phase.DECODE: LaunchConfig(16, 32, 4, 2, programs_per_sm=1),
}
# With this few SMs there are few splits and few idle programs.
SMALL_GPU = dataclasses.replace(CATALOGUE["a100"], num_sms=8)
PHASES = [pytest.param(phase, id=phase.value) for phase in Phase]


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


def problem(phase, dtype="float16", heads=6, kv_heads=2, head_dim=64, block_size=16, **more):
    scale = more.pop("softmax_scale", head_dim**-0.5)
    return AttentionProblem(phase, dtype, heads, kv_heads, head_dim, block_size, scale, **more)


def select(phase, arch=SMALL_GPU, **launch):
    """Return a selection of the portable row, whatever the host."""
    spec = next(row for row in REGISTRY if row.name == ROWS[phase])
    config = dataclasses.replace(LAUNCHES[phase], **launch)
    tuned = TunedLaunch(config, None, "for the test", measured=False)
    return Selection(spec, arch, (tuned,), "for the test", ())


def check(case, **launch):
    """Run a case on the portable kernel of its phase, and compare output and log-sum-exp with the reference."""
    out, lse = case.attend(select(case.problem.phase, **launch))
    case.check(out)
    if lse is not None:
        case.check_lse(lse)
    return out


def queries(phase, *prefill):
    """Return the query tokens of each sequence: 1 in a decode, the given ones in a prefill."""
    return [1] * len(prefill) if phase is Phase.DECODE else list(prefill)


def test_the_kernels_are_interpreted_in_this_process():
    assert triton_interpreter.is_loaded()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_lengths_around_block_boundaries_agree_with_the_reference(phase, block_size):
    lengths = [block_size - 1, block_size, block_size + 1, 1, 2 * block_size + 1]
    case = make_case(
        problem(phase, block_size=block_size, kv_heads=1, heads=3),
        queries(phase, 3, block_size % 37, 17, 1, 5),
        lengths,
        layout=Layout.FRAGMENTED,
    )

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_head_dim_and_dtype_agrees_with_the_reference(phase, head_dim, dtype):
    asked = problem(phase, dtype, 4, 2, head_dim)
    case = make_case(asked, queries(phase, 5, 33), [37, 33], layout=Layout.TWO_RUNS)

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (14, 2), (8, 1)], ids=["1", "3", "4", "7", "8"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_group_size_agrees_with_the_reference(phase, heads, kv_heads, dtype):
    case = make_case(problem(phase, dtype, heads, kv_heads), queries(phase, 20, 1, 5), [33, 50, 71])

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("window", [1, 16, 17, 40, 1000])
def test_a_sliding_window_agrees_with_the_reference(phase, window):
    case = make_case(
        problem(phase, sliding_window=window),
        queries(phase, 1, 40, 20),
        [16, 100, 90],
        layout=Layout.FRAGMENTED,
    )

    check(case)


@pytest.mark.parametrize("phase", PHASES)
def test_a_window_that_ends_next_to_a_tile_edge_agrees_with_the_reference(phase):
    lengths = [71, 72, 73, 74, 103, 104, 105, 106]
    case = make_case(problem(phase, sliding_window=40), [1] * len(lengths), lengths)

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_softcap_and_scale_agree_with_the_reference(phase, window, dtype):
    asked = problem(phase, dtype, softcap=2.0, sliding_window=window, softmax_scale=0.7)
    case = make_case(asked, queries(phase, 1, 20, 40), [5, 40, 71])

    check(case)


@pytest.mark.parametrize("phase", PHASES)
def test_scores_far_beyond_the_softcap_agree_with_the_reference(phase):
    asked = problem(phase, "float32", softcap=1.0, softmax_scale=50.0)
    case = make_case(asked, queries(phase, 5, 20), [5, 40])

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("more", [{}, {"sliding_window": 20}, {"softcap": 3.0}], ids=str)
def test_the_log_sum_exp_agrees_with_the_reference(phase, more):
    asked = problem(phase, "bfloat16", head_dim=80, lse=True, **more)
    case = make_case(asked, queries(phase, 1, 20, 40), [5, 70, 41])

    check(case)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("one_loop", [False, True], ids=["three loops", "one loop"])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_kind_of_tile_agrees_with_the_reference(phase, one_loop, block_n):
    case = make_case(problem(phase, sliding_window=50), queries(phase, 70, 15), [130, 15])

    check(case, block_m=16, block_n=block_n, one_loop=one_loop)


def test_rows_without_keys_become_zero_with_a_log_sum_exp_of_minus_infinity():
    case = make_case(problem(Phase.DECODE, lse=True), [1, 1, 1], [0, 90, 0])

    out, lse = case.attend(select(Phase.DECODE))

    assert torch.equal(out[[0, 2]], torch.zeros_like(out[:2]))
    assert torch.equal(lse[[0, 2]], torch.full((2, 6), -torch.inf))
    case.check(out)
    case.check_lse(lse)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_packed_keys_agree_with_the_reference(causal, dtype):
    asked = problem(Phase.PREFILL, dtype, head_dim=96, block_size=None, causal=causal, lse=True)
    # More queries than keys, no keys, no queries, as many of both, a history.
    case = make_packed_case(asked, [7, 5, 0, 33, 3], [4, 0, 3, 33, 70])

    check(case)


@pytest.mark.parametrize("window", [None, 25])
def test_a_paged_prefill_without_causality_agrees_with_the_reference(window):
    asked = problem(Phase.PREFILL, "bfloat16", causal=False, lse=True, sliding_window=window)

    check(make_case(asked, [20, 3, 33], [20, 70, 40]))


def test_queries_of_many_tiles_and_sequences_without_any_agree_with_the_reference():
    case = make_case(problem(Phase.PREFILL), [100, 0, 33], [100, 20, 90])

    check(case, block_m=16)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_several_queries_per_decoded_sequence_agree_with_the_reference(group, window):
    asked = problem(
        Phase.DECODE, "bfloat16", group, 1, max_query_tokens=4, lse=True, sliding_window=window
    )
    case = make_case(asked, [1, 4, 0, 3, 2], [5, 33, 20, 190, 17], layout=Layout.FRAGMENTED)

    check(case)


@pytest.mark.parametrize("num_sms", [1, 200])
def test_a_decode_agrees_with_the_reference_for_any_number_of_splits(num_sms):
    case = make_case(problem(Phase.DECODE, "bfloat16", lse=True), [1] * 4, [500, 3, 40, 129])

    check(case, arch=dataclasses.replace(SMALL_GPU, num_sms=num_sms))


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_outside_the_window_are_never_read(phase):
    case = make_case(problem(phase, sliding_window=20), queries(phase, 5), [200])
    for block in case.block_table[0][:10]:
        case.kv[:, block] = float("nan")

    assert torch.isfinite(check(case)).all()


@pytest.mark.parametrize("phase", PHASES)
def test_values_of_one_give_one(phase):
    case = make_case(problem(phase, "float32"), queries(phase, 40, 20), [70, 300])
    case.kv[1][~case.kv[1].isnan()] = 1.0

    out = check(case)

    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_queries_may_be_a_slice_of_a_wider_tensor(phase):
    case = make_case(problem(phase), queries(phase, 40, 20), [70, 45])
    wide = torch.full((case.q.shape[0], 10, 64), float("nan"), dtype=torch.float16)
    wide[:, 2:8] = case.q

    check(dataclasses.replace(case, q=wide[:, 2:8]))


@pytest.mark.parametrize("phase", PHASES)
def test_padding_rows_and_loose_bounds_do_not_change_the_result(phase):
    case = make_case(problem(phase), queries(phase, 40, 20), [70, 45])
    tokens = case.batch.num_tokens
    padded = dataclasses.replace(
        case,
        q=torch.cat((case.q, torch.full((7, 6, 64), float("nan"), dtype=torch.float16))),
        batch=dataclasses.replace(case.batch, num_tokens=tokens + 7, max_seqlen_k=4000),
    )

    out, _ = padded.attend(select(phase))

    case.check(out[:tokens])
    assert torch.isnan(out[tokens:]).all()


@pytest.mark.parametrize("phase", PHASES)
def test_one_plan_runs_every_layer_of_its_step(phase):
    layers = [
        make_case(problem(phase), queries(phase, 40, 20), [170, 45], seed=seed) for seed in range(3)
    ]
    plan = kernels.plan_attention(layers[0].problem, layers[0].batch, selection=select(phase))

    for layer in layers:
        out = torch.empty_like(layer.q)
        plan.run(layer.q, layer.kv, out)
        layer.check(out)


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_past_two_to_the_thirty_one_elements_are_read_correctly(phase):
    small = make_case(problem(phase, "bfloat16", 2, 2, 64), [1], [40])
    blocks = 2**31 // (16 * 2 * 64) + 16
    kv = triton_interpreter.huge_cache(blocks, 16, 2, 64)
    table = [blocks - 4, blocks - 8, blocks - 6]
    for here, there in zip(small.block_table[0], table, strict=True):
        kv[:, there] = small.kv[:, here]
    batch = dataclasses.replace(small.batch, block_table=torch.tensor([table], dtype=torch.int32))
    # `plan.run` is called directly, because `kernels` rejects a cache that is not contiguous.
    plan = kernels.plan_attention(small.problem, batch, selection=select(phase))
    out = torch.empty_like(small.q)

    plan.run(small.q, kv, out)

    assert torch.equal(out, check(small))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3]], ids=["three sequences", "one sequence"])
def test_packed_tokens_past_two_to_the_thirty_one_elements_are_read_correctly(lengths):
    # Three tokens two gigabytes apart: every stride fits in 32 bits, the last token's offset does not.
    asked = problem(Phase.PREFILL, "bfloat16", 2, 1, block_size=None)
    small = make_packed_case(asked, lengths, lengths)
    far = 2**30 + 16
    memory = triton_interpreter.untouched_memory((2 * far + 256,), torch.bfloat16)
    q = memory.as_strided((3, 2, 64), (far, 64, 1))
    kv = memory.as_strided((2, 3, 1, 64), (64, far, 64, 1), 128)
    q.copy_(small.q)
    kv.copy_(small.kv)

    assert torch.equal(check(dataclasses.replace(small, q=q, kv=kv)), check(small))
