from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from model.sampling.noise import HostNoise
from model.sampling.rows import TokenHistory
from model.sampling.sampler import Sampler
from tests.model.sampling.sampling_rows import VOCAB, logits_of, oracle, sampling_row

# --- randomness -------------------------------------------------------------------------------------------------


def test_the_same_seed_and_position_sample_the_same_token(forward) -> None:
    logits = logits_of(8, 1)

    def sampled(seed: int) -> list[int | None]:
        return [
            forward(logits, [sampling_row(seed=seed, position=p, temperature=3.0)])[0].token_id
            for p in range(20)
        ]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert len(set(sampled(1))) > 5


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
def test_tokens_follow_the_filtered_distribution(forward, filters) -> None:
    logits = logits_of(9, 1, vocab=12, scale=1.5)
    n = 8000
    rows = [sampling_row(seed=7, position=i, **filters) for i in range(n)]

    sampled = [t.token_id for t in forward(logits.expand(n, -1).contiguous(), rows)]

    expected = torch.softmax(oracle(logits, filters), -1)[0].double().numpy() * n
    counts = np.bincount(sampled, minlength=12)
    assert not counts[expected == 0].any()
    likely = expected > 0
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert chi_square < 31.3  # at most 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("along", ["seed", "position"])
def test_tokens_of_a_large_vocabulary_follow_its_distribution(along) -> None:
    vocab, n, bins = 50_000, 4000, 20
    logits = logits_of(9, 1, vocab, scale=1.0)
    rows = [
        sampling_row(seed=i if along == "seed" else 3, position=5 if along == "seed" else i)
        for i in range(n)
    ]

    sampled = [Sampler().forward(logits, [row])[0].token_id for row in rows]

    cumulative = torch.softmax(logits.double(), -1)[0].cumsum(-1).numpy()
    # The mass before a sampled token is uniform, and unrelated to that before the next one.
    values = cumulative[sampled]
    counts = np.histogram(values, bins=bins, range=(0, 1))[0]
    chi_square = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(n)


# --- filters ----------------------------------------------------------------------------------------------------


def support(logits: torch.Tensor, filters: dict[str, float], sample) -> set[int]:
    """Return every token that the row can sample; with `each_token_in_turn`."""
    rows = [sampling_row(position=i, **filters) for i in range(logits.shape[1])]
    return {t.token_id for t in sample(logits.expand(len(rows), -1).contiguous(), rows)}


@pytest.fixture
def each_token_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the noise choose the token whose id is the row's position if the filters keep it, else the likeliest one."""

    def choose(_self: HostNoise, distances, key, ids):
        tokens = np.arange(len(distances)) if ids is None else ids
        return int(np.where(tokens == key[0], -1.0, distances).argmin())

    def noise(ids, low, _high):
        return torch.where(ids == low, 1e9, 0.0)

    monkeypatch.setattr(HostNoise, "argmax", choose)
    monkeypatch.setattr("tests.kernels.sampling.plain.gumbel_noise", noise)
    monkeypatch.setattr("model.sampling.host.noise_key", lambda _seed, position: (position, 0))
    monkeypatch.setattr(
        "model.sampling.device.noise_keys",
        lambda _seeds, positions: np.array([positions, [0] * len(positions)]),
    )


@pytest.mark.usefixtures("each_token_in_turn")
@pytest.mark.parametrize("seed", range(3))
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
def test_filters_keep_the_same_tokens_as_transformers(forward, filters, seed) -> None:
    logits = logits_of(100 + seed, 1, vocab=24, scale=1.2)
    kept = oracle(logits, filters)[0].isfinite()

    assert support(logits, filters, forward) == set(kept.nonzero()[:, 0].tolist())


@pytest.mark.usefixtures("each_token_in_turn")
def test_top_k_keeps_all_ties_with_the_last_token(forward) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -5.0]])

    assert support(logits, {"top_k": 2}, forward) == {1, 2, 3, 4}


@pytest.mark.usefixtures("each_token_in_turn")
def test_top_p_splits_ties_by_id(forward) -> None:
    logits = torch.zeros(1, 8)

    assert support(logits, {"top_p": 0.5}, forward) == {0, 1, 2, 3}


@pytest.mark.usefixtures("each_token_in_turn")
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

    assert len(support(logits, filters, forward)) == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_temperatures_still_sample_a_token(forward, temperature, scale) -> None:
    logits = logits_of(11, 1) * scale
    logits[0, 3] = -torch.inf

    for filters in ({}, {"top_p": 0.9}, {"typical_p": 0.9}, {"top_k": 10**9}):
        (token,) = forward(logits, [sampling_row(temperature=temperature, **filters)])
        assert token.error is None
        assert token.token_id != 3
        if temperature <= 1e-6 and scale >= 1:
            assert token.token_id == int(logits.argmax())


