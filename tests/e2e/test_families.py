"""Checkpoints of several families over HTTP: the tokens of transformers, and images refused by name."""

import dataclasses
import shutil

import pytest
import torch

from model.hub.names import BUNDLED_FOLDER
from tests.e2e.conftest import CLIENT
from tests.model.checkpoint.hf_checkpoints import CASES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

VOCABULARY = 4096
PROMPT = [*range(7, 4000, 97)]
TOKENS = 120
IMAGE = "data:image/png;base64,AAAA"
REQUESTS = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}
        ]
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                    }
                ],
            }
        ],
    },
}


@pytest.mark.parametrize(
    "name",
    [
        "mistral3 ministral tied",
        "qwen3 vl",
        "hunyuan alpha tied biases",
        "exaone4 hybrid",
        "apertus",
        "minicpm",
    ],
)
def test_a_service_has_the_tokens_of_transformers_and_refuses_images(tmp_path, start_service, name):
    case = CASES[name]
    oracle = dataclasses.replace(case, changes=case.changes | {"vocab_size": VOCABULARY}).save(
        tmp_path
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_FOLDER / file, tmp_path)
    ids, logprobs = expected(oracle)

    service = start_service(
        f"--model={tmp_path}",
        "--served-model-name=it",
        "--device=cpu",
        "--dtype=float32",
        "--quantization=none",
        "--max-num-batched-tokens=32",
    )
    service.wait_until_healthy(120)
    body = {
        "model": "it",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    reply = CLIENT.post(f"{service.url}/v1/completions", json=body, timeout=180).json()

    found = reply["choices"][0]["logprobs"]
    assert [int(token.removeprefix("token_id:")) for token in found["tokens"]] == ids
    pairs = zip(found["token_logprobs"], logprobs, strict=True)
    assert max(abs(ours - theirs) for ours, theirs in pairs) < 1e-4
    for path, fields in REQUESTS.items():
        refused = CLIENT.post(f"{service.url}{path}", json={"model": "it", **fields})
        assert refused.status_code == 400
        assert "the model reads text only" in refused.text


def expected(oracle):
    """Return the tokens that transformers generates, and their log-probabilities."""
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = oracle.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids = out.sequences[0, len(PROMPT) :]
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return ids.tolist(), logprobs.tolist()
