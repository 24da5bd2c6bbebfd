"""The client of a running service, synchronous and asynchronous."""

import asyncio
import inspect
import json

import msgspec
import pytest
from tessera import (
    AsyncClient,
    Client,
    ServiceConnectionError,
    ServiceError,
    ServiceStatusError,
    ServiceTimeoutError,
)

from server.client.errors import status_error
from tests.cli import fake_server as fake
from tests.client.conftest import KEY
from tests.waiting import reached

HELLO = {"role": "user", "content": "hello"}
TOKEN = {"index": 1, "token": {"id": 7, "text": "x"}}
DEEP = b'{"a":' * 5000
"""JSON that is nested too deep for a decoder."""


def call_sync(url, method, *arguments, take=None, options=None, **parameters):
    with Client(url, **options or {}) as client:
        answer = getattr(client, method)(*arguments, **parameters)
        if not method.endswith("_stream"):
            return answer
        with answer as stream:
            return list(_first(stream, take))


def call_async(url, method, *arguments, take=None, options=None, **parameters):
    async def main():
        async with AsyncClient(url, **options or {}) as client:
            answer = await getattr(client, method)(*arguments, **parameters)
            if not method.endswith("_stream"):
                return answer
            events = []
            async with answer as stream:
                async for event in stream:
                    events.append(event)
                    if len(events) == take:
                        break
            return events

    return asyncio.run(main())


def _first(stream, take):
    for count, event in enumerate(stream, 1):
        yield event
        if count == take:
            return


@pytest.fixture(params=[call_sync, call_async], ids=["sync", "async"])
def call(request):
    """Calls a method of a client; of a stream it returns the events, at most `take`."""
    return request.param


def test_a_prompt_is_continued(service, call):
    reply = call(
        service.url, "generate", "def", max_new_tokens=9, details=True, decoder_input_details=True
    )

    assert reply.generated_text == " return n"
    assert reply.details.finish_reason == "length"
    assert [token.text for token in reply.details.prefill] == ["d", "e", "f"]
    assert "".join(token.text for token in reply.details.tokens) == " return n"


def test_a_prompt_is_continued_token_by_token(service, call):
    events = call(service.url, "generate_stream", "def", max_new_tokens=9, details=True)

    assert [event.index for event in events] == list(range(1, 10))
    assert "".join(event.token.text for event in events) == events[-1].generated_text == " return n"
    assert events[-1].details.usage.steps == 3


def test_a_conversation_is_answered(service, call):
    reply = call(service.url, "chat", [HELLO], max_tokens=9)

    assert reply.text == " return n"
    assert reply.usage.completion_tokens == 9
    assert call(service.url, "chat", "hello", max_tokens=9).text == reply.text


def test_a_conversation_is_answered_event_by_event(service, call):
    usage = {"include_usage": True}
    events = call(service.url, "chat_stream", [HELLO], max_tokens=9, stream_options=usage)

    assert "".join(event.text for event in events) == " return n"
    assert [event.usage.total_tokens for event in events if event.usage][-1] == 14


def test_further_fields_reach_the_service(service, call):
    reply = call(service.url, "chat", "hello", max_tokens=1, extra_body={"unknown_field": 1})

    assert any("unknown_field" in warning for warning in reply.warnings)


@pytest.mark.parametrize("name", ["max_tokens", "messages", "stream"])
def test_a_field_that_is_an_argument_too_is_refused(service, call, name):
    with pytest.raises(ValueError, match=f"extra_body has {name}"):
        call(service.url, "chat", "hello", max_tokens=1, extra_body={name: 1})


def test_the_other_routes_are_answered(service, call):
    assert [span.stop for span in call(service.url, "tokenize", "def")] == [1, 2, 3]
    assert call(service.url, "health").is_ready
    assert call(service.url, "plan").phases


def test_a_service_that_is_not_ready_says_what_it_does(scripted, call):
    body = {"state": "starting", "phase": "loading weights", "error": "no", "error_type": "x"}
    server = scripted({"/health": fake.plain(body, "503 Service Unavailable")})

    health = call(server.url, "health")

    assert (health.is_ready, health.state, health.phase) == (False, "starting", "loading weights")


@pytest.mark.parametrize("method", ["generate_stream", "chat_stream"])
def test_closing_a_stream_aborts_its_request(service, call, method):
    service.engine.aborted.clear()

    events = call(service.url, method, "hello", take=2)

    assert len(events) == 2
    service.run(reached(lambda: len(service.engine.aborted) == 1))


