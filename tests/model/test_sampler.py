from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import device_sampling
from model.sampler import SampledToken, Sampler, SamplingRow, TokenHistory, prompt_logprobs
from model.sampling import uniform

VOCAB = 101  # odd, so that rows of a batch are aligned differently


def logits_of(seed: int, rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one_token(logits: torch.Tensor, row: SamplingRow) -> SampledToken:
    (token,) = Sampler().forward(logits[None], [row])
    return token


def varied_rows(count: int, vocab: int = VOCAB) -> list[SamplingRow]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_ids": range(0, vocab, 3)},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4, "output_ids": [1, 1, 5, 9] * 3},
        {"temperature": 0.0, "banned": (3, 4)},
        {"top_p": 0.7, "logprobs": True, "top_logprobs": 4},
    ]
    return [SamplingRow(seed=i, position=10 + i, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.fixture(params=["host", "device"])
def forward(request):
    """Both ways of sampling; the accelerator's runs on the CPU here, with few candidates at first."""
    if request.param == "host":
        return Sampler().forward
    return lambda logits, rows: device_sampling.sample(logits.detach().float().contiguous(), rows)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampling, "NUM_CANDIDATES", 16)


# --- choosing ---------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_most_likely_token(forward) -> None:
    logits = logits_of(0, 5)

    tokens = forward(logits, [SamplingRow(temperature=0.0)] * 5)

    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()
    assert all(type(t.token_id) is int and t.logprob is None and not t.top for t in tokens)


def test_greedy_ignores_filters_and_seed(forward) -> None:
    logits = logits_of(1, 1)

    (token,) = forward(logits, [SamplingRow(temperature=0.0, top_k=2, top_p=0.1, seed=99)])

    assert token.token_id == int(logits.argmax())


def test_equal_logits_are_won_by_the_smallest_id(forward) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 17, 80]] = 1.0

    (token,) = forward(logits, [SamplingRow(temperature=0.0)])

    assert token.token_id == 17


def test_an_empty_batch_gives_no_tokens() -> None:
    assert Sampler().forward(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(forward, dtype) -> None:
    logits = logits_of(2, 11).to(dtype)

    assert forward(logits, varied_rows(11)) == forward(logits.float(), varied_rows(11))


def test_the_logits_given_are_left_unchanged(forward) -> None:
    logits = logits_of(3, 11)
    before = logits.clone()

    forward(logits, varied_rows(11))

    assert torch.equal(logits, before)


# --- independence -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.permutations(range(22)), st.integers(1, 22))
def test_a_rows_result_is_bitwise_the_same_alone_and_among_others(seed, order, count) -> None:
    logits, rows = logits_of(seed, 22), varied_rows(22)
    picked = order[:count]

    for sample in (Sampler().forward, device_sampling.sample):
        alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in picked]
        together = sample(logits[picked].contiguous(), [rows[i] for i in picked])
        assert together == alone


@pytest.mark.parametrize("vocab", [101, 4096, 50257])
def test_rows_of_a_real_vocabulary_do_not_depend_on_their_neighbours(forward, vocab) -> None:
    logits, rows = logits_of(4, 11, vocab), varied_rows(11, vocab)

    together = forward(logits, rows)

    assert together == [forward(logits[i : i + 1], [rows[i]])[0] for i in range(11)]


def test_the_number_of_threads_does_not_change_a_draw() -> None:
    logits, rows = logits_of(5, 11, 50257), varied_rows(11)
    threads = torch.get_num_threads()

    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(Sampler().forward(logits, rows))
    torch.set_num_threads(threads)

    assert results[0] == results[1]


def test_draws_leave_the_global_generators_alone(forward) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    forward(logits_of(6, 11), varied_rows(11))

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_the_accelerators_rules_are_those_of_the_host() -> None:
    agreed = 0
    for seed in range(40):
        logits, rows = logits_of(seed, 22), varied_rows(22)
        host = Sampler().forward(logits, rows)
        device = device_sampling.sample(logits, rows)
        # exp() may round differently in NumPy and PyTorch: a draw on the very edge of a token may move.
        agreed += sum(
            h.token_id == d.token_id and [i for i, _ in h.top] == [i for i, _ in d.top]
            for h, d in zip(host, device, strict=True)
        )

    assert agreed >= 22 * 40 - 1


@pytest.mark.parametrize("candidates", [1, 2, 16, 100, 101, 5000])
def test_the_number_of_candidates_looked_at_first_does_not_change_a_draw(
    monkeypatch, candidates
) -> None:
    logits, rows = logits_of(7, 33), varied_rows(33)
    expected = device_sampling.sample(logits, rows)

    monkeypatch.setattr(device_sampling, "NUM_CANDIDATES", candidates)

    assert device_sampling.sample(logits, rows) == expected


