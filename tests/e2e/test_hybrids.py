"""Hybrids over HTTP: the usage of replies says how many tokens of a prompt came from the prefix cache.

Two ranks give the replies of one process.
"""

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


def start(folder, start_service, name, *options):
    case = CASES[name]
    changes = case.changes | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    dataclasses.replace(case, changes=changes).save(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_FOLDER / file, folder)
    service = start_service(
        f"--model={folder}", "--served-model-name=it", "--device=cpu", "--dtype=float32",
        "--quantization=none", *options,
    )  # fmt: skip
    service.wait_until_healthy(120)
    return service


@pytest.mark.parametrize("warm", [True, False], ids=["after one that warms the cache", "at once"])
def test_usage_counts_the_tokens_that_requests_share(tmp_path, start_service, warm):
    service = start(tmp_path, start_service, "qwen3.5")
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


@pytest.mark.parametrize("name", ["granite4", "falcon h1", "qwen3.5"])
def test_two_ranks_give_the_replies_of_one_process(tmp_path, start_service, name):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (150, 1, 300)]

    def replies(*options):
        service = start(tmp_path, start_service, name, *options)
        body = {"model": "it", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        found = []
        for prompt in [*prompts, [*prompts[0], 5]]:
            reply = CLIENT.post(
                f"{service.url}/v1/completions", json=body | {"prompt": prompt}, timeout=200
            )
            assert reply.status_code == 200, reply.text
            cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((reply.json()["choices"][0]["text"], cached))
        plan = CLIENT.get(f"{service.url}/plan").json()
        service.stop()
        return found, plan

    alone, plan = replies()
    shared, of_rank = replies("--tensor-parallel=2")

    assert shared == alone
    assert alone[-1][1] >= 128
    assert (of_rank["num_ranks"], of_rank["num_kv_heads"]) == (2, plan["num_kv_heads"] // 2)
