"""An engine whose model is shared by several processes gives the replies of one that computes alone."""

from __future__ import annotations

import re

import pytest

from benchmarks.local_engine import LocalEngine
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.runner.start.startup import StartupError
from tests.tiny_checkpoint import write_tiny_checkpoint

BLOCK = 8
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "prompt_logprobs": True, "prompt_top_logprobs": 2, "logprobs": True},
    {"temperature": 0.9, "top_k": 20, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 8},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_key_value_heads=4, vocab_size=263
    )


def answers(checkpoint, **changes):
    config = EngineConfig(
        model_path=str(checkpoint),
        model_id="tiny",
        device="cpu",
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        kv_cache_tokens=30 * BLOCK,
        **changes,
    )
    engine = LocalEngine(config)
    try:
        requests = [
            GenerateRequest(
                request_id=i,
                prompt_token_ids=[(7 * i + j) % 250 for j in range(3 + 9 * i)],
                sampling=SamplingParams(max_new_tokens=12, **WAYS[i % len(WAYS)]),
            )
            for i in range(8)
        ]
        events = engine.generate(requests)
        return [[event.token_id for event in one] for one in events], [
            [event.logprob for event in one] for one in events
        ]
    finally:
        engine.close()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_replies_of_one_process(checkpoint, size):
    tokens, logprobs = answers(checkpoint)

    shared_tokens, shared_logprobs = answers(checkpoint, tensor_parallel=size)

    assert shared_tokens == tokens
    for one, other in zip(logprobs, shared_logprobs, strict=True):
        assert other == pytest.approx(one, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 3}, "--tensor-parallel 3: 3 is no divisor of its 4 key-value heads"),
        ({"tensor_parallel": 2, "quantization": "int8"}, "--quantization int8"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused_before_it_is_loaded(checkpoint, changes, words):
    with pytest.raises(StartupError, match=re.escape(words)):
        answers(checkpoint, **changes)
