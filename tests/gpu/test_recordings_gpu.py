"""Replayed CUDA graphs give the same tokens as steps without graphs."""

import gc
import math

import pytest
import torch

import kernels
from benchmarks.local_engine import LocalEngine
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.runner.step.model_runner import ModelRunner
from server.engine.runner.step.recordings import RecordedSteps
from tests.gpu.synchronization import forbid_synchronization

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FOLDER = resolve(BUNDLED)


@pytest.fixture
def make_engine():
    made = []

    def make(*, cuda_graphs, **changes):
        config = {
            "model_path": str(FOLDER),
            "model_id": BUNDLED,
            "device": "cuda",
            "dtype": "bfloat16",
            "kv_cache_tokens": 40960,
            "max_num_seqs": 24,
            "max_num_batched_tokens": 2048,
        }
        engine = LocalEngine(EngineConfig(**(config | {"cuda_graphs": cuda_graphs} | changes)))
        while engine.engine._runner.use_idle_time():
            pass
        made.append(engine)
        return engine

    yield make
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def requests(prompts, num_tokens, **sampling):
    params = SamplingParams(**{"max_new_tokens": num_tokens, "temperature": 0.0} | sampling)
    return [
        GenerateRequest(request_id=i, prompt_token_ids=prompt, sampling=params)
        for i, prompt in enumerate(prompts)
    ]


def answers(engine, prompts, num_tokens, **sampling):
    found = engine.generate(requests(prompts, num_tokens, **sampling))
    return [[event.token_id for event in events] for events in found]


def recordings(engine):
    """Return the recorded buckets that have no prompt rows."""
    return [it for it in engine.engine._runner.recorded.recorded if not it.prompt_seqs]


PROMPTS = [[(7 * i + j) % 500 + 5 for j in range(3 + 13 * i)] for i in range(20)]
EXACT = PROMPTS[:16]
"""As many prompts as a recording has rows; with padding rows the library may sum products in another order."""


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "one step ahead"])
def test_tokens_equal_those_of_steps_without_graphs(make_engine, overlap):
    expected = answers(make_engine(cuda_graphs=False, dtype="float32", overlap=False), PROMPTS, 64)

    engine = make_engine(cuda_graphs=True, dtype="float32", overlap=overlap)

    assert answers(engine, PROMPTS, 64) == expected
    assert answers(engine, PROMPTS[::-1], 64) == expected[::-1]
    assert recordings(engine)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 11, "logprobs": True}],
    ids=["greedy", "sampled"],
)
def test_a_recording_without_padding_rows_gives_the_same_bits(make_engine, sampling):
    expected = answers(make_engine(cuda_graphs=False, overlap=False), EXACT, 64, **sampling)

    assert answers(make_engine(cuda_graphs=True), EXACT, 64, **sampling) == expected


@pytest.mark.parametrize("count", [1, 2, 4, 8, 20])
def test_log_probabilities_equal_those_of_steps_without_graphs(make_engine, count):
    prompts, found = PROMPTS[:count], []
    for cuda_graphs in (False, True):
        engine = make_engine(cuda_graphs=cuda_graphs, dtype="float32")
        found.append(engine.generate(requests(prompts, 40, logprobs=True)))

    for expected, ours in zip(*found, strict=True):
        assert [event.token_id for event in ours] == [event.token_id for event in expected]
        logprobs = [[event.logprob for event in events] for events in (ours, expected)]
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=1e-4, atol=1e-4)


def test_a_recording_over_a_float8_cache_gives_the_same_bits(make_engine):
    if kernels.detect("cuda").sm < 89:
        pytest.skip("before sm_89 PyTorch's rows read an FP8 cache, and they cannot be captured")
    expected = answers(make_engine(cuda_graphs=False, kv_cache_dtype="fp8"), EXACT, 64)

    engine = make_engine(cuda_graphs=True, kv_cache_dtype="fp8")

    assert answers(engine, EXACT, 64) == expected
    assert recordings(engine)


def test_preempted_sequences_give_the_same_tokens(make_engine):
    expected = answers(make_engine(cuda_graphs=False, dtype="float32"), PROMPTS, 80)

    engine = make_engine(
        cuda_graphs=True, dtype="float32", kv_cache_tokens=2048, enable_prefix_caching=False
    )

    assert answers(engine, PROMPTS, 80) == expected
    assert engine.engine.stats().num_preemptions > 0


def test_a_sequence_whose_block_table_outgrows_a_recording_continues_in_a_wider_one(make_engine):
    prompt = [j % 500 + 5 for j in range(1000)]
    expected = answers(make_engine(cuda_graphs=False, dtype="float32"), [prompt], 100)

    engine = make_engine(cuda_graphs=True, dtype="float32")
    answers(engine, [prompt], 100)  # long enough to record the wider bucket

    assert answers(engine, [prompt], 100) == expected
    assert {key.columns for key in recordings(engine)} == {64, 128}


def test_a_replay_does_not_synchronize(make_engine, monkeypatch):
    engine = make_engine(cuda_graphs=True)
    answers(engine, PROMPTS[:4], 40)
    engine.channel.inbox += requests(PROMPTS[:4], 40)
    engine.engine.receive(wait=math.inf)
    engine.engine.step()
    launch, found = ModelRunner.launch, []

    def watched(runner, output):
        with forbid_synchronization():
            found.append(launch(runner, output))
        return found[-1]

    monkeypatch.setattr(ModelRunner, "launch", watched)
    for _ in range(5):
        engine.engine.step()

    assert [type(step).__name__ for step in found] == ["GreedyStep"] * 5


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "one step ahead"])
def test_prompts_that_arrive_during_decoding_are_computed_in_recorded_mixed_steps(
    make_engine, monkeypatch, overlap
):
    limits = {"dtype": "float32", "max_num_batched_tokens": 256}
    expected = answers(make_engine(cuda_graphs=False, overlap=False, **limits), PROMPTS, 64)
    engine = make_engine(cuda_graphs=True, overlap=overlap, **limits)
    launch, find, found = ModelRunner.launch, RecordedSteps._find, []

    def watched(runner, output):
        with forbid_synchronization():
            return launch(runner, output)

    def watched_find(steps, decode, prefill, *, waits):
        recording = find(steps, decode, prefill, waits=waits)
        if decode and prefill:
            found.append(recording)
        return recording

    monkeypatch.setattr(ModelRunner, "launch", watched)
    monkeypatch.setattr(RecordedSteps, "_find", watched_find)
    for request in requests(PROMPTS, 64):
        engine.channel.inbox.append(request)
        engine.engine.receive(wait=0)
        engine.engine.step()
        engine.engine.step()
    while engine.engine.has_work:
        engine.engine.step()

    ours = {i: [] for i in range(len(PROMPTS))}
    for message in engine.channel.steps:
        for i, request_id in enumerate(message.request_ids):
            ours[request_id].append(message.event(i).token_id)
    assert list(ours.values()) == expected
    assert len(found) > 15
    assert None not in found
