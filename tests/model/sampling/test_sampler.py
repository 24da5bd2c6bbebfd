from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.logprobs import prompt_logprobs, prompt_top_tokens
from model.sampling.parameters import SampledToken
from model.sampling.sampler import CopiedTokens, Sampler
from tests.model.sampling import plain_device
from tests.model.sampling.sampling_rows import (
    NUM_KINDS,
    VOCAB,
    logits_of,
    sampling_row,
    varied_rows,
)

# --- greedy -----------------------------------------------------------------------------------------------------


def test_temperature_zero_selects_the_argmax(forward) -> None:
    logits = logits_of(0, 5)

    tokens = forward(logits, [sampling_row(temperature=0.0)] * 5)

    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()
    assert all(type(t.token_id) is int and t.logprob is None and not t.top for t in tokens)


def test_greedy_ignores_filters_and_seed(forward) -> None:
    logits = logits_of(1, 1)

    (token,) = forward(logits, [sampling_row(temperature=0.0, top_k=2, top_p=0.1, seed=99)])

    assert token.token_id == int(logits.argmax())


def test_the_argmax_of_equal_logits_is_the_smallest_id(forward) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 17, 80]] = 1.0

    (token,) = forward(logits, [sampling_row(temperature=0.0)])

    assert token.token_id == 17


def test_an_empty_batch_gives_no_tokens() -> None:
    assert Sampler().forward(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(forward, dtype) -> None:
    logits = logits_of(2, NUM_KINDS).to(dtype)

    assert forward(logits, varied_rows(NUM_KINDS)) == forward(
        logits.float(), varied_rows(NUM_KINDS)
    )


def test_sampling_does_not_change_the_logits(forward) -> None:
    logits = logits_of(3, NUM_KINDS)
    before = logits.clone()

    forward(logits, varied_rows(NUM_KINDS))

    assert torch.equal(logits, before)


# --- independence -----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 1000), st.permutations(range(2 * NUM_KINDS)), st.integers(1, 2 * NUM_KINDS))
def test_a_rows_result_is_bitwise_equal_alone_and_in_a_batch(seed, order, count) -> None:
    logits, rows = logits_of(seed, 2 * NUM_KINDS), varied_rows(2 * NUM_KINDS)
    picked = order[:count]

    for sample in (Sampler().forward, plain_device.sample):
        alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in picked]
        together = sample(logits[picked].contiguous(), [rows[i] for i in picked])
        assert together == alone


@pytest.mark.parametrize("vocab", [101, 4096, 50257])
def test_rows_of_a_real_vocabulary_do_not_depend_on_each_other(forward, vocab) -> None:
    logits, rows = logits_of(4, NUM_KINDS, vocab), varied_rows(NUM_KINDS, vocab)

    together = forward(logits, rows)

    assert together == [forward(logits[i : i + 1], [rows[i]])[0] for i in range(NUM_KINDS)]


def test_the_number_of_threads_does_not_change_a_token() -> None:
    logits, rows = logits_of(5, NUM_KINDS, 50257), varied_rows(NUM_KINDS)
    threads = torch.get_num_threads()

    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(Sampler().forward(logits, rows))
    torch.set_num_threads(threads)

    assert results[0] == results[1]


def test_sampling_does_not_advance_global_generators(forward) -> None:
    # NumPy's global generator is the legacy one.
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    forward(logits_of(6, NUM_KINDS), varied_rows(NUM_KINDS))

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_the_device_sampler_matches_the_host_sampler() -> None:
    agreed = 0
    for seed in range(40):
        logits, rows = logits_of(seed, 2 * NUM_KINDS), varied_rows(2 * NUM_KINDS)
        host = Sampler().forward(logits, rows)
        device = plain_device.sample(logits, rows)
        # exp() may round differently in NumPy and PyTorch: a sample at the boundary between two tokens may differ.
        agreed += sum(
            h.token_id == d.token_id and [i for i, _ in h.top] == [i for i, _ in d.top]
            for h, d in zip(host, device, strict=True)
        )

    assert agreed >= 2 * NUM_KINDS * 40 - 1


def test_without_sampling_kernels_the_host_samples_a_copy_of_the_logits() -> None:
    logits, rows = logits_of(7, NUM_KINDS), varied_rows(NUM_KINDS)
    expected = Sampler().forward(logits, rows)

    pending = CopiedTokens(logits, lambda copied: Sampler().forward(copied, rows))
    logits.zero_()

    assert not pending.feeds_next
    assert pending.tokens.tolist() == [0] * NUM_KINDS
    assert pending.result() == expected


