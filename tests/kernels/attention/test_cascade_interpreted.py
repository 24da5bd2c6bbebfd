"""Cascade attention in Triton's interpreter, against the reference."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

import kernels
from kernels.attention import cascade
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import PagedBatch, Phase
from kernels.errors import ShapeError
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_portable_interpreted import SMALL_GPU, check, problem, select
from tests.kernels.references.problems import UNUSED_BLOCK, Layout, make_case

pytestmark = triton_interpreter.interpreted

DECODE = Phase.DECODE
LAUNCH = LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Make the tiles of the prefix kernel so small that small problems fill several."""

    def tuned(*_arguments):
        return (TunedLaunch(LAUNCH, None, "for the test", measured=False),)

    monkeypatch.setattr(cascade, "select", partial(kernels.select, launches=tuned))
    cascade.prefix_selection.cache_clear()
    yield
    cascade.prefix_selection.cache_clear()


@pytest.fixture
def prefixes(monkeypatch):
    """Record the number of shared tokens of every launch of the prefix kernel."""
    from kernels.attention.portable.launch import PortablePrefix

    seen = []
    call = PortablePrefix.__call__

    def counted(self, *arguments):
        seen.append(self._arguments["num_keys"])
        call(self, *arguments)

    monkeypatch.setattr(PortablePrefix, "__call__", counted)
    return seen


def shared_case(asked, query_lens, seq_lens, prefix, **more):
    more = {"layout": Layout.FRAGMENTED} | more
    return make_case(asked, query_lens, seq_lens, shared_prefix=prefix, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1)], ids=str)
def test_ragged_lengths_after_the_prefix_agree_with_the_reference(prefixes, dtype, heads, kv_heads):
    asked = problem(DECODE, dtype, heads, kv_heads, lse=True)
    case = shared_case(asked, [1] * 5, [97, 160, 112, 113, 250], 96)

    check(case)

    assert prefixes == [96]


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 192, 256, 512])
def test_every_head_dim_agrees_with_the_reference(prefixes, head_dim):
    case = shared_case(problem(DECODE, "bfloat16", 4, 2, head_dim), [1] * 3, [40, 33, 60], 32)

    check(case)

    assert prefixes == [32]


@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_every_block_size_agrees_with_the_reference(prefixes, block_size):
    prefix = 3 * block_size
    asked = problem(DECODE, heads=2, kv_heads=1, head_dim=32, block_size=block_size)
    lengths = [prefix + 1, prefix + block_size, prefix + block_size + 1]
    case = shared_case(asked, [1] * 3, lengths, prefix)

    check(case)

    assert prefixes == [prefix]


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_several_queries_of_a_sequence_stay_causal_among_themselves(prefixes, group):
    asked = problem(DECODE, "bfloat16", group, 1, max_query_tokens=4, lse=True)
    # After the prefix come as many tokens as queries, one more, or many; one sequence has no query.
    case = shared_case(asked, [4, 1, 0, 3, 2], [68, 65, 80, 67, 190], 64)

    check(case)

    assert prefixes == [64]


def test_one_sequence_agrees_with_the_reference(prefixes):
    check(shared_case(problem(DECODE, lse=True), [1], [150], 144))

    assert prefixes == [144]


@pytest.mark.parametrize("num_sms", [1, 200])
@pytest.mark.parametrize("prefix", [16, 32, 80, 400])
def test_the_prefix_agrees_with_the_reference_for_any_number_of_splits(prefixes, num_sms, prefix):
    arch = dataclasses.replace(SMALL_GPU, num_sms=num_sms)
    case = shared_case(
        problem(DECODE, lse=True), [1] * 7, [prefix + n for n in range(1, 8)], prefix
    )

    check(case, arch=arch)

    assert prefixes == [prefix]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_softcap_and_scale_agree_with_the_reference(prefixes, dtype):
    asked = problem(DECODE, dtype, softcap=2.0, softmax_scale=0.7, lse=True)

    check(shared_case(asked, [1] * 3, [90, 65, 77], 64))

    assert prefixes == [64]


@pytest.mark.parametrize("one_loop", [False, True])
def test_a_prefix_that_ends_inside_a_tile_agrees_with_the_reference(monkeypatch, one_loop):
    launch = dataclasses.replace(LAUNCH, block_n=64, one_loop=one_loop)
    tuned = (TunedLaunch(launch, None, "for the test", measured=False),)
    monkeypatch.setattr(cascade, "select", partial(kernels.select, launches=lambda *_: tuned))

    check(shared_case(problem(DECODE), [1] * 3, [130, 113, 120], 112))


