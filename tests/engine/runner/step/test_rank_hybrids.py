"""Processes that share a model with recurrent layers give the replies of one that computes alone."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from benchmarks.local_engine import LocalEngine
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.runner.start.startup import StartupError
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

HYBRIDS = {
    "granite4": {},
    "qwen3.5": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "lfm2": {},
    "bamba": {},
    "falcon h1": {},
}
NEW_TOKENS = 12


def save(folder, name):
    """Save a checkpoint that four ranks can share."""
    case = CASES[name]
    changes = case.changes | {"num_key_value_heads": 4} | HYBRIDS[name]
    dataclasses.replace(case, changes=changes).save(folder)
    return folder


def engine_of(folder, **changes):
    config = EngineConfig(
        model_path=str(folder),
        model_id="tiny",
        device="cpu",
        dtype="float32",
        quantization="none",
        cpu_threads=1,
        block_size=4,
        max_num_batched_tokens=67,
        max_num_seqs=4,
        kv_cache_tokens=2048,
        **changes,
    )
    return LocalEngine(config)


def requests(first_id):
    """Return requests that begin alike, of several blocks and steps each, and a short one, greedy and sampled."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(90)]
    prompts = [prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 30)]
    ways = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 9, "seed": 5})
    return [
        GenerateRequest(
            request_id=first_id + i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS, **ways[i % 2]),
        )
        for i, prompt in enumerate([*prompts, [5], prefix])
    ]


def answers(folder, **changes):
    """Return the tokens of the replies, those with cached prefixes too, how many tokens hit, and bytes of the cache."""
    engine = engine_of(folder, **changes)
    try:
        found = [
            [[event.token_id for event in one] for one in engine.generate(requests(first))]
            for first in (0, 10)
        ]
        cache = engine.engine._runner.kv_cache
        sizes = cache.spec.token_bytes, cache.spec.slot_bytes
        return found, engine.engine.stats().prefix_cache_hit_tokens, sizes
    finally:
        engine.close()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_ranks_give_the_replies_of_one_process(name, size, tmp_path):
    folder = save(tmp_path, name)
    found, hits, sizes = answers(folder)

    shared, shared_hits, shared_sizes = answers(folder, tensor_parallel=size)

    assert shared == found
    assert shared[0] == shared[1]
    assert shared_hits == hits > 0
    assert shared_sizes[0] * size == sizes[0]
    # What ranks repeat are inputs of the convolution that belong to groups which several of them have.
    assert sizes[1] <= shared_sizes[1] * size < 2 * sizes[1]


def test_a_model_that_cannot_be_shared_is_refused_before_it_is_loaded(tmp_path):
    words = "--tensor-parallel 3: 3 is no divisor of its 64 channels of a short convolution"

    with pytest.raises(StartupError, match=re.escape(words)):
        engine_of(save(tmp_path, "lfm2"), tensor_parallel=3)
