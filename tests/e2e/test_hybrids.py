"""A hybrid over HTTP: the usage of replies says how many tokens of a prompt came from the prefix cache."""

import dataclasses
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from model.hub.names import BUNDLED_FOLDER
from tests.e2e.conftest import CLIENT
from tests.model.checkpoint.hf_checkpoints import CASES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

VOCABULARY = 4096
CHUNK = 64
SHARED, OTHER, REQUESTS = 1500, 700, 64


@pytest.mark.parametrize("warm", [True, False], ids=["after one that warms the cache", "at once"])
def test_usage_counts_the_tokens_that_requests_share(tmp_path, start_service, warm):
    case = CASES["qwen3.5"]
    changes = case.changes | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    dataclasses.replace(case, changes=changes).save(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_FOLDER / file, tmp_path)
    service = start_service(
        f"--model={tmp_path}", "--served-model-name=it", "--device=cpu", "--dtype=float32",
        "--quantization=none",
    )  # fmt: skip
    service.wait_until_healthy(120)
    rng = random.Random(0)
    common = [rng.randrange(3, VOCABULARY) for _ in range(SHARED)]

    def ask(seed):
        text = random.Random(seed)
        prompt = common + [text.randrange(3, VOCABULARY) for _ in range(OTHER)]
        body = {"model": "it", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = CLIENT.post(f"{service.url}/v1/completions", json=body, timeout=200)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    if warm:
        assert ask(REQUESTS) == 0
    with ThreadPoolExecutor(REQUESTS) as pool:
        found = sorted(pool.map(ask, range(REQUESTS)))

    whole = SHARED // CHUNK * CHUNK
    assert found == [*([] if warm else [0]), *[whole] * (REQUESTS - (not warm))]
    metrics = CLIENT.get(f"{service.url}/metrics").text
    assert f"tessera_state_snapshot_hits_total {float(REQUESTS - (not warm))}" in metrics
