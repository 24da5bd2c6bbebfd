"""Faults in the steps of a real, tiny model: NaN, errors, lack of memory; also a step ahead and in recorded steps."""

import random

import msgspec
import pytest
import torch

from model.sampling.parameters import NOT_FINITE, SamplingParams
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.core.results.step_retry import OUT_OF_MEMORY, STEP_FAILED
from server.engine.runner.step.model_runner import ModelRunner
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    greedy,
    make_engine,
    random_prompt,
    tokens,
)
from tests.engine.runner.test_overlap import SAMPLED, comparable, mixed_requests
from tests.faults.engine import inject
from tests.faults.runner import poison
from tests.tiny_checkpoint import write_tiny_checkpoint

MODES = ["step by step", "ahead and recorded"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=MODES)
def start(request, checkpoint):
    """Return a function that makes an engine, with faults, in one of the modes."""

    def make(*faults, **changes):
        engine = make_engine(checkpoint, **({"max_num_seqs": 20} | changes))
        engine.engine._runs_ahead = request.param != MODES[0]
        if request.param == MODES[1]:
            runner = engine.engine._runner
            runner.record_steps(engine.engine._scheduler.config, Again())
            while runner.use_idle_time():
                pass
        inject(engine.engine, *faults)
        return engine

    return make


def without_faults(engine):
    engine.engine._runner = engine.engine._runner._runner
    return engine


def with_length(request, length):
    """Return a request that ends after `length` tokens and is otherwise the same."""

    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=length)
    return msgspec.structs.replace(request, sampling=sampling)


def steady_requests(sampling, count=6, length=30):
    rng = random.Random(11)
    return [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=random_prompt(rng, 9, 14),
            sampling=SamplingParams(max_new_tokens=length, logprobs=True, **sampling),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, SAMPLED, SAMPLED | {"top_p": 0.8, "repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "filtered"],
)
def test_nan_ends_its_own_sequence_and_changes_no_bit_of_the_others(start, sampling):
    requests = steady_requests(sampling)
    engine = start("nan@step=9:row=2")

    events = engine.generate(requests)

    assert events[2][-1].finish_reason is FinishReason.ERROR
    assert events[2][-1].error == NOT_FINITE
    length = len(events[2]) - 1
    assert 8 <= length < 20
    # In a run without the fault the sequence leaves the batch one step earlier if its length is that of its output.
    clean = requests.copy()
    clean[2] = with_length(requests[2], length + 1)
    expected = start().generate(clean)
    assert events[2][:-1] == expected[2][:-1]
    assert [events[i] for i in (0, 1, 3, 4, 5)] == [expected[i] for i in (0, 1, 3, 4, 5)]
    assert_all_free(engine)

    again = without_faults(engine).generate(clean)
    assert [tokens(e) for e in again] == [tokens(e) for e in expected]


def test_blocks_that_a_sequence_with_nan_computed_leave_the_prefix_cache(start):
    rng = random.Random(12)
    shared, own = random_prompt(rng, 16, 16), random_prompt(rng, 20, 20)
    engine = start("nan@step=26:row=0")
    engine.generate([greedy(1, [*shared, 5], 1)])  # step 1
    blocks = engine.engine._scheduler.block_manager
    assert blocks.num_idle_blocks == 2

    (events,) = engine.generate([greedy(2, shared + own, 60)])

    assert events[-1].finish_reason is FinishReason.ERROR
    assert blocks.num_idle_blocks == 0
    assert_all_free(engine)
    (again,) = without_faults(engine).generate([greedy(3, shared + own, 60)])
    assert tokens(again) == tokens(start().generate([greedy(3, shared + own, 60)])[0])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_nan_in_free_blocks_reaches_no_sequence(start, cache_dtype):
    """Also the unused slots of a sequence's last block, and blocks of padding rows."""
    rng = random.Random(13)
    prompts = [random_prompt(rng, 1, 70) for _ in range(12)]
    requests = [greedy(i, prompt, 25, logprobs=True) for i, prompt in enumerate(prompts)]
    requests += [
        GenerateRequest(
            request_id=50 + i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=25, **SAMPLED),
        )
        for i, prompt in enumerate(prompts[:6])
    ]
    expected = start(kv_cache_dtype=cache_dtype).generate(requests)
    engine = start(kv_cache_dtype=cache_dtype)
    for block in range(engine.engine.info.num_blocks):
        poison(engine.engine._runner.kv_cache, block)

    assert engine.generate(requests) == expected


