"""Models that a CPU computes layer by layer in int8: a reply has the same bits beside any others."""

import dataclasses
import random

import pytest

from kernels.cpu.library import load
from model.sampling.parameters import SamplingParams
from server.engine.core.request import GenerateRequest
from tests.engine.runner.test_engine_model import make_engine
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))

EXACT = {
    "gpt2": {},
    "opt": {},
    "gemma1": {"head_dim": 32},
    "smollm3 windows untied biases": {},
    "stablelm biases tied": {},
    "olmo2": {},
    "gptj": {},
    "cohere2": {},
    "gpt_bigcode": {},
    "olmo3 yarn tied biases": {},
    "exaone4 hybrid": {},
    "arcee": {},
    "hunyuan": {},
    "nemotron biases tied": {"head_dim": 32},
    "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "lfm2": {"block_multiple_of": 32},
    "granite4": {},
    "falcon h1": {"mamba_d_ssm": 128},
}
NOT = {
    "gemma2": "no deterministic softcap of logits",
    "gpt_neox": "no deterministic gelu activation",
    "apertus": "no deterministic xielu activation",
    "mistral3 ministral tied": "no deterministic scale of queries",
    "gemma3n": "no deterministic AltUp",
    "falcon h1": "no deterministic Mamba2",
}


def start(folder, name, changes, **more):
    case = CASES[name]
    dataclasses.replace(case, changes=case.changes | changes).save(folder)
    return make_engine(folder, dtype="auto", max_num_batched_tokens=96, **more)


def asked(request_id, prompt, index):
    sampling = SamplingParams(
        max_new_tokens=16, temperature=index % 2 * 0.8, seed=index, logprobs=True, top_logprobs=2
    )
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)


def bits(event):
    return event.token_id, event.logprob, event.top_tokens, event.finish_reason


@pytest.mark.parametrize("name", EXACT)
def test_a_reply_has_the_same_bits_beside_any_others(tmp_path, name):
    threads = 1 + len(name) % 3
    engine = start(tmp_path, name, EXACT[name], cpu_threads=threads, max_num_seqs=6)
    rng = random.Random(1)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 30, 64)]
    prompts = [[5], [7, 8, 9], *(prefix + it for it in tails), *tails[2:]]

    assert engine.engine.info.quantization == "int8"
    assert engine.engine.info.plan.deterministic.requests == "all"
    alone = [engine.generate([asked(i, prompt, i)])[0] for i, prompt in enumerate(prompts)]
    for start_id in (100, 200):
        order = 2 * [*range(len(prompts))]
        rng.shuffle(order)
        requests = [asked(start_id + i, prompts[j], j) for i, j in enumerate(order)]
        for found, j in zip(engine.generate(requests), order, strict=True):
            assert [bits(it) for it in found] == [bits(it) for it in alone[j]]


@pytest.mark.parametrize("name", NOT)
def test_the_plan_names_the_parts_with_other_bits(tmp_path, name):
    plan = start(tmp_path, name, {}).engine.info.plan.deterministic

    assert plan.requests == "none"
    assert NOT[name] in plan.why
