"""Checkpoints of decoders that are no family of ours over HTTP: the tokens of transformers, and the plan."""

import dataclasses
import shutil

import pytest

from model.hub.names import BUNDLED_FOLDER
from tests.e2e.conftest import CLIENT
from tests.e2e.served_tokens import assert_equal_tokens
from tests.model.library_cases import CASES
from tests.model.oracle import generated

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

VOCABULARY = 4096
TOKENS = 120
NAMES = [
    "olmo", "glm", "glm4", "persimmon", "codegen", "jais2", "nanochat", "vaultgemma windows", "mixtral windows",
    "starcoder2 windows tied", "granite",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_service_has_the_tokens_of_transformers(tmp_path, start_service, name):
    case = CASES[name]
    changes = case.changes | {"vocab_size": VOCABULARY}
    oracle = dataclasses.replace(case, changes=changes).save(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_FOLDER / file, tmp_path)

    service = start_service(
        f"--model={tmp_path}",
        "--served-model-name=it",
        "--model-impl=transformers",
        "--device=cpu",
        "--dtype=float32",
        "--max-num-batched-tokens=32",
        "--max-num-seqs=8",
    )
    service.wait_until_healthy(120)
    for prompt in ([*range(7, 4000, 97)], [*range(7, 4000, 97), 5, 6], [9]):
        theirs = generated(oracle, prompt, TOKENS)
        assert_equal_tokens(CLIENT, service.url, prompt, theirs, 1e-3)

    plan = CLIENT.get(f"{service.url}/plan").json()
    assert {step["executor"] for step in plan["steps"]} == {"modules"}
    assert "the slow path" in plan["one_sequence"]
