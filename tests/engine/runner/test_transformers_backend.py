"""The engine with modules of transformers: its tokens are those that transformers generates itself."""

import math
import random

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.sampling.parameters import SamplingParams
from server.engine.core import start_checks
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.core.start_checks import StartupError, check_start
from tests.model.checkpoint.hf_checkpoints import VOCAB_SIZE
from tests.model.library_cases import CASES
from tests.model.oracle import generated

NEW_TOKENS = 120


def prompts():
    """Prompts that begin alike, of several blocks and chunks each, and a short one."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    return [prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 30)] + [[5]]


def generate(engine, asked, first_id, new_tokens=NEW_TOKENS):
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, logprobs=True)
    return engine.generate(
        [
            GenerateRequest(request_id=first_id + i, prompt_token_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(asked)
        ]
    )


def config_of(folder, **changes):
    return EngineConfig(
        **{
            "model_path": str(folder),
            "model_id": "tiny",
            "model_backend": "transformers",
            "device": "cpu",
            "dtype": "float32",
            "cpu_threads": 1,
            "block_size": 4,
            "kv_cache_tokens": 2048,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
        }
        | changes
    )


@pytest.mark.parametrize("name", CASES)
def test_batches_in_chunks_and_with_cached_prefixes_have_the_tokens_of_transformers(name, tmp_path):
    oracle = CASES[name].save(tmp_path)
    expected = [generated(oracle, prompt, NEW_TOKENS) for prompt in prompts()]
    engine = LocalEngine(config_of(tmp_path))

    for first_id in (0, 10):
        found = generate(engine, prompts(), first_id)
        assert [[it.token_id for it in events] for events in found] == [
            it.tokens for it in expected
        ]
        for events, theirs in zip(found, expected, strict=True):
            pairs = zip((it.logprob for it in events), theirs.logprobs, strict=True)
            assert max(abs(ours - other) for ours, other in pairs) < 1e-3
    assert engine.engine.stats().prefix_cache_hit_tokens > 0


def test_the_plan_says_that_the_modules_are_the_slow_path_and_why(tmp_path):
    CASES["olmo"].save(tmp_path)
    info = LocalEngine(config_of(tmp_path)).engine.info

    assert "the slow path" in info.plan.one_sequence
    for step in info.plan.steps:
        assert step.executor == "modules"
        assert "the slow path: modules of transformers compute olmo" in step.why
        assert "torch" in " ".join(it.kernel for it in step.operations)
        refused = {row.kernel: row.reasons for row in step.refused}
        assert "no modules of transformers" in refused["layers"]
    assert info.plan.deterministic.requests == "none"
    assert info.quantization == "none"
    oracle = CASES["olmo"].build()
    assert info.num_parameters == sum(it.numel() for it in oracle.parameters())


@pytest.mark.parametrize("name", ["olmo", "codegen"])
def test_prompts_are_scored_as_transformers_scores_them(name, tmp_path):
    oracle = CASES[name].save(tmp_path)
    prompt = prompts()[2]
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    engine = LocalEngine(config_of(tmp_path))

    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=True)
    request = GenerateRequest(request_id=1, prompt_token_ids=prompt, sampling=sampling)
    engine.channel.inbox.append(request)
    engine.engine.receive(wait=math.inf)
    while engine.engine.stats().num_running or engine.engine.stats().num_waiting:
        engine.engine.step()

    (found,) = [s.prompt_logprobs[1] for s in engine.channel.steps if 1 in s.prompt_logprobs]
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel 2"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"deterministic": True}, "--deterministic"),
        ({"load_format": "pickle"}, "--load-format pickle"),
    ],
)
def test_settings_that_need_our_executors_are_refused_at_the_start(changes, said, tmp_path):
    CASES["olmo"].save(tmp_path)
    model = ModelConfig.from_folder(tmp_path, "transformers")
    with pytest.raises(StartupError, match=f"{said}: not supported with --model-backend"):
        check_start(config_of(tmp_path, **changes), model, has_gpu=None)


def test_without_the_library_the_start_names_the_extra(tmp_path, monkeypatch):
    CASES["olmo"].save(tmp_path)
    model = ModelConfig.from_folder(tmp_path, "transformers")
    monkeypatch.setattr(start_checks, "find_spec", lambda _name: None)

    with pytest.raises(StartupError, match=r"pip install 'tessera\[transformers\]'"):
        check_start(config_of(tmp_path), model, has_gpu=None)


def test_a_cache_in_fp8_and_random_weights_are_served_too(tmp_path):
    CASES["olmo"].save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    engine = LocalEngine(config_of(tmp_path, load_format="dummy", kv_cache_dtype="fp8"))

    found = generate(engine, [[5, 6, 7]], 0, 8)
    assert len(found[0]) == 8
    assert engine.engine.info.kv_cache_dtype == "float8_e4m3fn"
