"""The limit of a request: the extended context of a scaled model, or the capacity of the cache."""

import pytest

from tests.engine.runner.test_engine_model import greedy, make_engine
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_a_scaled_model_serves_its_extended_context(tmp_path, scaling):
    stated = 256 if scaling["rope_type"] == "llama3" else 64
    folder = write_tiny_checkpoint(
        tmp_path / "tiny", rope_scaling=scaling, max_position_embeddings=stated
    )
    engine = make_engine(folder, max_model_len=None)
    info = engine.engine.info
    prompt = [i % VOCAB_SIZE for i in range(200)]

    assert (info.max_model_len, info.max_total_tokens) == (256, 256)
    (generated,) = engine.generate([greedy(0, prompt, 56)])
    assert len(generated) == 56
    ((refused,),) = engine.generate([greedy(1, prompt, 57)])
    assert "257 tokens; at most 256 fit" in refused.error


def test_a_prompt_longer_than_the_cache_is_refused_at_once_with_both_numbers(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    engine = make_engine(folder, kv_cache_tokens=80)

    assert engine.engine.info.max_total_tokens == 80
    ((refused,),) = engine.generate([greedy(0, [5] * 80, 1)])
    assert "81 tokens; at most 80 fit" in refused.error
