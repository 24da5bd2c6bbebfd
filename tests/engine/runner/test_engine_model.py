"""The engine with a real, tiny model: the tokens do not depend on how the work is divided into steps."""

import math
import random

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import AbortRequests, EngineConfig
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.core.start_checks import StartupError
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint, **changes):
    config = {
        "model_path": str(checkpoint),
        "model_id": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_tokens": 4096,
        "block_size": 8,
        "cpu_threads": 1,
    }
    return LocalEngine(EngineConfig(**(config | changes)))


def greedy(request_id, prompt, max_new_tokens, **sampling):
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **sampling)
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params)


def tokens(events):
    return [event.token_id for event in events]


def random_prompt(rng, low, high):
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]


def assert_all_free(engine):
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0
    engine.engine._scheduler.check_invariants()


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Tokens of requests that run alone with unchunked prompts, by (prompt, length); cached."""
    engine = make_engine(checkpoint, enable_prefix_caching=False)
    known = {}

    def answer(prompt, max_new_tokens):
        key = (tuple(prompt), max_new_tokens)
        if key not in known:
            known[key] = tokens(engine.generate([greedy(0, prompt, max_new_tokens)])[0])
        return known[key]

    return answer


@pytest.mark.parametrize("chunk", [*range(1, 18), 64])
def test_prefill_in_chunks_gives_the_same_tokens_as_at_once(checkpoint, reference, chunk):
    prompt = random_prompt(random.Random(1), 60, 60)
    engine = make_engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=1)

    assert tokens(engine.generate([greedy(1, prompt, 40)])[0]) == reference(prompt, 40)
    assert_all_free(engine)


@pytest.mark.parametrize("shared", [7, 8, 9, 40, 59, 60])
def test_a_prefix_hit_gives_the_same_tokens_as_a_miss(checkpoint, reference, shared):
    rng = random.Random(2)
    first = random_prompt(rng, 60, 60)
    second = first[:shared] + random_prompt(rng, 60 - shared, 60 - shared)
    engine = make_engine(checkpoint)
    engine.generate([greedy(1, first, 20)])

    answer = engine.generate([greedy(2, second, 40)])[0]

    assert tokens(answer) == reference(second, 40)
    hits = engine.engine.stats().prefix_cache_hit_tokens
    assert hits == min(shared, 59) // 8 * 8


def test_a_preemption_does_not_change_the_tokens(checkpoint, reference):
    rng = random.Random(3)
    prompts = [random_prompt(rng, 10, 40) for _ in range(6)]
    engine = make_engine(checkpoint, kv_cache_tokens=160, max_model_len=128)

    answers = engine.generate([greedy(i, p, 60) for i, p in enumerate(prompts)])

    assert engine.engine.stats().num_preemptions > 0
    for prompt, events in zip(prompts, answers, strict=True):
        assert tokens(events) == reference(prompt, 60)
    assert_all_free(engine)


@pytest.mark.slow
def test_64_requests_in_a_cache_for_fewer_than_half_get_the_tokens_that_each_gets_alone(
    checkpoint, reference
):
    rng = random.Random(4)
    requests = [greedy(i, random_prompt(rng, 1, 90), rng.randint(1, 60)) for i in range(64)]
    needed = sum(len(r.prompt_token_ids) + r.sampling.max_new_tokens for r in requests)
    engine = make_engine(
        checkpoint, kv_cache_tokens=needed // 4, max_num_batched_tokens=512, max_num_seqs=64
    )

    answers = engine.generate(requests)

    assert engine.engine.stats().num_preemptions > 0
    for request, events in zip(requests, answers, strict=True):
        limit = request.sampling.max_new_tokens
        assert tokens(events) == reference(request.prompt_token_ids, limit)
        assert events[-1].finish_reason is FinishReason.LENGTH
    assert_all_free(engine)


def test_a_seeded_sample_does_not_depend_on_the_other_sequences(checkpoint):
    rng = random.Random(5)
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.9, seed=1234)
    prompt = random_prompt(rng, 20, 20)
    request = GenerateRequest(request_id=99, prompt_token_ids=prompt, sampling=sampling)
    neighbours = [greedy(i, random_prompt(rng, 1, 50), 30) for i in range(12)]

    alone = make_engine(checkpoint).generate([request])[0]
    among = make_engine(checkpoint, max_num_batched_tokens=32, max_num_seqs=32).generate(
        [*neighbours, request]
    )[-1]

    assert tokens(alone) == tokens(among)


def test_an_abort_between_steps_frees_the_blocks_at_once(checkpoint, reference):
    engine = make_engine(checkpoint)
    prompt = random_prompt(random.Random(6), 30, 30)
    engine.channel.inbox += [greedy(1, prompt, 100), greedy(2, prompt[:9], 20)]
    engine.engine.receive(wait=math.inf)
    for _ in range(5):
        engine.engine.step()
    engine.channel.inbox.append(AbortRequests([1]))
    engine.engine.receive(wait=math.inf)

    assert engine.engine.stats().num_running == 1
    while engine.engine.stats().num_running:
        engine.engine.step()
    answer = [
        step.token_ids[i]
        for step in engine.channel.steps
        for i, request_id in enumerate(step.request_ids)
        if request_id == 2
    ]
    assert answer == reference(prompt[:9], 20)
    assert_all_free(engine)


def test_logprobs_of_the_prompt_are_those_of_one_forward_pass(checkpoint):
    prompt = random_prompt(random.Random(7), 50, 50)
    results, likeliest = [], []
    for chunk in (13, 2048):
        engine = make_engine(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=2)
        engine.generate([greedy(0, prompt, 2)])  # fills the prefix cache, which must not be used
        request = greedy(1, prompt, 4, prompt_logprobs=True, prompt_top_logprobs=2, logprobs=True)
        engine.channel.inbox.append(request)
        engine.engine.receive(wait=math.inf)
        while engine.engine.stats().num_running or engine.engine.stats().num_waiting:
            engine.engine.step()
        found = [s.prompt_logprobs[1] for s in engine.channel.steps if 1 in s.prompt_logprobs]
        assert len(found) == 1
        results.append(found[0])
        (top,) = [s.prompt_top_tokens[1] for s in engine.channel.steps if s.prompt_top_tokens]
        likeliest.append([row[0][0] for row in top])

    assert len(results[0]) == len(prompt) - 1
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-4)
    model = engine.engine._runner.model
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), torch.arange(len(prompt)))
        logprobs = torch.log_softmax(model.logits(hidden)[0].float(), -1)
    assert likeliest[0] == likeliest[1] == logprobs[:-1].argmax(-1).tolist()
    expected = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
    assert results[0] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_first_steps_report_queue_time_and_cached_tokens_once(checkpoint):
    engine = make_engine(checkpoint, max_num_batched_tokens=16, max_num_seqs=2)
    prompt = random_prompt(random.Random(8), 40, 40)
    engine.generate([greedy(1, prompt, 1)])
    engine.channel.inbox.append(greedy(2, prompt, 5))
    engine.engine.receive(wait=math.inf)
    while engine.engine.stats().num_running or engine.engine.stats().num_waiting:
        engine.engine.step()

    started = [s for step in engine.channel.steps for s in step.started]
    assert [(s.request_id, s.num_cached_tokens) for s in started] == [(2, 32)]
    assert started[0].queue_seconds >= 0.0


def test_a_cache_of_a_single_token_is_refused(checkpoint):
    with pytest.raises(StartupError, match="cannot hold a prompt and an answer"):
        make_engine(checkpoint, kv_cache_tokens=1, block_size=1)


def test_the_smallest_limits_and_cache_work(checkpoint):
    engine = make_engine(
        checkpoint, kv_cache_tokens=2, block_size=1, max_num_seqs=1, max_num_batched_tokens=1
    )

    assert len(engine.generate([greedy(1, [5], 1)])[0]) == 1


def test_a_context_shorter_than_the_warm_up_works(tmp_path):
    folder = write_tiny_checkpoint(tmp_path, max_position_embeddings=32)
    engine = make_engine(folder, max_model_len=None)

    assert len(engine.generate([greedy(1, [5] * 30, 2)])[0]) == 2


def test_a_float8_cache_takes_about_a_third_of_the_memory(checkpoint):
    rng = random.Random(9)
    requests = [greedy(i, random_prompt(rng, 3, 60), 20) for i in range(6)]
    exact = make_engine(checkpoint)
    engine = make_engine(checkpoint, kv_cache_dtype="fp8")

    answers = engine.generate(requests)

    assert [len(events) for events in answers] == [20] * 6
    info = engine.engine.info
    assert info.kv_cache_dtype == info.plan.kv_dtype == "float8_e4m3fn"
    assert exact.engine.info.kv_cache_dtype == exact.engine.info.plan.kv_dtype == "float32"
    # 16 bytes and a scale of 4 for 16 numbers of 4 bytes.
    caches = (e.engine._runner.kv_cache.spec.token_bytes for e in (engine, exact))
    assert next(caches) * 64 == next(caches) * 20
    assert_all_free(engine)


def test_with_a_float8_cache_tokens_do_not_depend_on_other_sequences_or_cached_blocks(checkpoint):
    rng = random.Random(10)
    prompts = [random_prompt(rng, 30, 60) for _ in range(4)]
    engine = make_engine(checkpoint, kv_cache_dtype="fp8")

    alone = [tokens(engine.generate([greedy(i, p, 12)])[0]) for i, p in enumerate(prompts)]
    together = engine.generate([greedy(10 + i, p, 12) for i, p in enumerate(prompts)])

    # Cached blocks are not quantized again.
    assert [tokens(events) for events in together] == alone


def test_an_unknown_cache_dtype_is_refused(checkpoint):
    with pytest.raises(StartupError, match="kv cache dtype 'int4' is none of auto, fp8"):
        make_engine(checkpoint, kv_cache_dtype="int4")


def test_weights_in_float8_are_refused_on_a_cpu(checkpoint):
    with pytest.raises(StartupError, match=r"quantization fp8: .* runs on the CPU"):
        make_engine(checkpoint, quantization="fp8")
