"""Checkpoints of several families over HTTP: the tokens of transformers, and images refused by name."""

import dataclasses
import shutil

import pytest

from model.hub.names import BUNDLED_FOLDER
from tests.e2e.conftest import CLIENT
from tests.e2e.served_tokens import assert_equal_tokens
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.oracle import generated

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
    theirs = generated(oracle, PROMPT, TOKENS)

    service = start_service(
        f"--model={tmp_path}",
        "--served-model-name=it",
        "--device=cpu",
        "--dtype=float32",
        "--quantization=none",
        "--max-num-batched-tokens=32",
    )
    service.wait_until_healthy(120)

    assert_equal_tokens(CLIENT, service.url, PROMPT, theirs, 1e-4)
    for path, fields in REQUESTS.items():
        refused = CLIENT.post(f"{service.url}{path}", json={"model": "it", **fields})
        assert refused.status_code == 400
        assert "the model reads text only" in refused.text