# --- randomness -------------------------------------------------------------------------------------------------


def test_the_same_seed_and_position_draw_the_same_token(forward) -> None:
    logits = logits_of(8, 1)

    def draws(seed: int) -> list[int | None]:
        return [
            forward(logits, [SamplingRow(seed=seed, position=p)])[0].token_id for p in range(20)
        ]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) > 5


def test_uniform_numbers_are_pinned_so_that_seeds_keep_their_meaning() -> None:
    assert [uniform(s, p) for s, p in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 10**6))] == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.4611314684076886,
    ]


@pytest.mark.parametrize("along", ["seed", "position"])
def test_uniform_numbers_are_uniform_and_uncorrelated_along_seeds_and_positions(along) -> None:
    n = 20_000
    values = np.array([uniform(i, 5) if along == "seed" else uniform(5, i) for i in range(n)])

    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = float(((counts - n / 20) ** 2 / (n / 20)).sum())

    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"typical_p": 0.7},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(filters) -> None:
    logits = logits_of(9, 1, vocab=12, scale=1.5)
    n = 8000
    rows = [SamplingRow(seed=7, position=i, **filters) for i in range(n)]

    drawn = [t.token_id for t in Sampler().forward(logits.expand(n, -1), rows)]

    expected = torch.softmax(oracle(logits, filters), -1)[0].double().numpy() * n
    counts = np.bincount(drawn, minlength=12)
    assert not counts[expected == 0].any()
    likely = expected > 0
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert chi_square < 31.3  # at most 11 degrees of freedom, p = 0.001


# --- filters ----------------------------------------------------------------------------------------------------


def oracle(scores: torch.Tensor, filters: dict[str, float], seen: list[int] | None = None):
    """Transformers' processors in the order in which its `generate` applies them."""
    from transformers import generation as hf

    ids = torch.tensor([seen or []], dtype=torch.int64)
    makers = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    for name, make in makers.items():
        if name in filters:
            scores = make(filters[name])(ids, scores)
    return scores


def support(logits: torch.Tensor, filters: dict[str, float], sample, draws: int = 400) -> set[int]:
    """Every token that the row can draw, found by asking at every rank of the uniform number."""
    rows = [SamplingRow(seed=0, position=i, **filters) for i in range(draws)]
    return {t.token_id for t in sample(logits.expand(draws, -1).contiguous(), rows)}


