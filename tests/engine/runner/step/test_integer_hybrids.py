"""Hybrids with weights in 8 bits on a CPU: the C library computes products, mixers and attention of their layers."""

import dataclasses
import random

import pytest

from kernels.cpu.library import load
from tests.engine.runner.test_engine_model import greedy, make_engine
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))
SIZES = {
    "lfm2": {"hidden_size": 64},
    "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


@pytest.mark.parametrize("name", SIZES)
def test_a_reply_has_the_same_bits_after_a_prefix_hit_in_chunks_and_beside_others(tmp_path, name):
    case = CASES[name]
    changes = case.changes | SIZES[name] | {"max_position_embeddings": 1024}
    dataclasses.replace(case, changes=changes).save(tmp_path)
    rng = random.Random(0)
    shared, rest, other = (
        [rng.randrange(3, VOCAB_SIZE) for _ in range(it)] for it in (200, 70, 99)
    )

    def start(**more):
        config = {"dtype": "auto", "max_model_len": 400, "block_size": 16}
        return make_engine(tmp_path, **(config | more))

    def reply(engine, *before):
        for i, prompt in enumerate(before):
            engine.generate([greedy(i, prompt, 3)])
        others = [greedy(11 + i, prompt, 8) for i, prompt in enumerate(before)]
        found = engine.generate([*others, greedy(10, shared + rest, 8, logprobs=True)])[-1]
        return [(event.token_id, event.logprob) for event in found]

    cold = start()

    expected = reply(cold)

    assert cold.engine.info.quantization == "int8"
    assert "cpu_decode" in str(cold.engine.info.plan.steps[0])
    assert reply(start(), shared + other) == expected
    assert reply(start(max_num_batched_tokens=96), other, shared[:150]) == expected
