"""Receipts of replies: on every route, streamed or not."""

import asyncio
import json
import threading

import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.reply import receipts
from server.receipts.record import alterations, logprob_digest, read_receipt, sampling_of
from tests.http.dialects.openai.test_tools import PLAIN
from tests.http.fakes import INFO, event, put, say
from tests.plans import PLAN

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
TOKENS = [72, 105, 74]
ROUTES = [
    ("/generate", {"inputs": "hello"}, False),
    ("/generate_stream", {"inputs": "hello"}, True),
    ("/", {"inputs": "hello"}, False),
    ("/", {"inputs": "hello", "stream": True}, True),
    ("/v1/completions", {"prompt": "hello"}, False),
    ("/v1/completions", {"prompt": "hello", "stream": True}, True),
    ("/v1/chat/completions", {"messages": MESSAGES}, False),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, True),
    ("/v1/responses", {"input": "hello"}, False),
    ("/v1/responses", {"input": "hello", "stream": True}, True),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, False),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "stream": True}, True),
    ("/invocations", {"prompt": "hello"}, False),
    ("/invocations", {"inputs": "hello", "stream": True}, True),
]


@pytest.fixture
def checkpoint(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    return tmp_path


@pytest.fixture
async def service(open_client, engine, tokenizer, checkpoint):
    determinism = msgspec.structs.replace(PLAN.deterministic, requests="all")
    plan = msgspec.structs.replace(PLAN, deterministic=determinism)
    engine.info = msgspec.structs.replace(INFO, plan=plan)
    engine.script = say(TOKENS, FinishReason.LENGTH)
    template = ChatTemplate({"default": PLAIN}, tokenizer)
    return await open_client(chat_template=template, checkpoint=str(checkpoint))


def asked(body, **fields):
    """Return a body that asks for a receipt, with further fields."""
    fields = {"receipt": True, **fields}
    return body | ({"parameters": fields} if "inputs" in body else fields)


def receipts_in(value):
    """Return all receipts anywhere in a JSON value."""
    if isinstance(value, list):
        return [found for entry in value for found in receipts_in(entry)]
    if not isinstance(value, dict):
        return []
    own = [value["receipt"]] if "receipt" in value else []
    return own + [
        it for key, entry in value.items() if key != "receipt" for it in receipts_in(entry)
    ]


def values(response):
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = [it[5:].strip() for it in response.text.splitlines() if it.startswith("data:")]
    return [json.loads(it) for it in lines if it != "[DONE]"]


def only_receipt(response):
    assert response.status_code == 200, response.text
    (plain,) = receipts_in(values(response))
    receipt = read_receipt(plain)
    assert alterations(receipt) == []
    return receipt


@pytest.mark.parametrize(("path", "body", "stream"), ROUTES)
async def test_every_route_has_the_receipt_in_one_event_which_is_the_last_with_data(
    service, engine, path, body, stream
):
    response = await service.post(path, json=asked(body))

    receipt = only_receipt(response)
    (request,) = engine.requests
    assert receipt.prompts == [request.prompt_token_ids]
    (output,) = receipt.outputs
    assert (output.token_ids, output.finish_reason) == (TOKENS, "length")
    assert sampling_of(receipt, output) == request.sampling
    assert receipt.conditions.weights.startswith("sha256:")
    assert "x-tessera-warnings" not in response.headers
    if stream:
        events = [it for it in values(response) if it.get("type") != "message_stop"]
        assert receipts_in(events[-1])


@pytest.mark.parametrize(("path", "body", "stream"), ROUTES)
async def test_without_the_field_nothing_changes(service, engine, path, body, stream):
    response = await service.post(path, json=asked(body, receipt=False))

    assert response.status_code == 200
    assert receipts_in(values(response)) == []
    assert not any(thread.name == "weights-digest" for thread in threading.enumerate())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_choices_have_one_receipt_with_an_output_each(service, engine, stream, usage):
    ends = iter([0.02, 0.0, 0.01, 0.0])  # the last choice is not the last to end

    async def script(_engine, _request, stream):
        await asyncio.sleep(next(ends))
        put(stream, event(72), event(105, FinishReason.LENGTH))

    engine.script = script
    options = {"stream_options": {"include_usage": True}} if stream and usage else {}
    body = {"prompt": ["hello", "x"], "n": 2, "stream": stream, "receipt": True, **options}

    response = await service.post("/v1/completions", json=body)

    receipt = only_receipt(response)
    assert [it.prompt for it in receipt.outputs] == [0, 0, 1, 1]
    assert len(receipt.prompts) == 2
    assert [sampling_of(receipt, it) for it in receipt.outputs] == [
        request.sampling for request in engine.requests
    ]
    assert receipts_in(values(response)[-1])


async def test_the_receipt_of_the_best_choices_has_these_alone(service, engine):
    async def script(_engine, request, stream):
        logprob = -0.5 - (request.sampling.seed % 2)
        put(stream, event(72, logprob=logprob), event(105, FinishReason.LENGTH, logprob))

    engine.script = script

    response = await service.post(
        "/v1/completions", json=asked({"prompt": "x", "best_of": 2, "n": 1, "seed": 4})
    )

    receipt = only_receipt(response)
    (output,) = receipt.outputs
    assert sampling_of(receipt, output).seed == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_tokens_after_a_stop_string_are_not_in_the_receipt(
    service, engine, tokenizer, path, stream
):
    ids = tokenizer.encode("one two three")
    engine.script = say(ids, FinishReason.LENGTH, together=True)
    if path == "/generate":
        body = asked({"inputs": "x"}, stop=["two"])
        response = await service.post("/generate_stream" if stream else path, json=body)
    else:
        response = await service.post(path, json=asked({"prompt": "x"}, stop="two", stream=stream))

    (output,) = only_receipt(response).outputs
    assert output.token_ids == ids[: len("one two")]
    assert output.finish_reason == "stop_string"


@pytest.mark.parametrize(
    ("reason", "name"), [(FinishReason.EOS, "eos"), (FinishReason.STOP, "stop")]
)
async def test_the_receipt_says_what_ended_the_output(service, engine, reason, name):
    engine.script = say(TOKENS, reason)

    (output,) = only_receipt(await service.post("/generate", json=asked({"inputs": "x"}))).outputs

    assert (output.finish_reason, output.token_ids) == (name, TOKENS)


async def test_an_output_that_its_deadline_ended_says_so(service, engine):
    async def script(_engine, _request, stream):
        put(stream, event(72), event(105))
        put(stream, event(None, FinishReason.TIMEOUT))

    engine.script = script

    response = await service.post("/generate", json=asked({"inputs": "x"}, timeout_ms=50_000))

    (output,) = only_receipt(response).outputs
    assert (output.finish_reason, output.token_ids) == ("timeout", [72, 105])


async def test_log_probabilities_have_a_digest_only_if_they_were_asked_for(service):
    bare = await service.post("/v1/completions", json=asked({"prompt": "hello"}))
    full = await service.post(
        "/v1/completions", json=asked({"prompt": "hello"}, logprobs=2, echo=True)
    )

    (output,) = only_receipt(bare).outputs
    assert output.logprobs is output.prompt_logprobs is msgspec.UNSET
    (output,) = only_receipt(full).outputs
    assert output.logprobs.startswith("sha256:")
    assert output.prompt_logprobs.startswith("sha256:")


@pytest.mark.parametrize(
    ("requests", "deterministic", "advice"),
    [
        ("on request", None, "`deterministic` makes it so"),
        ("on request", True, None),
        ("none", None, "no kernel"),
        ("all", None, None),
    ],
)
async def test_a_request_that_is_not_deterministic_gets_a_warning(
    service, engine, requests, deterministic, advice
):
    plan = msgspec.structs.replace(PLAN.deterministic, requests=requests, why="no kernel")
    engine.info = msgspec.structs.replace(
        INFO, plan=msgspec.structs.replace(PLAN, deterministic=plan)
    )

    response = await service.post(
        "/v1/completions", json=asked({"prompt": "x"}, deterministic=deterministic)
    )

    assert only_receipt(response).deterministic == (advice is None)
    warnings = response.json().get("warnings", [])
    assert ("x-tessera-warnings" in response.headers) == bool(warnings)
    assert [advice in it for it in warnings] == ([] if advice is None else [True])


async def test_weights_that_changed_after_the_start_have_no_digest(service, checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"others")

    response = await service.post("/v1/completions", json=asked({"prompt": "x"}))

    assert only_receipt(response).conditions.weights is None
    (warning,) = response.json()["warnings"]
    assert "`receipt` has no digest of the weights" in warning
    assert str(checkpoint) not in response.text


async def test_random_weights_have_no_digest(open_client, engine):
    client = await open_client(checkpoint="")

    response = await client.post("/v1/completions", json=asked({"prompt": "x"}, deterministic=True))

    assert only_receipt(response).conditions.weights is None
    assert response.json()["warnings"] == [
        "`receipt` has no digest of the weights: the weights are random"
    ]


async def test_the_digest_of_the_weights_is_computed_once_and_streams_wait_for_it(
    service, monkeypatch
):
    calls, may_end = [], threading.Event()

    def digest(checkpoint, since):
        calls.append(checkpoint)
        may_end.wait()
        return "sha256:7"

    monkeypatch.setattr(receipts, "checkpoint_digest", digest)
    bodies = [
        asked({"prompt": "hello"}, stream=True, logprobs=1),
        asked({"prompt": "hello"}, stream=True),
        asked({"prompt": "hello"}),
    ]
    posts = [asyncio.ensure_future(service.post("/v1/completions", json=it)) for it in bodies]
    # Another request is answered meanwhile.
    assert (await service.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert not any(post.done() for post in posts)
    may_end.set()

    for post in posts:
        assert only_receipt(await post).conditions.weights == "sha256:7"
    assert len(calls) == 1


async def test_a_reply_does_not_wait_long_for_the_digest_and_later_ones_have_it(
    service, monkeypatch
):
    may_end = threading.Event()

    def digest(*_):
        may_end.wait()
        return "sha256:7"

    monkeypatch.setattr(receipts, "checkpoint_digest", digest)
    monkeypatch.setattr(receipts, "_MOST_SECONDS", 0.01)
    response = await service.post("/v1/completions", json=asked({"prompt": "x"}))
    may_end.set()
    monkeypatch.setattr(receipts, "_MOST_SECONDS", 60)
    later = await service.post("/v1/completions", json=asked({"prompt": "x"}))

    assert only_receipt(response).conditions.weights is None
    assert "later receipts have it" in response.json()["warnings"][0]
    assert only_receipt(later).conditions.weights == "sha256:7"


async def test_no_request_waits_for_a_digest_that_fails(service, monkeypatch):
    def digest(*_):
        raise MemoryError

    monkeypatch.setattr(receipts, "checkpoint_digest", digest)

    for _ in range(2):
        response = await service.post("/v1/completions", json=asked({"prompt": "x"}))
        assert only_receipt(response).conditions.weights is None
        assert "no digest of the weights" in response.json()["warnings"][0]


async def test_a_stream_that_fails_has_no_receipt(service, engine):
    async def script(_engine, _request, stream):
        put(stream, event(72))
        put(stream, event(None, FinishReason.ERROR, error="x"))

    engine.script = script

    response = await service.post("/generate_stream", json=asked({"inputs": "x"}))

    assert receipts_in(values(response)) == []
    assert "error" in values(response)[-1]


async def test_the_digest_of_a_large_reply_leaves_turns_to_other_requests():
    rows = [(-0.5, [(i, -0.5)]) for i in range(1000)]
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count())
    digest = await receipts._digest(iter(rows))
    other.cancel()

    assert digest == logprob_digest(rows)
    assert turns >= len(rows) // receipts._AT_ONCE