def test_top_k_above_the_vocabulary_keeps_everything(forward) -> None:
    logits = logits_of(12, 30)

    huge = forward(logits, [sampling_row(seed=i, top_k=10**12) for i in range(30)])

    assert {t.token_id for t in huge} <= set(range(VOCAB))
    assert all(t.error is None for t in huge)


# --- penalties and bans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.3, 100.0])
def test_the_repetition_penalty_matches_transformers(forward, penalty) -> None:
    prompt, output = [3, 3, 50, 7], [8, 50]
    for seed in range(20):
        logits = logits_of(seed, 1)
        logits[0, prompt + output] += 4
        expected = oracle(logits.clone(), {"repetition_penalty": penalty}, prompt + output)
        row = sampling_row(
            temperature=0.0, repetition_penalty=penalty, prompt_ids=prompt, output_ids=output
        )

        assert forward(logits, [row])[0].token_id == int(expected.argmax())


def test_presence_and_frequency_penalties_count_output_tokens_only(forward) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([5.0, 4.8, 4.5, 3.9])

    def greedy(**penalties: float) -> int | None:
        row = sampling_row(temperature=0.0, prompt_ids=[0] * 9, output_ids=[0, 1, 0], **penalties)
        return forward(logits, [row])[0].token_id

    assert greedy(presence_penalty=0.6) == 2  # 4.4, 4.2, 4.5
    assert greedy(frequency_penalty=0.15) == 0  # 4.7, 4.65, 4.5
    assert greedy(frequency_penalty=0.28) == 1  # 4.44, 4.52, 4.5
    assert greedy(frequency_penalty=0.35) == 2  # 4.3, 4.45, 4.5
    assert greedy(frequency_penalty=0.2, presence_penalty=-1.0) == 1  # 5.6, 5.6 rounds below, 4.5


def test_repetition_is_applied_before_presence_and_frequency(forward) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, :2] = torch.tensor([4.0, 1.2])
    row = sampling_row(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, output_ids=[0]
    )

    assert forward(logits, [row])[0].token_id == 1  # 4 / 2 - 1 = 1.0, and not (4 - 1) / 2 = 1.5


@pytest.mark.usefixtures("each_token_in_turn")
def test_banned_ids_are_never_sampled(forward) -> None:
    logits = torch.zeros(1, 4)

    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"typical_p": 0.99}):
        assert support(logits, {**filters, "banned": (0, 2)}, forward) == {1, 3}


def test_ids_outside_the_vocabulary_are_ignored_by_penalties_and_bans(forward) -> None:
    logits = logits_of(13, 1)
    row = sampling_row(
        temperature=0.0,
        banned=(VOCAB, 10**6),
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        prompt_ids=[VOCAB + 5],
        output_ids=[10**7],
    )

    assert forward(logits, [row])[0].token_id == int(logits.argmax())


def test_a_reused_history_gives_the_same_tokens_as_a_new_one(forward) -> None:
    tokens = [1, 2]
    kept = TokenHistory(tokens, num_prompt_tokens=2)
    for step in range(25):
        logits = logits_of(step, 1, vocab=12)
        row = sampling_row(
            seed=4,
            position=step,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            prompt_ids=[1, 2],
            output_ids=tokens[2:],
        )
        (anew,) = forward(logits, [row])

        assert forward(logits, [msgspec.structs.replace(row, history=kept)]) == [anew]
        tokens.append(anew.token_id)


def test_a_history_with_further_tokens_gives_the_tokens_of_a_new_one_and_stays_as_it_is(forward):
    kept = TokenHistory([1, 2, 3, 3], num_prompt_tokens=2)
    kept.seen_ids()
    for step in range(9):
        logits = logits_of(step, 1, vocab=12)
        drafted = [3, 5, 5, 7][: step % 5]
        row = sampling_row(
            seed=4,
            position=step,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            bad_words=((5, 7), (3, 4)),
            prompt_ids=[1, 2],
            output_ids=[3, 3, *drafted],
        )
        longer = kept.followed_by(drafted)

        assert longer.token_ids == [1, 2, 3, 3, *drafted]
        assert forward(logits, [msgspec.structs.replace(row, history=longer)]) == forward(
            logits, [row]
        )
    assert [it.tolist() for it in kept.output_counts()] == [[3], [2]]


def test_the_prompt_counts_as_seen_and_not_as_output_however_a_history_was_made() -> None:
    for is_counted in (False, True):
        history = TokenHistory([4, 4, 1], num_prompt_tokens=2)
        if is_counted:
            history.output_counts()
            history.seen_ids()
        longer = history.followed_by([1, 4, 9])

        for _ in range(2):
            ids, counts = longer.output_counts()
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 2, 4: 1, 9: 1}
            assert set(longer.seen_ids().tolist()) == {1, 4, 9}
        ids, counts = history.output_counts()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 1}
        assert set(history.seen_ids().tolist()) == {1, 4}
        assert longer.num_prompt_tokens == history.num_prompt_tokens == 2


