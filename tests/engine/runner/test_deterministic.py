"""Deterministic requests: the same bits in any company on the C library, and how the steps are marked."""

from __future__ import annotations

import pytest

from benchmarks.local_engine import LocalEngine
from model.sampling.parameters import SamplingParams
from server.engine.core.limits import SchedulerConfig
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.core.sequence import Sequence
from server.engine.core.start_checks import StartupError
from server.engine.core.step import DecodeRows, ScheduledSequence
from server.engine.runner.step.buckets import BucketGrid
from server.engine.runner.step.step_input import exact_bucket
from tests.engine.runner.companies import check_companies
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

S = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), intermediate_size=128, head_dim=32
    )


def engine(checkpoint, **changes):
    config = {
        "model_path": str(checkpoint),
        "model_id": "tiny",
        "device": "cpu",
        "quantization": "int8",
        "max_model_len": 256,
        "kv_cache_tokens": 4096,
        "block_size": S,
        "cpu_threads": 1,
    }
    return LocalEngine(EngineConfig(**(config | changes)))


def scheduled(*, deterministic, num_tokens=1):
    sampling = SamplingParams(max_new_tokens=4)
    request = GenerateRequest(
        request_id=0,
        prompt_token_ids=[1] * num_tokens,
        sampling=sampling,
        deterministic=deterministic,
    )
    return ScheduledSequence(Sequence(request), 0, num_tokens, 1)


def test_64_requests_have_the_same_bits_in_random_companies(checkpoint):
    assert check_companies(lambda **it: engine(checkpoint, **it), VOCAB_SIZE, 6, S) > 0


@pytest.mark.slow
def test_64_requests_have_the_same_bits_in_20_random_companies(checkpoint):
    assert check_companies(lambda **it: engine(checkpoint, **it), VOCAB_SIZE, 20, S) > 0


def test_the_plan_of_the_c_library_says_that_all_requests_are_deterministic(checkpoint):
    plan = engine(checkpoint).engine.info.plan.deterministic

    assert (plan.requests, plan.why) == (
        "all",
        "the C library computes equal bits in every step, at no cost",
    )


def test_a_start_that_must_be_deterministic_fails_where_no_kernel_is(checkpoint):
    with pytest.raises(StartupError, match="--deterministic is not supported here: on a CPU"):
        engine(checkpoint, quantization="none", deterministic=True)


def test_the_plan_says_why_requests_cannot_be_deterministic(checkpoint):
    plan = engine(checkpoint, quantization="none").engine.info.plan.deterministic

    assert (plan.requests, plan.why) == (
        "none",
        "on a CPU the C library must multiply by weights in int8 or int4: set --quantization int8 or int4, and --dtype "
        "auto",
    )


def test_the_plan_of_a_cpu_with_a_cache_in_fp8_says_that_the_cache_is_the_cause(checkpoint):
    plan = engine(checkpoint, quantization="none", kv_cache_dtype="fp8").engine.info.plan

    why = "on a CPU no KV cache in FP8: set --kv-cache-dtype auto"
    assert plan.deterministic.why == why


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_single_deterministic_sequence_makes_a_step_deterministic(phase):
    one, other = (scheduled(deterministic=it) for it in (True, False))
    decode, prefill = [other], [scheduled(deterministic=False, num_tokens=3)]
    (decode if phase == "decode" else prefill).append(one)

    assert exact_bucket(DecodeRows.of(decode), prefill, S).deterministic
    assert not exact_bucket(DecodeRows.of([other]), prefill[:1], S).deterministic


def test_a_deterministic_step_reads_no_shared_prefix_once():
    one, other = (scheduled(deterministic=it) for it in (True, False))

    assert exact_bucket(DecodeRows.of([other, other]), (), S, 4).shared_blocks == 4
    assert exact_bucket(DecodeRows.of([other, one]), (), S, 4).shared_blocks == 0


def test_deterministic_steps_fit_deterministic_recordings_alone():
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    for deterministic in (False, True):
        row = scheduled(deterministic=deterministic)
        chunk = scheduled(deterministic=deterministic, num_tokens=5)
        grid = BucketGrid(limits, S, deterministic=deterministic)
        ahead = list(grid.ahead())

        assert {it.deterministic for it in ahead} == {deterministic}
        for decode, prefill in (([row], []), ([], [chunk]), ([row], [chunk])):
            fitting = list(grid.fitting(exact_bucket(DecodeRows.of(decode), prefill, S)))
            assert fitting
            assert all(it.deterministic is deterministic for it in fitting)
            assert fitting[0] in ahead


def test_a_deterministic_sequence_shares_cached_blocks_with_such_sequences_alone():
    salts = []
    for deterministic, salt in ((False, None), (True, None), (False, "a"), (True, "a")):
        sampling = SamplingParams(max_new_tokens=4)
        request = GenerateRequest(
            request_id=0,
            prompt_token_ids=[1],
            sampling=sampling,
            cache_salt=salt,
            deterministic=deterministic,
        )
        salts.append(Sequence(request).cache_salt)

    assert len(set(salts)) == 4
