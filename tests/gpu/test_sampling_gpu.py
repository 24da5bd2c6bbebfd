"""Sampling kernels on a GPU against the reference rules, the host sampler, alone and in a batch."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from kernels.sampling import tokens as token_ops
from kernels.sampling.gpu.argmax import argmax_tokens
from kernels.sampling.rows import SampleSizes
from model.sampling.device import DeviceTokens
from model.sampling.noise import noise_key
from model.sampling.sampler import Sampler
from tests.gpu.synchronization import forbid_synchronization
from tests.kernels.sampling.sampled import by_host, by_kernel, by_rule
from tests.model.sampling.sampling_rows import oracle, sampling_row, varied_rows
from tests.model.sampling.torch_noise import gumbel_noise

VOCABULARIES = [512, 32003, 151936, 262144]
FILTERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 1.8},
    {"top_k": 50},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    {"top_k": 3000, "temperature": 1.5},
    {"top_k": 20000, "top_p": 0.99},
    {"top_p": 0.999999, "temperature": 3.0},
    {"top_k": 10**9},
    {"typical_p": 0.9},
    {"top_k": 50, "typical_p": 0.5},
    {"temperature": 0.0, "banned": range(0, 500, 3)},
    {"temperature": 1.8, "banned": (0, 31, 32, 511)},
    {"top_k": 50, "top_p": 0.95, "banned": range(1, 500, 2)},
    {"top_p": 0.999999, "temperature": 3.0, "banned": range(100, 400)},
]


def supports_pdl():
    return kernels.detect("cuda").sm >= 90


def logits_on_gpu(rows, vocab, scale=2.5, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, vocab, device="cuda", generator=generator) * scale).to(dtype)


def filtered_rows(count, seed=0):
    return [
        sampling_row(seed=seed * 1000 + i, position=i, **FILTERS[i % len(FILTERS)])
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.5, 2.5], ids=["flat", "peaked"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_equal_those_of_the_reference_rules(vocab, scale, dtype):
    for seed in range(2):
        logits = logits_on_gpu(32, vocab, scale, dtype, seed)
        rows = filtered_rows(32, seed)

        pairs = zip(by_kernel(logits, rows), by_rule(logits, rows), strict=True)

        # The device's logarithm and the order of two subtractions round differently: 1e-6 of the best sum.
        differing = [
            (logits[i], rows[i], tokens) for i, tokens in enumerate(pairs) if len(set(tokens)) > 1
        ]
        assert all(is_near_tie(*case) for case in differing)
        assert len(differing) <= 1


def is_near_tie(logits, row, tokens):
    """Whether the sums of noise and scaled logit of two tokens are equal up to rounding."""
    ids = torch.tensor(tokens)
    key = torch.tensor([noise_key(row.parameters.seed, row.position)], dtype=torch.float64)
    noise = gumbel_noise(ids, key[:, :1], key[:, 1:])[0].double()
    scaled = logits[ids.to(logits.device)].double().cpu() * row.parameters.inverse_temperature
    sums = noise + scaled
    return abs(float(sums[0] - sums[1])) < 1e-5


def test_at_least_999_of_1000_tokens_equal_those_of_the_host_sampler():
    agreed, count = 0, 0
    for seed in range(8):
        logits = logits_on_gpu(512, 50257, 2.5 - 0.25 * seed, torch.float32, seed)
        rows = filtered_rows(512, seed)
        pairs = list(zip(by_kernel(logits, rows), by_host(logits, rows), strict=True))
        agreed += sum(ours == host for ours, host in pairs)
        count += len(pairs)

    assert agreed >= 0.999 * count


def test_tokens_equal_those_of_the_host_where_the_best_sums_are_well_separated():
    vocab, count, compared = 50257, 512, 0
    logits = logits_on_gpu(count, vocab, dtype=torch.float32)
    rows = [sampling_row(seed=3, position=i, temperature=0.7) for i in range(count)]
    keys = torch.tensor([noise_key(3, i) for i in range(count)], dtype=torch.float64).cuda()
    noise = gumbel_noise(torch.arange(vocab, device="cuda"), keys[:, :1], keys[:, 1:])
    best = (logits * rows[0].parameters.inverse_temperature + noise).topk(2).values

    pairs = zip(by_kernel(logits, rows), by_host(logits, rows), strict=True)

    for gap, (ours, host) in zip((best[:, 0] - best[:, 1]).tolist(), pairs, strict=True):
        if gap > 1e-4:
            compared += 1
            assert ours == host
    assert compared > 0.99 * count


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"typical_p": 0.7}], ids=str
)
def test_tokens_follow_the_filtered_distribution(filters):
    vocab, count = 5000, 20_000
    logits = logits_on_gpu(1, vocab, 2.0, torch.float32)
    rows = [sampling_row(seed=1, position=i, **filters) for i in range(count)]

    sampled = torch.tensor(by_kernel(logits.expand(count, -1), rows), device="cuda")

    probabilities = torch.softmax(oracle(logits, filters), -1)[0].double()
    order = probabilities.argsort(descending=True)
    counts = torch.bincount(sampled, minlength=vocab)[order].double()
    expected = probabilities[order] * count
    assert not counts[expected == 0].any()
    # Bins of one likely token each, and one of all others.
    likely = int((expected >= 20).sum())
    observed = torch.cat([counts[:likely], counts[likely:].sum()[None]])
    expected = torch.cat([expected[:likely], expected[likely:].sum()[None]])
    kept = expected > 0
    chi_square = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("kind", ["equal", "few", "tiny", "huge", "sparse"])
def test_ties_and_extreme_logits_follow_the_reference_rules(kind):
    logits = logits_on_gpu(len(FILTERS), 151936, dtype=torch.float32)
    if kind == "equal":
        logits.zero_()
    elif kind == "few":
        logits.round_()
    elif kind == "sparse":
        logits.masked_fill_(logits < 9, -math.inf)
    else:
        logits *= {"tiny": 1e-20, "huge": 1e30}[kind]
    rows = filtered_rows(len(FILTERS))

    assert by_kernel(logits, rows) == by_rule(logits, rows)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_token_of_a_row_does_not_depend_on_the_batch(vocab):
    logits, rows = logits_on_gpu(300, vocab), filtered_rows(300)

    together = by_kernel(logits, rows)

    assert by_kernel(logits, rows) == together
    for i in (0, 1, 4, 6, 12, 151, 299):
        assert by_kernel(logits[i : i + 1], rows[i : i + 1]) == [together[i]]
    assert by_kernel(logits[100:228], rows[100:228]) == together[100:228]
    if supports_pdl():
        assert by_kernel(logits, rows, pdl=True) == together


@pytest.mark.parametrize(
    "sizes",
    [
        SampleSizes(tile=1024),
        SampleSizes(capacity=256),
        SampleSizes(group=64, chunk=512, loads=2, ways=4),
    ],
    ids=str,
)
def test_kernel_sizes_do_not_change_tokens(sizes):
    logits, rows = logits_on_gpu(32, 151936), filtered_rows(32)

    assert by_kernel(logits, rows, sizes) == by_kernel(logits, rows)


def test_tokens_equal_those_of_the_host_up_to_rounding():
    logits, rows = logits_on_gpu(330, 50257), varied_rows(330, 50257)
    before = logits.clone()

    ours, theirs = DeviceTokens(logits, rows).result(), Sampler().forward(logits.cpu(), rows)

    assert torch.equal(logits, before)
    assert sum(a.token_id == b.token_id for a, b in zip(ours, theirs, strict=True)) >= 328


def test_a_gpu_without_sampling_kernels_leaves_sampling_to_the_host(monkeypatch):
    logits, rows = logits_on_gpu(48, 50257), varied_rows(48, 50257)
    monkeypatch.setattr("model.sampling.sampler.has_kernels", lambda _device: False)

    pending = Sampler().begin(logits, rows)

    assert not pending.feeds_next
    assert pending.tokens.tolist() == [0] * 48
    assert pending.result() == Sampler().forward(logits.cpu(), rows)


def test_sampling_does_not_synchronize_until_the_result_is_read():
    logits, rows = logits_on_gpu(16, 151936), filtered_rows(16)
    DeviceTokens(logits, rows).result()
    with forbid_synchronization():
        pending = DeviceTokens(logits, rows)

    assert pending.feeds_next
    assert pending.tokens.tolist() == [token.token_id for token in pending.result()]


def test_a_row_with_non_finite_logits_fails_alone():
    logits, rows = logits_on_gpu(32, 151936), filtered_rows(32)
    clean = DeviceTokens(logits, rows).result()
    logits[4, 151935], logits[9, 7], logits[12] = math.nan, math.inf, -math.inf

    tokens = DeviceTokens(logits, rows).result()

    assert [i for i, token in enumerate(tokens) if token.error] == [4, 9, 12]
    assert all(a == b for a, b in zip(tokens, clean, strict=True) if not a.error)
    assert Sampler().forward(logits[:4], rows[:4]) == clean[:4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 512])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_argmax_returns_the_first_of_equal_largest_logits(vocab, rows, dtype):
    logits = logits_on_gpu(rows, vocab, 1.0, dtype).mul_(4).round_()
    tokens, checked = torch.full((2, rows), -7, device="cuda")
    logprobs = torch.empty(rows, device="cuda")
    largest = logits.amax(-1, keepdim=True)
    first = (logits == largest).int().argmax(-1)

    argmax_tokens(logits, tokens, checked, logprobs)

    assert torch.equal(tokens, first)
    assert torch.equal(checked, first)
    for start in range(0, rows, 64):
        part = slice(start, start + 64)
        truth = logits[part].double().log_softmax(-1).amax(-1)
        torch.testing.assert_close(logprobs[part].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_log_probability_of_a_given_token_does_not_depend_on_the_batch(vocab, rows, dtype):
    logits = logits_on_gpu(rows, vocab, 3.0, dtype)
    logits[:, vocab // 2 : vocab // 2 + 9] = -math.inf
    tokens = torch.arange(rows, device="cuda") * 7 % vocab

    found = token_ops.chosen_logprobs(logits, tokens)
    alone = [token_ops.chosen_logprobs(logits[i : i + 1], tokens[i : i + 1]) for i in range(rows)]

    truth = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, torch.cat(alone))


def test_argmax_can_be_captured_in_a_graph():
    logits = logits_on_gpu(64, 151936)
    tokens, checked = torch.zeros((2, 64), dtype=torch.int64, device="cuda")
    logprobs = torch.empty(64, device="cuda")
    token_ops.argmax_tokens(logits, tokens, checked, logprobs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ops.argmax_tokens(logits, tokens, checked, logprobs)

    for seed in range(1, 4):
        logits.copy_(logits_on_gpu(64, 151936, 3.0, seed=seed))
        logits[seed, 5 * seed] = math.nan
        graph.replay()
        assert checked[seed] == -1
        assert tokens[seed] == 5 * seed
        largest = logits.amax(-1, keepdim=True)
        first = (logits == largest).int().argmax(-1)
        first[seed] = -1
        assert torch.equal(checked, first)
        truth = logits.double().log_softmax(-1).amax(-1)[first >= 0]
        torch.testing.assert_close(logprobs[first >= 0].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_a_log_probability_has_the_same_bits_whatever_other_rows_report(size):
    logits = torch.randn((3, size), device="cuda").bfloat16()
    plain = [sampling_row(temperature=0.0, logprobs=True) for _ in range(3)]
    greedy = torch.empty(3, device="cuda")
    tokens = torch.empty(3, dtype=torch.int64, device="cuda")
    argmax_tokens(logits, tokens, tokens.clone(), greedy)

    alone = Sampler().forward(logits, plain)
    with_top = sampling_row(temperature=0.0, top_logprobs=5)
    mixed = Sampler().forward(logits, [plain[0], with_top, plain[2]])

    assert [it.logprob for it in alone] == greedy.tolist()
    assert (mixed[0], mixed[2]) == (alone[0], alone[2])
    assert mixed[1] == Sampler().forward(logits[1:2], [with_top])[0]