def test_cancelling_a_task_aborts_its_request(service):
    service.engine.aborted.clear()

    async def main():
        async with AsyncClient(service.url) as client:
            running = len(service.engine.requests)
            task = asyncio.create_task(client.generate("hello"))
            await reached(lambda: len(service.engine.requests) > running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())

    service.run(reached(lambda: len(service.engine.aborted) == 1))


@pytest.mark.parametrize(
    ("method", "parameters", "status", "error_type", "text"),
    [
        ("generate", {"temperature": -1}, 422, "validation", "temperature"),
        ("generate", {"max_new_token": 1}, 422, "validation", "max_new_tokens"),
        ("generate_stream", {"temperature": -1}, 422, "validation", "temperature"),
        ("chat", {"temperature": -1}, 400, "BadRequestError", "temperature"),
        ("chat", {"model": "another"}, 404, "NotFoundError", "another"),
        ("chat_stream", {"temperature": -1}, 400, "BadRequestError", "temperature"),
    ],
)
def test_a_refusal_has_status_type_message_and_request_id(
    service, call, method, parameters, status, error_type, text
):
    with pytest.raises(ServiceStatusError, match=text) as caught:
        call(service.url, method, "hello", request_id="my-id", **parameters)

    assert caught.value.status == status
    assert caught.value.error_type == error_type
    assert caught.value.request_id == "my-id"
    assert str(caught.value).endswith(f"(status {status}, request id my-id)")


@pytest.mark.parametrize(
    ("method", "status"), [("generate", 424), ("generate_stream", 424), ("chat_stream", 500)]
)
def test_a_failure_while_generating_is_an_error(service, call, method, status):
    with pytest.raises(ServiceStatusError, match="it broke") as caught:
        call(service.url, method, "hello", request_id="fails")

    assert caught.value.status == status
    assert caught.value.request_id == "fails"


def test_the_time_after_which_to_try_again_is_known(scripted, call):
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\n{}"
    server = scripted({"/generate": [busy]})

    with pytest.raises(ServiceStatusError) as caught:
        call(server.url, "generate", "hello")

    assert (caught.value.status, caught.value.retry_after) == (429, 3)


def test_an_api_key_is_sent(locked_service, call):
    with pytest.raises(ServiceStatusError, match="API key") as caught:
        call(locked_service.url, "generate", "hello", max_new_tokens=1)
    reply = call(
        locked_service.url, "generate", "hello", max_new_tokens=1, options={"api_key": KEY}
    )

    assert caught.value.status == 401
    assert reply.generated_text == " "


def test_headers_are_sent(scripted, call):
    server = scripted({"/tokenize": fake.plain([])})

    call(server.url, "tokenize", "a", options={"headers": {"X-Tenant": "b"}})

    assert server.requests[0][1]["x-tenant"] == "b"


@pytest.mark.parametrize(
    "script",
    [
        fake.chunked(fake.event(TOKEN)),
        [*fake.chunked(fake.event(TOKEN))[:2], fake.HANG_UP],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"],
    ],
    ids=["ended", "lost", "empty"],
)
def test_a_stream_without_its_last_event_is_an_error(scripted, call, script):
    server = scripted({"/generate_stream": script})

    with pytest.raises(ServiceConnectionError):
        call(server.url, "generate_stream", "hello")


def test_a_stream_that_is_split_anywhere_is_read(scripted, call):
    last = TOKEN | {"generated_text": "é"}
    data = b": comment\n\n" + json.dumps(TOKEN).join(("data:", "\n\n")).encode()
    data += b"data: " + json.dumps(last, ensure_ascii=False).encode() + b"\n\n"
    server = scripted({"/generate_stream": fake.chunked(*(bytes([byte]) for byte in data))})

    events = call(server.url, "generate_stream", "hello")

    assert [event.generated_text for event in events] == [None, "é"]


@pytest.mark.parametrize("body", [b"<html>", b'{"generated_text": 1}', b"\xff", b"", DEEP])
def test_what_is_no_answer_of_a_service_is_an_error(scripted, call, body):
    server = scripted({"/generate": fake.plain(body)})

    with pytest.raises(ServiceConnectionError, match="the answer of /generate cannot be read"):
        call(server.url, "generate", "hello")


@pytest.mark.parametrize("body", [b"<html>bad gateway", b'["x"]', b"", b"\xff" * 400, DEEP])
def test_an_error_of_a_proxy_shows_the_beginning_of_its_text(scripted, call, body):
    server = scripted({path: fake.plain(body, "502 Bad Gateway") for path in ("/health", "/plan")})

    for method in ("health", "plan"):
        with pytest.raises(ServiceStatusError) as caught:
            call(server.url, method)
        assert caught.value.status == 502
        assert caught.value.message
        assert len(caught.value.message) <= 300