@pytest.mark.parametrize("fault", ["raise", "oom"])
def test_a_failing_sequence_ends_alone_among_all_kinds_of_requests(checkpoint, start, fault):
    requests = mixed_requests(20, seed=4)
    expected = make_engine(checkpoint, max_num_seqs=20).generate(requests)
    engine = start(f"{fault}@step=3:row=4")

    events = engine.generate(requests)

    failed = [i for i, e in enumerate(events) if e[-1].finish_reason is FinishReason.ERROR]
    assert len(failed) == 1
    assert events[failed[0]][-1].error == (OUT_OF_MEMORY if fault == "oom" else STEP_FAILED)
    for i, (found, wanted) in enumerate(zip(events, expected, strict=True)):
        if i not in failed:
            assert tokens(found) == tokens(wanted), requests[i].sampling
    assert_all_free(engine)


def test_a_step_that_is_computed_again_gives_the_same_events(start):
    requests = mixed_requests(20, seed=5)
    limits = {"kv_cache_tokens": 128, "max_num_batched_tokens": 24}
    faults = [f"raise@step={step}" for step in range(1, 50, 3)]
    engine = start(*faults, **limits)

    events = engine.generate(requests)

    expected = start(**limits).generate(requests)
    if not engine.engine._runs_ahead:
        assert events == expected  # to the last bit, since the steps have the same sequences
    assert [comparable(e) for e in events] == [comparable(e) for e in expected]
    assert engine.engine.stats().num_failed_steps >= 10
    assert_all_free(engine)


def test_results_that_fail_after_the_next_step_was_launched_lose_no_token(
    checkpoint, start, monkeypatch
):
    requests = mixed_requests(20, seed=6)
    limits = {"kv_cache_tokens": 128, "max_num_batched_tokens": 24}
    expected = make_engine(checkpoint, max_num_seqs=20, **limits).generate(requests)
    engine = start(**limits)
    launch = ModelRunner.launch
    failed = set()

    class Late:
        def __init__(self, pending):
            self.pending, self.sample = pending, pending.sample

        @property
        def feeds_next(self):
            return self.pending.feeds_next

        def result(self):
            raise RuntimeError("a late error")

    def sometimes(runner, output):
        pending = launch(runner, output)
        if output.step % 3 or output.step in failed:
            return pending
        failed.add(output.step)
        return Late(pending)

    monkeypatch.setattr(ModelRunner, "launch", sometimes)

    events = engine.generate(requests)

    assert [tokens(e) for e in events] == [tokens(e) for e in expected]
    assert len(failed) > 10
    assert_all_free(engine)


def test_a_sampler_that_fails_for_one_row_ends_one_sequence(checkpoint, start, monkeypatch):
    requests = steady_requests(SAMPLED, count=5)
    expected = make_engine(checkpoint, max_num_seqs=20).generate(requests)
    history_of = ModelRunner._history

    def fail(runner, sequence):
        if sequence.request_id == 3 and sequence.num_known_output_tokens > 4:
            raise ValueError("a defect of the sampler")
        return history_of(runner, sequence)

    monkeypatch.setattr(ModelRunner, "_history", fail)
    engine = start()

    events = engine.generate(requests)

    assert events[3][-1].finish_reason is FinishReason.ERROR
    assert len(events[3]) == 6
    for i in (0, 1, 2, 4):
        assert tokens(events[i]) == tokens(expected[i])


def test_a_model_without_memory_for_all_prompts_computes_them_in_parts(start, monkeypatch):
    step = ModelRunner._compute

    def small(runner, output, **options):
        if output.num_tokens > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(runner, output, **options)

    rng = random.Random(14)
    requests = [greedy(i, random_prompt(rng, 20, 20), 6) for i in range(6)]
    expected = start().generate(requests)
    engine = start()
    monkeypatch.setattr(ModelRunner, "_compute", small)
    engine.engine._runner._runner.recorded = None

    assert [tokens(e) for e in engine.generate(requests)] == [tokens(e) for e in expected]
