"""Replies of a service under load, computed again by `tessera replay` in this process."""

import asyncio
import copy
import json
import random

import pytest

from server.cli.main import main
from tests.reliability.receipts import collect

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def receipts(bundled_service):
    """Receipts of 12 requests of any kind in progress at a time, with all features."""
    return asyncio.run(collect(bundled_service.port, 24, 12, random.Random(1)))


@pytest.fixture
def replay(tmp_path, capsys):
    """Return a function: replay receipts; return the exit status, the lines and the errors."""

    def run(plain, *flags):
        file = tmp_path / "receipts.jsonl"
        file.write_text("".join(json.dumps(it) + "\n" for it in plain))
        capsys.readouterr()
        status = 0
        try:
            main(["replay", str(file), "--device=cpu", "--log-level=error", *flags])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


def altered(receipt, place, change):
    receipt = copy.deepcopy(receipt)
    *path, last = place
    found = receipt
    for step in path:
        found = found[step]
    found[last] = change(found.get(last) if isinstance(found, dict) else found[last])
    return receipt


def test_receipts_of_random_requests_in_random_companies_are_equal(receipts, replay):
    status, lines, err = replay(receipts, "--max-num-seqs=7", "--max-num-batched-tokens=64")

    outputs = sum(len(it["outputs"]) for it in receipts)
    assert (status, "other conditions" in err) == (0, False)
    assert lines[-1] == f"24 receipts, {outputs} outputs: all equal"
    assert len(lines) == outputs + 1
    assert all(it["deterministic"] for it in receipts)


def test_every_alteration_is_found(receipts, replay):
    """Also where the digests were made again, if it changes what is computed."""
    long = [it for it in receipts if len(it["outputs"][0]["token_ids"]) > 3]
    greedy = next(it for it in long if it["sampling"].get("temperature") == 0)
    scored = next(it for it in receipts if "logprobs" in it["outputs"][0])
    first = ["outputs", 0]
    wrong = [
        altered(greedy, [*first, "token_ids", 2], lambda it: it ^ 1),
        altered(greedy, [*first, "token_ids"], lambda it: it[:-1]),
        altered(greedy, ["sampling", "stop_token_ids"], lambda _: [9]),
        altered(greedy, ["prompts", 0, -1], lambda it: it ^ 1),
        altered(greedy, ["sampling", "max_new_tokens"], lambda _: 1 << 40),
        altered(greedy, ["sampling", "grammar"], lambda _: "no grammar"),
        altered(greedy, ["prompts", 0, 0], lambda _: 1 << 30),
        altered(scored, [*first, "logprobs"], lambda it: it[:-1]),
    ]

    status, lines, _ = replay([greedy, *wrong])

    assert status == 1
    assert not any(it.startswith("receipt 1: altered") for it in lines)
    for number in range(2, len(wrong) + 2):
        assert any(it.startswith(f"receipt {number}: altered: ") for it in lines)
    token = greedy["outputs"][0]["token_ids"][2]
    assert any(f"differs at token 2: {token} instead of {token ^ 1}" in it for it in lines)
    assert any("cannot be computed: prompt and max_new_tokens come to" in it for it in lines)
    assert any("cannot be computed: the grammar cannot be compiled" in it for it in lines)
    assert any(f"{1 << 30} is not a token id from 0 to 4095" in it for it in lines)
    assert any("differs in its log-probabilities" in it for it in lines)
    assert lines[-1].endswith(f"{len(wrong)} receipts altered")


def test_other_conditions_are_named_before_anything_is_computed(receipts, replay):
    other = altered(receipts[0], ["conditions", "weights"], lambda _: "sha256:" + "0" * 64)
    other = altered(other, ["conditions", "device"], lambda _: "NVIDIA H100")

    status, lines, err = replay([other], "--quiet")

    assert status == 1  # it was altered
    assert "1 receipt of other conditions: weights sha256:" in err
    assert "instead of sha256:000000000000; device " in err
    assert "instead of NVIDIA H100" in err
    assert len(lines) == 2


@pytest.mark.slow
def test_receipts_of_several_formats_have_an_engine_each(receipts, replay):
    plain = next(it for it in receipts if len(it["outputs"][0]["token_ids"]) > 20)
    int4 = altered(plain, ["conditions", "quantization"], lambda _: "int4")

    status, lines, _ = replay([plain, int4, plain])

    assert status == 1
    assert any(it.startswith("receipt 1") and "equal" in it for it in lines)
    assert any(it.startswith("receipt 2") and "differs" in it for it in lines)
    assert any(it.startswith("receipt 3") and "equal" in it for it in lines)


def test_a_running_service_computes_what_it_can_be_asked_for(receipts, replay, bundled_service):
    """A request cannot state a grammar in the engine's notation, nor words as tokens."""
    unasked = {"grammar", "bad_words"}
    plain = [
        it
        for it in receipts
        if not unasked & it["sampling"].keys()
        if not any("prompt_logprobs" in output for output in it["outputs"])
    ]
    wrong = altered(plain[0], ["outputs", 0, "token_ids", 0], lambda it: it ^ 1)

    status, lines, err = replay(plain, f"--url={bundled_service.url}")
    assert (status, lines[-1].rpartition(": ")[2]) == (0, "all equal")
    assert "other conditions" not in err

    status, lines, _ = replay([wrong], f"--url={bundled_service.url}", "--quiet")
    assert status == 1
    assert "differs at token 0: " in lines[-2]

    others = [it for it in receipts if it not in plain]
    status, lines, _ = replay(others, f"--url={bundled_service.url}", "--quiet")
    assert status == 1
    assert any("a service cannot be asked for its " in it for it in lines)
    assert not any("differs" in it for it in lines)
