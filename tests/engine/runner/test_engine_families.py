"""The engine on checkpoints of families that are not Llama's: its tokens are those of transformers."""

import dataclasses
import random

import pytest

from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.core.start_checks import StartupError, check_start
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE, longrope
from tests.model.oracle import generated

NOT_OF_THE_LIBRARY = [
    "gpt2", "opt", "gemma1", "gemma2", "gemma3 ropes", "smollm3 windows untied biases", "stablelm biases tied",
    "olmo2", "gpt_neox", "gptj", "cohere2", "falcon", "gpt_bigcode", "mistral3 ministral tied",
    "olmo3 yarn tied biases", "exaone4 hybrid", "arcee", "hunyuan", "apertus", "nemotron biases tied", "qwen3.5",
    "qwen3.5 vl", "lfm2", "granite4", "falcon h1", "gemma4", "gemma4 large", "gemma3n",
]  # fmt: skip
FAMILIES = [*NOT_OF_THE_LIBRARY, "phi3", "qwen2 vl tied windows", "ernie4.5", "internlm3"]
NEW_TOKENS = 24
STATES = ("qwen3.5", "qwen3.5 vl", "granite4", "falcon h1")
"""Prompts of these are divided at multiples of 64 tokens alone."""


def prompts():
    """Prompts that begin alike, of several blocks and chunks each, and a short one."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    return [prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 30)] + [[5]]


def generate(engine, asked, first_id):
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    requests = [
        GenerateRequest(request_id=first_id + i, prompt_token_ids=prompt, sampling=sampling)
        for i, prompt in enumerate(asked)
    ]
    return [[event.token_id for event in events] for events in engine.generate(requests)]


def budget(name):
    """Return tokens of a step, so that the longest prompt takes several."""
    return {"max_num_batched_tokens": 67} if name in STATES else {}


def config_of(folder, **changes):
    return EngineConfig(
        model_path=str(folder),
        model_id="tiny",
        device="cpu",
        cpu_threads=1,
        **{"block_size": 4, "kv_cache_tokens": 2048, "max_num_batched_tokens": 16}
        | {"quantization": "none"}
        | changes,
    )


def expected_tokens(oracle):
    """Return what transformers generates for each prompt."""
    return [generated(oracle, prompt, NEW_TOKENS).tokens for prompt in prompts()]


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_in_chunks_and_with_cached_prefixes_have_the_tokens_of_transformers(name, tmp_path):
    expected = expected_tokens(CASES[name].save(tmp_path))
    engine = LocalEngine(config_of(tmp_path, dtype="float32", max_num_seqs=4, **budget(name)))

    assert generate(engine, prompts(), 0) == expected
    assert generate(engine, prompts(), 10) == expected
    assert engine.engine.stats().prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("limit", [128, None])
def test_a_longrope_service_limited_to_the_original_context_has_the_short_factors(limit, tmp_path):
    case = CASES["phi3 partial longrope tied"]
    oracle = dataclasses.replace(case, changes=case.changes | longrope(6, 128)).save(tmp_path)

    engine = LocalEngine(config_of(tmp_path, dtype="float32", max_model_len=limit))

    assert (generate(engine, prompts(), 0) == expected_tokens(oracle)) == (limit == 128)


def test_a_service_limited_to_the_original_context_of_ministral3_scales_no_queries(tmp_path):
    expected = expected_tokens(CASES["ministral3"].save(tmp_path))
    engine = LocalEngine(config_of(tmp_path, dtype="float32", max_model_len=48))

    assert generate(engine, prompts()[3:], 0) == expected[3:]


@pytest.mark.parametrize("name", NOT_OF_THE_LIBRARY)
def test_without_a_requested_dtype_the_weights_are_not_quantized_on_a_cpu(name, tmp_path):
    CASES[name].save(tmp_path)
    engine = LocalEngine(config_of(tmp_path, **budget(name)))

    assert engine.engine.info.quantization == "none"
    assert len(generate(engine, [[5, 6, 7]], 0)[0]) == NEW_TOKENS


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_context_beyond_the_learned_positions_is_refused_at_the_start(name, tmp_path):
    CASES[name].save(tmp_path)
    model = ModelConfig.from_folder(tmp_path)

    with pytest.raises(StartupError, match=r"--max-model-len 513 is more than .* 512 tokens"):
        check_start(config_of(tmp_path, max_model_len=513), model, has_gpu=False)