def test_nothing_is_prepared_for_a_sampler_that_works_on_the_host(monkeypatch) -> None:
    logits, rows = logits_of(7, 2), varied_rows(2)
    assert Sampler().plan(logits, rows) is None

    monkeypatch.setattr("model.sampling.sampler.has_kernels", lambda device: True)
    assert Sampler().plan(logits, rows) is None
    on_device = torch.empty(2, VOCAB, device="meta")
    tables = Sampler().plan(on_device, rows)
    assert [group for group, _ in tables.tables] == [[0, 1], []]
    monkeypatch.setattr("model.sampling.sampler.has_kernels", lambda device: False)
    assert Sampler().plan(on_device, rows) is None


# --- log-probabilities ------------------------------------------------------------------------------------------


def test_logprobs_are_natural_logarithms_under_the_unmodified_logits(forward) -> None:
    logits = logits_of(14, 3)
    rows = [
        sampling_row(temperature=0.0, logprobs=True),
        sampling_row(temperature=0.3, top_k=2, logprobs=True, seed=1),
        sampling_row(temperature=0.0, banned=(int(logits[2].argmax()),), logprobs=True),
    ]

    tokens = forward(logits, rows)

    expected = torch.log_softmax(logits, -1)
    for i, token in enumerate(tokens):
        assert token.logprob == expected[i, token.token_id].item()
        assert type(token.logprob) is float


def test_top_logprobs_are_sorted_by_probability_then_by_id(forward) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 1.0]])

    (token,) = forward(logits, [sampling_row(temperature=0.0, top_logprobs=5)])

    expected = torch.log_softmax(logits, -1)[0]
    assert token.top == tuple((i, expected[i].item()) for i in (1, 3, 4, 2, 5))
    assert token.logprob == expected[1].item()


def test_many_tokens_of_one_probability_are_reported_by_id(forward) -> None:
    """More than a sort of small arrays, which keeps the order of equals in any case, would take."""
    logits = torch.full((1, VOCAB), -3.0)
    logits[0, 1::2] = 0.5

    (token,) = forward(logits, [sampling_row(temperature=0.0, top_logprobs=70)])

    assert [i for i, _ in token.top] == [*range(1, VOCAB, 2), *range(0, 40, 2)]


def test_each_row_gets_the_requested_number_of_top_logprobs(forward) -> None:
    logits = logits_of(15, 4)
    asked = [0, 3, 10**6, 1]

    tokens = forward(logits, [sampling_row(temperature=0.0, top_logprobs=n) for n in asked])

    assert [len(t.top) for t in tokens] == [0, 3, VOCAB, 1]
    assert [t.logprob is None for t in tokens] == [True, False, False, False]


@pytest.mark.parametrize("others", [[], [0], [5], [0, 5], [-1, 5, 0]])
def test_a_row_s_log_probabilities_do_not_depend_on_what_the_others_report(forward, others) -> None:
    """Rows with the sampled token's only, with the most likely ones too, and with none (-1)."""
    vocab = 50257
    logits = logits_of(22, 2 + len(others), vocab)
    counts = [0, 3, *others]
    rows = [
        sampling_row(seed=i, logprobs=count >= 0, top_logprobs=max(count, 0))
        for i, count in enumerate(counts)
    ]

    tokens = forward(logits, rows)

    for i, count in enumerate(counts):
        assert tokens[i] == forward(logits[i : i + 1], rows[i : i + 1])[0]
        assert len(tokens[i].top) == max(count, 0)
        if count >= 0:
            expected = torch.log_softmax(logits[i], -1)[tokens[i].token_id].item()
            assert tokens[i].logprob == pytest.approx(expected, rel=1e-6)
        else:
            assert tokens[i].logprob is None


def test_tokens_of_probability_zero_are_not_in_the_top_logprobs(forward) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 5] = 1.0

    (token,) = forward(logits, [sampling_row(top_logprobs=3, top_p=0.5)])

    assert token == SampledToken(5, 0.0, ((5, 0.0),))