@pytest.mark.parametrize("method", ["generate", "generate_stream"])
def test_compressed_content_that_is_damaged_is_an_error_of_the_client(scripted, call, method):
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    server = scripted({"/generate": [head], "/generate_stream": [head]})

    with pytest.raises(ServiceConnectionError, match="the answer cannot be read"):
        call(server.url, method, "hello")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-5", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_time_to_wait_that_is_no_number_of_seconds_is_not_known(seconds):
    assert status_error(429, {"retry-after": seconds}, b"{}").retry_after is None


@pytest.mark.parametrize("method", ["generate", "generate_stream"])
def test_a_silent_service_is_a_timeout(scripted, call, method):
    server = scripted({"/generate": [30], "/generate_stream": [*fake.chunked()[:1], 30]})

    with pytest.raises(ServiceTimeoutError, match="within the timeout") as caught:
        call(server.url, method, "hello", options={"timeout": 0.1})

    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, ServiceError)


def test_an_address_without_a_service_is_named(call):
    with pytest.raises(ServiceConnectionError, match=r"http://127\.0\.0\.1:1/health: no service"):
        call("127.0.0.1:1", "health")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("ftp://a", {}, "'ftp://a' is not an address"),
        ("http://a:99999", {}, "Port out of range"),
        ("http://a?b=1", {}, "is not an address"),
        ("http://a", {"api_key": "a\nb"}, "api_key is empty or has"),
        ("http://a", {"api_key": ""}, "api_key is empty or has"),
        ("http://a\nb", {}, "is not an address"),
        ("http://a b", {}, "is not an address"),
        ("http://a", {"headers": {"X-A": "é"}}, "header X-A is empty or has"),
        ("http://a", {"headers": {"X A": "b"}}, "'X A' is not the name of a header"),
        ("http://a", {"headers": {"X\r\nA": "b"}}, "is not the name of a header"),
        ("http://a", {"timeout": 0}, "timeout is 0"),
        ("http://a", {"timeout": float("nan")}, "timeout is nan"),
        ("http://a", {"timeout": float("inf")}, "timeout is inf"),
    ],
)
def test_wrong_arguments_are_refused(url, options, message):
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match=message):
            client(url, **options)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "foo:bar"), ("ALL_PROXY", "gopher://a"), ("SSL_CERT_FILE", "/absent")],
)
def test_a_wrong_variable_of_the_http_library_is_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)

    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match=variable):
            client()


def test_a_proxy_of_the_environment_is_not_asked_for_a_service_of_this_machine(
    monkeypatch, service, call
):
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert call(service.url, "health").state == "ready"


def test_errors_do_not_show_the_password_in_an_address(call):
    with pytest.raises(ServiceConnectionError, match=r"http://127\.0\.0\.1:1/health: no") as caught:
        call("http://user:secret@127.0.0.1:1", "health")

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "parameters", "message"),
    [
        ("a", {"temperature": float("nan")}, "parameters.temperature is nan"),
        ("a", {"logit_bias": {"3": float("-inf")}}, "parameters.logit_bias.3 is -inf"),
        ("\ud800", {}, "surrogates"),
        ("a", {"request_id": "a\r\nb"}, "request_id is empty or has"),
    ],
)
def test_what_cannot_be_sent_is_refused(service, call, prompt, parameters, message):
    with pytest.raises(ValueError, match=message):
        call(service.url, "generate", prompt, **parameters)


def test_both_clients_have_the_same_methods():
    def signature(client, name):
        parameters = inspect.signature(getattr(client, name)).parameters
        return {key: (it.kind, it.default) for key, it in parameters.items()}

    def methods(client):
        public = {name for name in vars(client) if not name.startswith("_")}
        return {name: signature(client, name) for name in public | {"__init__"}}

    assert methods(Client) == methods(AsyncClient)


def test_one_client_serves_several_threads_and_tasks(service):
    async def main():
        async with AsyncClient(service.url) as client:
            calls = [client.generate("hello", max_new_tokens=9) for _ in range(20)]
            return await asyncio.gather(*calls)

    assert {reply.generated_text for reply in asyncio.run(main())} == {" return n"}


def test_errors_can_be_sent_to_another_process():
    import pickle

    error = ServiceStatusError("no", status=422, request_id="a")

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own

    assert (str(again), again.status) == (str(error), 422)


def test_answers_can_be_made_for_tests():
    from tessera import GenerateReply

    assert msgspec.json.encode(GenerateReply(generated_text="a"))