@pytest.mark.usefixtures("each_token_in_turn")
@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (((3,),), {3}),
        (((3,), (5,), (3,)), {3, 5}),
        (((8, 4),), {4}),
        (((6, 8, 4), (7, 8, 2)), {4}),
        (((1, 6, 8, 4),), {4}),
        (((0, 1, 6, 8, 4), (8, 6, 4), (6, 4)), set()),
        (((8, 4), (VOCAB + 5,)), {4}),
    ],
    ids=str,
)
def test_the_last_token_of_a_bad_word_is_banned_after_its_other_tokens(
    forward, words, banned
) -> None:
    logits = torch.zeros(1, 10)
    row = {"bad_words": words, "prompt_ids": [1, 6], "output_ids": [8]}

    assert support(logits, row, forward) == set(range(10)) - banned
    (token,) = forward(logits, [sampling_row(temperature=0.0, **row)])
    assert token.token_id == min(set(range(10)) - banned)


# --- logit bias -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 20}, {"repetition_penalty": 1.7}],
    ids=str,
)
def test_a_bias_is_added_to_the_logits_before_everything_else(forward, parameters) -> None:
    bias = {0: 3.5, 17: -2.25, VOCAB - 1: 100.0, 50: -100.0}
    for seed in range(20):
        logits = logits_of(seed, 1)
        biased = logits.clone()
        biased[0, list(bias)] += torch.tensor(list(bias.values()))
        given = {"seed": seed, "prompt_ids": [17, 3, VOCAB - 1], **parameters}

        (token,) = forward(logits, [sampling_row(logit_bias=bias, **given)])

        assert token == forward(biased, [sampling_row(**given)])[0]


@pytest.mark.parametrize(
    ("logit", "bias", "penalty", "adjusted"),
    [
        (1.0, -3.0, 2.0, -4.0),  # penalized first: 1 / 2 - 3 = -2.5
        (-1.0, 3.0, 4.0, 0.5),  # -1 * 4 + 3 = -1
        (2.0, 2.0, 0.5, 8.0),  # 2 / 0.5 + 2 = 6
        (-2.0, -2.0, 0.5, -2.0),  # -2 * 0.5 - 2 = -3
    ],
)
@pytest.mark.parametrize("others", [{}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}])
def test_the_repetition_penalty_divides_what_the_bias_has_made_of_a_logit(
    forward, logit, bias, penalty, adjusted, others
) -> None:
    """The token is sampled where its adjusted logit is above another, and not where it is below."""
    if others:
        adjusted -= 0.5 + 2 * 0.25
    for margin, expected in ((-0.01, 5), (0.01, 9)):
        logits = torch.full((1, VOCAB), -99.0)
        logits[0, 5], logits[0, 9] = logit, adjusted + margin
        row = sampling_row(
            temperature=0.0,
            logit_bias={5: bias, VOCAB: 100.0, 3: -100.0},
            repetition_penalty=penalty,
            prompt_ids=[5, 3],
            output_ids=[5, 5] if others else [],
            **others,
        )

        assert forward(logits, [row])[0].token_id == expected


def test_each_row_of_a_batch_has_its_own_biases_and_penalties(forward) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0]]).expand(6, -1).contiguous()
    rows = [
        sampling_row(temperature=0.0),
        sampling_row(temperature=0.0, logit_bias={2: 3.0}),
        sampling_row(temperature=0.0, repetition_penalty=1.5, prompt_ids=[0]),
        sampling_row(temperature=0.0, presence_penalty=0.6, output_ids=[0, 1], logit_bias={2: 0.0}),
        sampling_row(temperature=0.0, frequency_penalty=0.3, output_ids=[0, 0]),
        sampling_row(
            temperature=0.0, logit_bias={0: -0.75}, repetition_penalty=1.6, output_ids=[1]
        ),
    ]

    assert [t.token_id for t in forward(logits, rows)] == [0, 2, 1, 0, 1, 0]


def test_the_largest_biases_in_effect_force_and_ban_a_token(forward) -> None:
    logits = logits_of(3, 1)

    def sampled(bias: dict[int, float]) -> set[int | None]:
        rows = [sampling_row(position=i, logit_bias=bias) for i in range(400)]
        return {t.token_id for t in forward(logits.expand(400, -1).contiguous(), rows)}

    assert sampled({9: 100.0}) == {9}
    top = int(logits.argmax())
    assert top not in sampled({top: -100.0})


def test_log_probabilities_do_not_include_the_bias(forward) -> None:
    logits = logits_of(4, 1)

    (token,) = forward(logits, [sampling_row(logit_bias={9: 100.0}, top_logprobs=2)])

    assert token.token_id == 9
    assert token.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 9].item())
    assert 9 not in dict(token.top)