def test_prompt_logprobs_are_those_of_the_following_tokens(monkeypatch) -> None:
    logits = logits_of(16, 50)
    ids = torch.arange(50) * 2
    expected = torch.log_softmax(logits, -1)[torch.arange(50), ids].tolist()

    assert prompt_logprobs(logits, ids) == expected
    assert prompt_logprobs(logits, ids.tolist()) == expected
    monkeypatch.setattr("model.sampling.logprobs._BLOCK", 7 * VOCAB)
    assert prompt_logprobs(logits, ids) == expected
    assert prompt_logprobs(logits[:0], []) == []


def test_prompt_top_tokens_are_the_likeliest_with_equals_by_id(monkeypatch) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [9, 4]] = 2.0
    logits[2] = -torch.arange(VOCAB).float()
    expected = torch.log_softmax(logits, -1)

    top = prompt_top_tokens(logits, 2)

    assert [[i for i, _ in row] for row in top] == [[0, 1], [4, 9], [0, 1]]
    assert top[1][0][1] == expected[1, 4].item()
    monkeypatch.setattr("model.sampling.logprobs._BLOCK", 2 * VOCAB)
    assert prompt_top_tokens(logits, 2) == top
    assert len(prompt_top_tokens(logits, 2 * VOCAB)[0]) == VOCAB


def test_a_sampled_logprob_equals_the_prompt_logprob_of_the_same_row(forward) -> None:
    logits = logits_of(17, 6, vocab=50257)
    tokens = forward(logits, [sampling_row(seed=i, logprobs=True) for i in range(6)])

    assert [t.logprob for t in tokens] == prompt_logprobs(logits, [t.token_id for t in tokens])


# --- broken rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("kind", range(NUM_KINDS))
def test_a_row_with_non_finite_logits_fails_alone(forward, value, kind) -> None:
    rows = varied_rows(NUM_KINDS)
    logits = logits_of(18, NUM_KINDS)
    clean = forward(logits, rows)
    broken = logits.clone()
    broken[kind, 60] = value

    tokens = forward(broken, rows)

    assert tokens[kind].token_id is None
    assert "not finite" in (tokens[kind].error or "")
    assert [t for i, t in enumerate(tokens) if i != kind] == [
        t for i, t in enumerate(clean) if i != kind
    ]


@pytest.mark.parametrize("row", varied_rows(NUM_KINDS), ids=lambda row: str(row.position))
def test_a_row_with_only_minus_infinity_fails(forward, row) -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[1] = 0.0

    failed, sound = forward(logits, [row, sampling_row()])

    assert failed.error
    assert sound.error is None


def test_a_row_without_allowed_tokens_fails(forward) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 2:4] = 1.0

    for temperature in (0.0, 1.0):
        (token,) = forward(logits, [sampling_row(temperature=temperature, banned=(2, 3))])
        assert token.error


def test_a_nan_logit_of_a_banned_token_still_fails_the_row(forward) -> None:
    logits = logits_of(19, 1)
    logits[0, 9] = math.nan

    assert forward(logits, [sampling_row(banned=(9,))])[0].error


# --- on the accelerator -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 50257, 151936])
def test_on_cuda_a_rows_result_is_bitwise_equal_alone_and_in_a_batch(vocab) -> None:
    logits, rows = logits_of(20, 33, vocab).cuda(), varied_rows(33, vocab)

    together = Sampler().forward(logits, rows)

    assert together == [Sampler().forward(logits[i : i + 1], [rows[i]])[0] for i in range(33)]
    assert together == Sampler().forward(logits, rows)


@pytest.mark.gpu
def test_on_cuda_tokens_match_the_host_except_for_rounding() -> None:
    agreed = 0
    for seed in range(20):
        logits, rows = logits_of(seed, 2 * NUM_KINDS), varied_rows(2 * NUM_KINDS)
        host, device = Sampler().forward(logits, rows), Sampler().forward(logits.cuda(), rows)
        agreed += sum(h.token_id == d.token_id for h, d in zip(host, device, strict=True))

    assert agreed >= 2 * NUM_KINDS * 20 - 2


@pytest.mark.gpu
def test_on_cuda_a_row_with_non_finite_logits_fails_alone() -> None:
    logits, rows = logits_of(21, NUM_KINDS).cuda(), varied_rows(NUM_KINDS)
    clean = Sampler().forward(logits, rows)
    logits[4, 7] = math.nan

    tokens = Sampler().forward(logits, rows)

    assert tokens[4].error
    assert tokens[:4] + tokens[5:] == clean[:4] + clean[5:]
