"""Families over HTTP: the tokens and log-probabilities of several requests at once are those of transformers."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tokenizers
import torch

from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.oracle import generated
from tests.waiting import GIVE_UP

NEW_TOKENS = 120
PROMPTS = [[(7 * i + 3 * j) % 125 + 3 for j in range(n)] for i, n in enumerate((5, 40, 23, 61))]


def write(folder, name, *, pickle):
    """Write a checkpoint whose tokenizer has the token `t7` for the id 7; return the model in transformers."""
    oracle = CASES[name].save(folder)
    if pickle:
        torch.save(oracle.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return oracle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pickle"),
    [("gptj", False), ("cohere2", False), ("gpt_neox", True), ("opt", True)],
)
def test_requests_at_once_have_the_tokens_of_transformers(start_service, tmp_path, name, pickle):
    oracle = write(tmp_path, name, pickle=pickle)
    load_format = ("--load-format", "pickle") if pickle else ()
    service = start_service(
        "--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "4096",
        "--max-num-batched-tokens", "16", "--max-num-seqs", "4", *load_format,
    )  # fmt: skip
    service.wait_until_healthy(GIVE_UP)

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 1}
        reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=GIVE_UP)
        (choice,) = reply.raise_for_status().json()["choices"]
        found = choice["logprobs"]
        return [int(it.strip()[1:]) for it in found["tokens"]], found["token_logprobs"]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(ask, PROMPTS))

    for prompt, (tokens, logprobs) in zip(PROMPTS, answers, strict=True):
        theirs = generated(oracle, prompt, NEW_TOKENS)
        assert tokens == theirs.tokens
        assert logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
