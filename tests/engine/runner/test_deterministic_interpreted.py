"""Deterministic requests on the Triton kernels of a GPU, in Triton's interpreter: the same bits in any company."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

import kernels.attention.functional
import model.executors.layers.attention
import model.network.parameters
import server.engine.runner.start.startup
import server.engine.runner.step.model_runner
from benchmarks.local_engine import LocalEngine
from kernels.arch import CATALOGUE
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.engine.runner import drafts
from tests.kernels.triton_interpreter import interpreted
from tests.marks import slow_except
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = interpreted

GPU = dataclasses.replace(CATALOGUE["a100"], num_sms=8)
COMPANIES = [
    {"max_num_seqs": 4, "max_num_batched_tokens": 9},
    {"max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 2,
        "kv_cache_tokens": 66,
        "max_model_len": 60,
    },
]


FAMILIES = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 12},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 128,
    },
}

HYBRIDS = {
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1]},
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 1,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 2,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
    },
}
"""Models with states of fixed size."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    from kernels.attention.portable import launch

    monkeypatch.setattr(launch, "PART_TOKENS", 32)
    for module in (
        kernels.attention.functional,
        model.network.parameters,
        server.engine.runner.step.model_runner,
        server.engine.runner.start.startup,
    ):
        monkeypatch.setattr(module, "detect", lambda _device=None: GPU)
    # Dummy steps take as long in the interpreter as the requests.
    monkeypatch.setattr("server.engine.runner.start.runner_start.warm_up", lambda *_: None)


@pytest.fixture(scope="module", params=slow_except(["qwen3"], FAMILIES))
def checkpoint(request, tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        model_type=request.param,
        head_dim=32,
        num_hidden_layers=1,
        **FAMILIES[request.param],
    )


def engine(checkpoint, **changes):
    config = {
        "model_path": str(checkpoint),
        "model_id": "tiny",
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization": "none",
        "max_model_len": 128,
        "kv_cache_tokens": 1024,
        "block_size": 16,
        "enable_prefix_caching": True,
    }
    return LocalEngine(EngineConfig(**(config | changes)))


def requests():
    rng = random.Random(0)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    ways = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.0}]
    return [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=prefix[: 40 * (i % 2)] + [rng.randrange(VOCAB_SIZE) for _ in range(9)],
            sampling=SamplingParams(max_new_tokens=6, logprobs=True, **ways[i % 3]),
            deterministic=True,
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def answers(checkpoint):
    """Results of the requests alone; computed once."""
    return []


@pytest.mark.parametrize("company", slow_except((), COMPANIES))
def test_requests_have_the_bits_that_they_have_alone(checkpoint, answers, company):
    if not answers:
        one = engine(checkpoint, max_num_seqs=1, enable_prefix_caching=False)
        answers += [one.generate([request])[0] for request in requests()]
    assert all(event.error is None for events in answers for event in events)
    together = engine(checkpoint, **company)
    other = msgspec.structs.replace(requests()[1], request_id=100, deterministic=False)

    for asked in (requests(), [other, *requests()[::-1]]):
        found = dict(zip((it.request_id for it in asked), together.generate(asked), strict=True))
        assert [found[i] for i in range(4)] == answers
    if "kv_cache_tokens" in company:
        assert together.engine.stats().num_preemptions > 0


@pytest.mark.slow
def test_a_step_with_drafts_has_the_bits_of_as_many_steps(checkpoint):
    rng = random.Random(3)
    ways = [{"temperature": 0.0, "logprobs": True}, {"seed": 5, "logprobs": True}]
    asked = drafts.requests(rng, ways, max_new_tokens=8, deterministic=True)

    steps = drafts.check(lambda: engine(checkpoint, max_num_seqs=2), asked, rng, exact=True)

    assert all(step.decode.batch.deterministic for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_with_drafts_of_a_hybrid_has_the_bits_of_as_many_steps(tmp_path, name):
    changes = {"num_hidden_layers": 2} | HYBRIDS[name]
    folder = write_tiny_checkpoint(tmp_path, model_type=name, head_dim=32, **changes)
    rng = random.Random(4)
    ways = [{"temperature": 0.0, "logprobs": True}, {"seed": 5, "logprobs": True}]
    asked = drafts.requests(rng, ways, most_prompt=9, max_new_tokens=8, deterministic=True)

    steps = drafts.check(lambda: engine(folder, max_num_seqs=2), asked, rng, exact=True)

    assert all(step.decode.batch.deterministic for step in steps)
