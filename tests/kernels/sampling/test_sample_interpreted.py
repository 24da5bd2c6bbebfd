"""The sampling kernels in Triton's interpreter sample exactly the tokens of the host's sampler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import tokens as token_ops
from kernels.sampling.rows import SampleSizes, candidate_bounds
from model.sampling.device import DeviceTokens
from model.sampling.sampler import Sampler
from tests.kernels import triton_interpreter
from tests.model.sampling.sampling_rows import NUM_KINDS, logits_of, sampling_row, varied_rows

pytestmark = triton_interpreter.interpreted
if triton_interpreter.HAS_TRITON:
    from kernels.sampling.gpu.argmax import argmax_tokens, chosen_logprobs
    from tests.kernels.sampling.sampled import by_host, by_kernel, by_rule

# Capacities for all candidates of a row, for some and for hardly any; all rows have several tiles.
SIZES = [
    SampleSizes(tile=64, group=4, capacity=512, chunk=64, loads=2),
    SampleSizes(tile=32, group=4, capacity=24, chunk=32, loads=2, row_ways=16),
    SampleSizes(tile=64, group=8, capacity=3, chunk=32, loads=1, ways=2, row_ways=2),
]
KINDS = ("normal", "half", "flat", "steep", "tiny", "equal", "few", "sparse")
INF = math.inf
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _poison():
    with triton_interpreter.poisoned_memory():
        yield


def row_of_kind(kind: str, vocab: int, seed: int) -> torch.Tensor:
    """Return one row of logits [1, vocab]."""
    logits = logits_of(seed, 1, vocab)
    if kind == "half":
        return logits.bfloat16()
    if kind == "equal":
        return torch.zeros(1, vocab, dtype=torch.float16)
    if kind == "few":  # few values, many ties
        return logits.round()
    if kind == "sparse":
        hidden = logits_of(seed + 1, 1, vocab) > -2
        return logits.masked_fill(hidden, -INF).index_fill(1, torch.tensor([vocab // 2]), 1.0)
    return logits * {"normal": 1.0, "flat": 0.02, "steep": 1e4, "tiny": 1e-20}[kind]


def sampling_rows(vocab: int):
    return st.builds(
        sampling_row,
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 10**6),
        temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 1.0, 2.5, 1e6, 1e300]),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 20, vocab - 1, vocab, 10**12]),
        top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.95, 0.999999, 1 - 2**-53]),
        min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
        typical_p=st.sampled_from([*[1.0] * 12, 1e-9, 0.3, 0.9, 1 - 2**-53]),
        banned=st.sampled_from([(), (), (0,), (1, 31, 32, 63, 64, 100), tuple(range(2, 159, 2))]),
    )


@settings(max_examples=60)
@given(st.data())
def test_tokens_equal_those_of_the_host(data):
    vocab = data.draw(st.sampled_from([1, 2, 31, 101, 160]))
    rows = data.draw(st.lists(sampling_rows(vocab), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from(KINDS))
    sizes = data.draw(st.sampled_from(SIZES))
    seed = data.draw(st.integers(0, 1000))
    logits = torch.cat([row_of_kind(kind, vocab, seed + i) for i in range(len(rows))])

    assert by_kernel(logits, rows, sizes) == by_host(logits, rows)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"capacity={sizes.capacity}")
@pytest.mark.parametrize("kind", KINDS)
def test_the_capacity_of_the_list_does_not_change_a_token(kind, sizes):
    vocab = 101
    rows = [
        sampling_row(seed=3, position=k, temperature=t, top_k=k, top_p=p, min_p=m)
        for k, p, m, t in (
            (7, 1.0, 0.0, 1.0),
            (0, 0.9, 0.0, 1.5),
            (90, 0.99, 0.0, 2.0),
            (0, 1.0, 0.02, 1.0),
            (30, 0.9, 0.01, 0.7),
            (0, 0.999, 0.0, 50.0),
        )
    ]
    rows += [
        sampling_row(seed=3, position=k, top_k=k, top_p=0.9, banned=range(0, vocab, 3))
        for k in (0, 9, 90)
    ]
    rows.append(sampling_row(seed=3, position=1, top_k=20, typical_p=0.7))
    logits = torch.cat([row_of_kind(kind, vocab, 9)] * len(rows))

    tokens = by_kernel(logits, rows, sizes)

    assert tokens == by_host(logits, rows)
    assert tokens == by_rule(logits, rows)


@pytest.mark.parametrize("value", [math.nan, INF], ids=str)
@pytest.mark.parametrize(
    "row", [sampling_row(temperature=0.0), sampling_row(), sampling_row(top_k=3)]
)
def test_a_row_with_non_finite_logits_has_no_token_and_changes_no_other_row(value, row):
    logits = logits_of(4, 3)
    logits[1, 77] = value
    rows = [sampling_row(seed=1, top_p=0.9), row, sampling_row(seed=2)]

    tokens = by_kernel(logits, rows, SIZES[0])

    assert tokens[1] is None
    assert tokens == by_host(logits, rows)


def test_a_row_of_minus_infinity_has_no_token():
    logits = torch.full((3, 70), -INF)

    assert (
        by_kernel(
            logits, [sampling_row(), sampling_row(top_p=0.5), sampling_row(temperature=0)], SIZES[0]
        )
        == [None] * 3
    )


def test_a_rows_token_is_the_same_alone_and_in_a_batch():
    rows = [row for row in varied_rows(2 * NUM_KINDS) if not row.parameters.changes_logits]
    logits = logits_of(8, len(rows))

    alone = [by_kernel(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]

    assert by_kernel(logits, rows) == alone


def test_rows_may_have_a_stride_and_are_not_changed():
    wide = logits_of(5, 4, 150)
    logits, before = wide[:, :101], wide.clone()
    rows = [sampling_row(seed=i, top_k=9 * i) for i in range(4)]

    assert by_kernel(logits, rows, SIZES[0]) == by_host(logits, rows)
    assert torch.equal(wide, before)


def test_the_token_of_every_kind_of_row_is_that_of_the_host():
    logits, rows = logits_of(6, 2 * NUM_KINDS), varied_rows(2 * NUM_KINDS)
    before = logits.clone()

    pending = DeviceTokens(logits, rows)

    assert pending.result() == Sampler().forward(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "top_k": 5},
        {"banned": (3,)},
        {"logit_bias": {3: 50.0}},
        {"bad_words": ((3,),)},
        {"bad_words": ((3,), (4, 5))},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"top_p": 0.5, "logprobs": True},
        {"typical_p": 0.5},
        {"presence_penalty": 0.5},
    ],
    ids=str,
)
def test_the_next_step_can_be_launched_before_tokens_are_read(changes):
    rows = [sampling_row(temperature=0.0), sampling_row(**changes)]

    pending = DeviceTokens(logits_of(7, 2), rows)

    assert pending.feeds_next
    assert pending.tokens.tolist() == [token.token_id for token in pending.result()]


def test_a_banned_logit_that_is_nan_makes_its_row_fail():
    logits = logits_of(19, 2)
    logits[0, 9] = math.nan

    broken, sound = DeviceTokens(logits, [sampling_row(banned=(9,))] * 2).result()

    assert broken.error
    assert not sound.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 63, 64, 300])
def test_the_argmax_is_the_first_among_equals(dtype, vocab):
    logits = logits_of(1, 6, vocab).round().to(dtype)
    logits[1:, -1] = torch.tensor([math.nan, INF, 50.0, -INF, -0.0])
    logits[4] = -INF
    logits[5] = 0.0
    tokens, checked = torch.full((2, 6), -7)
    logprobs = torch.full((6,), -7.0)

    argmax_tokens(logits, tokens, checked, logprobs, tile=SIZES[0].tile)

    expected = logits.float().argmax(-1).tolist()
    assert tokens.tolist() == expected
    assert checked.tolist() == [expected[0], -1, -1, expected[3], -1, 0]
    by_torch = token_ops.argmax_tokens(logits)
    assert [part.tolist() for part in by_torch[:2]] == [expected, checked.tolist()]
    truth = torch.log_softmax(logits.double(), -1).amax(-1)
    for found in (logprobs, by_torch[2]):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found[checked >= 0].double(), truth[checked >= 0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 63, 64, 300])
def test_a_log_probability_is_that_of_all_logits_of_its_row(kind, vocab):
    logits = torch.cat([row_of_kind(kind, vocab, seed) for seed in range(3)])
    tokens, checked = torch.full((2, 3), -7)
    logprobs, given = torch.full((2, 3), -7.0)
    ids = torch.tensor([0, vocab // 2, vocab - 1])

    argmax_tokens(logits, tokens, checked, logprobs, tile=SIZES[0].tile)
    chosen_logprobs(logits, ids, given, tile=SIZES[0].tile)

    truth = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logprobs.double(), truth.amax(-1), **CLOSE)
    torch.testing.assert_close(given.double(), truth.gather(1, ids[:, None])[:, 0], **CLOSE)


def test_a_log_probability_has_the_same_bits_alone_and_in_a_batch():
    logits = logits_of(3, 5, 150)[:, :101]
    logits[1], logits[3, 50] = -INF, math.nan
    logits[4, 64:] = -INF
    tokens, checked = torch.full((2, 5), -7)
    logprobs = torch.full((5,), -7.0)
    argmax_tokens(logits, tokens, checked, logprobs, tile=SIZES[0].tile)

    for i in (0, 2, 4):
        alone = torch.full((1,), -7.0)
        argmax_tokens(logits[i : i + 1], tokens[:1], checked[:1], alone, tile=SIZES[0].tile)
        assert torch.equal(alone, logprobs[i : i + 1])


def test_a_token_of_probability_one_has_a_log_probability_of_positive_zero():
    logits = torch.full((1, 100), -1e30)
    logits[0, 70] = -1e3
    tokens, checked = torch.full((2, 1), -7)
    logprobs = torch.full((1,), -7.0)

    argmax_tokens(logits, tokens, checked, logprobs, tile=SIZES[0].tile)

    assert str(logprobs.item()) == "0.0"


def test_candidate_bounds_follow_from_the_filters():
    sizes = SampleSizes(group=10, capacity=100)

    assert candidate_bounds(100, 7, 0.5, sizes) == (0, 1)  # all fit
    assert candidate_bounds(1000, 7, 0.5, sizes) == (7, 1)
    assert candidate_bounds(1000, 101, 0.5, sizes) == (0, 1)  # more than groups
    assert candidate_bounds(1000, 0, 0.5, sizes) == (50, 2**40 // 2000)
    assert candidate_bounds(1000, 0, 1.0, sizes) == (50, 1)