@pytest.fixture
def evenly_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the random numbers by 1024 evenly spaced ones, so that few draws reach every token."""

    def spread(_seed: int, position: int) -> float:
        return (position + 0.5) / 1024

    monkeypatch.setattr("model.host_sampling.uniform", spread)
    monkeypatch.setattr("model.device_sampling.uniform", spread)


@pytest.mark.usefixtures("evenly_spread")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_k": 6},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.3},
        {"typical_p": 0.2},
        {"typical_p": 0.9},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.6},
        {"top_p": 0.9, "typical_p": 0.5},
        {"min_p": 0.05, "typical_p": 0.5},
    ],
    ids=str,
)
def test_filters_keep_what_transformers_keeps_with_the_same_probabilities(
    forward, filters, seed
) -> None:
    logits = logits_of(100 + seed, 1, vocab=24, scale=1.2)
    kept = torch.softmax(oracle(logits, filters), -1)[0].double().numpy()
    rows = [SamplingRow(position=i, **filters) for i in range(1024)]

    drawn = [t.token_id for t in forward(logits.expand(1024, -1).contiguous(), rows)]

    # Evenly spaced numbers hit each token in proportion to its probability, give or take one at each end.
    assert np.abs(np.bincount(drawn, minlength=24) - kept * 1024).max() <= 1.01


@pytest.mark.usefixtures("evenly_spread")
def test_top_k_keeps_all_that_tie_with_the_last(forward) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -5.0]])

    assert support(logits, {"top_k": 2}, forward, 1024) == {1, 2, 3, 4}


@pytest.mark.usefixtures("evenly_spread")
def test_top_p_splits_ties_by_id(forward) -> None:
    logits = torch.zeros(1, 8)

    assert support(logits, {"top_p": 0.5}, forward, 1024) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 1e-9},
        {"typical_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 1},
        {"top_k": 1, "top_p": 1e-9, "min_p": 1.0, "typical_p": 1e-9},
    ],
    ids=str,
)
def test_the_tightest_filters_keep_one_token(forward, filters) -> None:
    logits = logits_of(10, 1)

    assert len(support(logits, filters, forward, 50)) == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_temperatures_still_draw_a_token(forward, temperature, scale) -> None:
    logits = logits_of(11, 1) * scale
    logits[0, 3] = -torch.inf

    for filters in ({}, {"top_p": 0.9}, {"typical_p": 0.9}, {"top_k": 10**9}):
        (token,) = forward(logits, [SamplingRow(temperature=temperature, **filters)])
        assert token.error is None
        assert token.token_id != 3
        if temperature <= 1e-6 and scale >= 1:
            assert token.token_id == int(logits.argmax())


def test_top_k_above_the_vocabulary_keeps_everything(forward) -> None:
    logits = logits_of(12, 30)
    plain = [SamplingRow(seed=i) for i in range(30)]

    huge = forward(logits, [replace(row, top_k=10**12) for row in plain])

    assert {t.token_id for t in huge} <= set(range(VOCAB))
    assert all(t.error is None for t in huge)


# --- penalties and bans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.3, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(forward, penalty) -> None:
    prompt, output = [3, 3, 50, 7], [8, 50]
    for seed in range(20):
        logits = logits_of(seed, 1)
        logits[0, prompt + output] += 4
        expected = oracle(logits.clone(), {"repetition_penalty": penalty}, prompt + output)
        row = SamplingRow(
            temperature=0.0, repetition_penalty=penalty, prompt_ids=prompt, output_ids=output
        )

        assert forward(logits, [row])[0].token_id == int(expected.argmax())


def test_presence_and_frequency_penalties_count_output_tokens_only(forward) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([5.0, 4.8, 4.5, 3.9])

    def greedy(**penalties: float) -> int | None:
        row = SamplingRow(temperature=0.0, prompt_ids=[0] * 9, output_ids=[0, 1, 0], **penalties)
        return forward(logits, [row])[0].token_id

    assert greedy(presence_penalty=0.6) == 2  # 4.4, 4.2, 4.5
    assert greedy(frequency_penalty=0.15) == 0  # 4.7, 4.65, 4.5
    assert greedy(frequency_penalty=0.28) == 1  # 4.44, 4.52, 4.5
    assert greedy(frequency_penalty=0.35) == 2  # 4.3, 4.45, 4.5
    assert greedy(frequency_penalty=0.2, presence_penalty=-1.0) == 1  # 5.6, 5.6 rounds below, 4.5


def test_repetition_is_applied_before_presence_and_frequency(forward) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, :2] = torch.tensor([4.0, 1.2])
    row = SamplingRow(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, output_ids=[0])

    assert forward(logits, [row])[0].token_id == 1  # 4 / 2 - 1 = 1.0, and not (4 - 1) / 2 = 1.5


def test_banned_ids_are_never_drawn(forward) -> None:
    logits = torch.zeros(1, 4)

    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"typical_p": 0.99}):
        assert support(logits, {**filters, "banned": (0, 2)}, forward) == {1, 3}


def test_ids_outside_the_vocabulary_are_ignored_by_penalties_and_bans(forward) -> None:
    logits = logits_of(13, 1)
    row = SamplingRow(temperature=0.0, banned=(VOCAB, 10**6), repetition_penalty=1.2)
    row.frequency_penalty, row.prompt_ids, row.output_ids = 0.1, [VOCAB + 5], [10**7]

    assert forward(logits, [row])[0].token_id == int(logits.argmax())


def test_a_kept_history_gives_the_tokens_that_counting_anew_gives(forward) -> None:
    history, output = TokenHistory(), []
    for step in range(25):
        logits = logits_of(step, 1, vocab=12)
        row = SamplingRow(
            seed=4,
            position=step,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            prompt_ids=[1, 2],
            output_ids=output,
        )
        (anew,) = forward(logits, [row])

        assert forward(logits, [replace(row, history=history)]) == [anew]
        output = [*output, anew.token_id]


# --- log-probabilities ------------------------------------------------------------------------------------------


def test_logprobs_are_natural_and_of_the_unmodified_logits(forward) -> None:
    logits = logits_of(14, 3)
    rows = [
        SamplingRow(temperature=0.0, logprobs=True),
        SamplingRow(temperature=0.3, top_k=2, logprobs=True, seed=1),
        SamplingRow(temperature=0.0, banned=(int(logits[2].argmax()),), logprobs=True),
    ]

    tokens = forward(logits, rows)

    expected = torch.log_softmax(logits, -1)
    for i, token in enumerate(tokens):
        assert token.logprob == expected[i, token.token_id].item()
        assert type(token.logprob) is float


def test_top_logprobs_come_most_likely_first_and_equals_by_smaller_id(forward) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 1.0]])

    (token,) = forward(logits, [SamplingRow(temperature=0.0, top_logprobs=5)])

    expected = torch.log_softmax(logits, -1)[0]
    assert token.top == tuple((i, expected[i].item()) for i in (1, 3, 4, 2, 5))
    assert token.logprob == expected[1].item()


def test_each_row_gets_the_top_logprobs_it_asked_for(forward) -> None:
    logits = logits_of(15, 4)
    asked = [0, 3, 10**6, 1]

    tokens = forward(logits, [SamplingRow(temperature=0.0, top_logprobs=n) for n in asked])

    assert [len(t.top) for t in tokens] == [0, 3, VOCAB, 1]
    assert [t.logprob is None for t in tokens] == [True, False, False, False]


def test_impossible_tokens_are_left_out_of_the_top(forward) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 5] = 1.0

    (token,) = forward(logits, [SamplingRow(top_logprobs=3, top_p=0.5)])

    assert token == SampledToken(5, 0.0, ((5, 0.0),))


def test_prompt_logprobs_are_those_of_the_following_tokens(monkeypatch) -> None:
    logits = logits_of(16, 50)
    ids = torch.arange(50) * 2
    expected = torch.log_softmax(logits, -1)[torch.arange(50), ids].tolist()

    assert prompt_logprobs(logits, ids) == expected
    assert prompt_logprobs(logits, ids.tolist()) == expected
    monkeypatch.setattr("model.logprobs._BLOCK", 7 * VOCAB)
    assert prompt_logprobs(logits, ids) == expected
    assert prompt_logprobs(logits[:0], []) == []


def test_a_sampled_logprob_equals_the_prompt_logprob_of_the_same_row(forward) -> None:
    logits = logits_of(17, 6, vocab=50257)
    tokens = forward(logits, [SamplingRow(seed=i, logprobs=True) for i in range(6)])

    assert [t.logprob for t in tokens] == prompt_logprobs(logits, [t.token_id for t in tokens])


# --- broken rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("kind", range(11))
def test_a_row_that_is_not_finite_fails_alone(forward, value, kind) -> None:
    rows = varied_rows(11)
    logits = logits_of(18, 11)
    clean = forward(logits, rows)
    broken = logits.clone()
    broken[kind, 60] = value

    tokens = forward(broken, rows)

    assert tokens[kind].token_id is None
    assert "not finite" in (tokens[kind].error or "")
    assert [t for i, t in enumerate(tokens) if i != kind] == [
        t for i, t in enumerate(clean) if i != kind
    ]


@pytest.mark.parametrize("row", varied_rows(11), ids=str)
def test_a_row_of_nothing_but_minus_infinity_fails(forward, row) -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[1] = 0.0

    failed, sound = forward(logits, [row, SamplingRow()])

    assert failed.error
    assert sound.error is None


def test_a_row_whose_last_tokens_are_banned_fails(forward) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 2:4] = 1.0

    for temperature in (0.0, 1.0):
        (token,) = forward(logits, [SamplingRow(temperature=temperature, banned=(2, 3))])
        assert token.error


def test_a_nan_hidden_behind_a_ban_still_fails_the_row(forward) -> None:
    logits = logits_of(19, 1)
    logits[0, 9] = math.nan

    assert forward(logits, [SamplingRow(banned=(9,))])[0].error


# --- on the accelerator -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 50257, 151936])
def test_on_cuda_a_rows_result_is_bitwise_the_same_alone_and_among_others(
    monkeypatch, vocab
) -> None:
    monkeypatch.setattr(device_sampling, "NUM_CANDIDATES", 1024)
    logits, rows = logits_of(20, 33, vocab).cuda(), varied_rows(33, vocab)

    together = Sampler().forward(logits, rows)

    assert together == [Sampler().forward(logits[i : i + 1], [rows[i]])[0] for i in range(33)]
    assert together == Sampler().forward(logits, rows)


@pytest.mark.gpu
def test_on_cuda_tokens_are_those_of_the_host_but_for_rounding() -> None:
    agreed = 0
    for seed in range(20):
        logits, rows = logits_of(seed, 22), varied_rows(22)
        host, device = Sampler().forward(logits, rows), Sampler().forward(logits.cuda(), rows)
        agreed += sum(h.token_id == d.token_id for h, d in zip(host, device, strict=True))

    assert agreed >= 22 * 20 - 2


@pytest.mark.gpu
def test_on_cuda_a_row_that_is_not_finite_fails_alone() -> None:
    logits, rows = logits_of(21, 11).cuda(), varied_rows(11)
    clean = Sampler().forward(logits, rows)
    logits[4, 7] = math.nan

    tokens = Sampler().forward(logits, rows)

    assert tokens[4].error
    assert tokens[:4] + tokens[5:] == clean[:4] + clean[5:]