def test_the_result_equals_that_without_a_shared_prefix():
    case = shared_case(problem(DECODE, "float32", lse=True), [1] * 4, [100, 101, 117, 200], 96)
    plain = dataclasses.replace(case, batch=dataclasses.replace(case.batch, shared_prefix=0))

    out, lse = case.attend(select(DECODE))
    plain_out, plain_lse = plain.attend(select(DECODE))

    torch.testing.assert_close(out, plain_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-6)


def test_the_shared_blocks_are_read_only_through_the_first_row_of_the_table():
    case = shared_case(problem(DECODE), [1] * 3, [100, 101, 117], 96)
    case.batch.block_table[1:, :6] = UNUSED_BLOCK

    check(case)


def test_sequences_without_tokens_become_zero_with_a_log_sum_exp_of_minus_infinity(prefixes):
    case = shared_case(problem(DECODE, lse=True), [1, 1, 1, 1], [70, 0, 90, 0], 64)

    out, lse = case.attend(select(DECODE))

    assert torch.equal(out[[1, 3]], torch.zeros_like(out[:2]))
    assert torch.equal(lse[[1, 3]], torch.full((2, 6), -torch.inf))
    case.check(out)
    case.check_lse(lse)
    assert prefixes == [64]


def test_padding_rows_and_loose_bounds_do_not_change_the_result():
    case = shared_case(problem(DECODE), [1, 1], [70, 145], 64)
    batch = dataclasses.replace(case.batch, num_tokens=9, max_seqlen_k=4000)
    q = torch.cat((case.q, torch.full((7, 6, 64), float("nan"), dtype=torch.float16)))

    out, _ = dataclasses.replace(case, q=q, batch=batch).attend(select(DECODE))

    case.check(out[:2])
    assert torch.isnan(out[2:]).all()


def test_one_plan_runs_every_layer_of_its_step():
    layers = [
        make_case(problem(DECODE), [1, 1], [170, 145], shared_prefix=128, seed=seed)
        for seed in range(3)
    ]
    plan = kernels.plan_attention(layers[0].problem, layers[0].batch, selection=select(DECODE))

    for layer in layers:
        out = torch.empty_like(layer.q)
        plan.run(layer.q, layer.kv, out)
        layer.check(out)


def test_queries_may_be_a_slice_of_a_wider_tensor():
    case = shared_case(problem(DECODE), [1, 1], [70, 145], 64)
    wide = torch.full((2, 10, 64), float("nan"), dtype=torch.float16)
    wide[:, 2:8] = case.q

    check(dataclasses.replace(case, q=wide[:, 2:8]))


@pytest.mark.parametrize("more", [{"sliding_window": 40}, {"batch_invariant": True}], ids=str)
def test_a_shared_prefix_is_ignored_if_the_result_would_depend_on_it(prefixes, more):
    case = shared_case(problem(DECODE, **more), [1] * 3, [70, 145, 66], 64)

    plan = kernels.plan_attention(case.problem, case.batch, selection=select(DECODE))
    check(case)

    assert plan.prefix is None
    assert prefixes == []


def test_the_plan_names_the_row_that_reads_the_prefix():
    case = shared_case(problem(DECODE), [1] * 2, [70, 145], 64)

    plan = kernels.plan_attention(case.problem, case.batch, selection=select(DECODE))

    assert plan.prefix is not None
    assert plan.prefix.spec.name == "portable_prefix"
    assert plan.selection.spec.name == "portable_decode"


def test_the_cpu_ignores_a_shared_prefix():
    case = shared_case(problem(DECODE, "float32"), [1] * 3, [70, 145, 66], 64)

    plan = kernels.plan_attention(case.problem, case.batch)

    assert plan.prefix is None
    case.check(case.run())


@pytest.mark.parametrize("prefix", [-16, 8, 96, 112])
def test_an_invalid_shared_prefix_is_rejected(prefix):
    case = make_case(problem(DECODE), [1, 1], [96, 60])
    batch = dataclasses.replace(case.batch, shared_prefix=prefix)

    with pytest.raises(ShapeError, match=f"shared_prefix is {prefix}"):
        kernels.plan_attention(case.problem, batch, selection=select(DECODE))


def test_a_step_without_sequences_writes_nothing():
    none = torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    batch = PagedBatch(starts, none, none.view(0, 8), 3, 1, 100, shared_prefix=64)
    plan = kernels.plan_attention(problem(DECODE), batch, selection=select(DECODE))
    q = torch.ones((3, 6, 64), dtype=torch.float16)
    out = torch.full_like(q, 7.0)

    plan.run(q, torch.zeros((2, 1, 16, 2, 64), dtype=torch.float16), out)

    assert (out == 7.0).all()
