"""Reading a request body: limits of size and time hold whatever the client declares."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    ValidationError,
)
from server.http.body.request_body import (
    MOST_PARTS,
    ClientDisconnectedError,
    ClientWatch,
    decode,
    read_json,
)
from server.http.load.admission import Admission
from tests.http.conftest import CONFIG

pytestmark = pytest.mark.anyio

LIMITS = replace(CONFIG, max_body_bytes=1000, body_timeout_seconds=0.1)


def buffer(limits=LIMITS):
    return Admission(limits, None, None).buffer()


def scope(**headers):
    named = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http", "headers": named}


def body(*chunks):
    """Return a `receive` that delivers these chunks, and a list with an entry for each chunk taken."""
    messages = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
    messages[-1]["more_body"] = False
    taken = []

    async def receive():
        taken.append(None)
        return messages[len(taken) - 1]

    return receive, taken


async def test_a_declared_length_over_the_limit_is_refused_before_reading():
    receive, taken = body(b"x")

    with pytest.raises(BodyTooLargeError, match=r"at most 1000 bytes\. Given: 1001"):
        await read_json(scope(content_length="1001"), receive, LIMITS, buffer())

    assert taken == []


async def test_a_body_without_a_length_is_refused_at_the_limit():
    receive, taken = body(*[b"x" * 100] * 500)

    with pytest.raises(BodyTooLargeError, match="at most 1000 bytes"):
        await read_json(scope(), receive, LIMITS, buffer())

    assert len(taken) == 11


async def test_a_body_of_exactly_the_limit_is_read():
    receive, _ = body(b'"', b"x" * 998, b'"')

    assert await read_json(scope(content_length="1000"), receive, LIMITS, buffer()) == "x" * 998


@pytest.mark.parametrize("length", ["-1", "1e3", "", "٣"])
async def test_a_length_that_is_not_a_number_is_refused(length):
    receive, _ = body(b"{}")

    with pytest.raises(MalformedBodyError, match="Content-Length"):
        await read_json(
            {"headers": [(b"content-length", length.encode())]}, receive, LIMITS, buffer()
        )


async def test_a_length_with_thousands_of_digits_is_too_large():
    receive, _ = body(b"{}")

    with pytest.raises(BodyTooLargeError):
        await read_json(scope(content_length="9" * 5000), receive, LIMITS, buffer())


async def test_a_body_that_does_not_arrive_times_out():
    async def receive():
        await asyncio.sleep(0.06)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(BodyTimeoutError, match=r"within 0\.1 seconds"):
        await read_json(scope(), receive, LIMITS, buffer())


async def test_a_disconnect_while_the_body_is_read_is_an_error():
    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnectedError):
        await read_json(scope(), receive, LIMITS, buffer())


async def test_the_watch_calls_back_once_when_the_client_disconnects():
    gone = asyncio.Event()
    calls = []

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    with ClientWatch(receive, lambda: calls.append(None)) as watch:
        await asyncio.sleep(0)
        assert not watch.gone
        gone.set()
        await asyncio.sleep(0.01)

    assert watch.gone
    assert len(calls) == 1


async def test_the_watch_ends_with_its_block():
    async def receive():
        await asyncio.Event().wait()

    before = len(asyncio.all_tasks())
    with ClientWatch(receive, lambda: None):
        await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize(("extra", "refused"), [(0, False), (1, True)])
@pytest.mark.parametrize(
    "pair",
    [b'"%x":0', b'"%x"\r\n\t : 0', rb'"%x\\":0', rb'"%x\"":0', rb'"%x\\\"\\" :""', b'":%x":"[:{"'],
    ids=bytes.decode,
)
def test_a_body_with_too_many_keys_is_refused_before_it_is_decoded(pair, extra, refused):
    body = b"{" + b",".join(pair % i for i in range(MOST_PARTS + extra)) + b"}"
    if refused:
        with pytest.raises(ValidationError, match=r"at most 65536 keys\. Given: 65537"):
            decode(body)
    else:
        assert len(decode(body)) == MOST_PARTS


@pytest.mark.parametrize(("extra", "refused"), [(0, False), (1, True)])
@pytest.mark.parametrize("part", [b"[]", b"{}", b'[ "[{"]', b'{"{[\\"[": 0}'], ids=bytes.decode)
def test_a_body_with_too_many_objects_and_arrays_is_refused_before_it_is_decoded(
    part, extra, refused
):
    body = b"[" + b",".join([part] * (MOST_PARTS - 1 + extra)) + b"]"
    if refused:
        with pytest.raises(ValidationError, match=r"65536 objects and arrays\. Given: 65537"):
            decode(body)
    else:
        assert len(decode(body)) == MOST_PARTS - 1


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=bytes.decode)
def test_a_body_that_is_nested_too_deeply_is_malformed_however_many_parts_it_has(opening):
    with pytest.raises(MalformedBodyError, match="nested too deeply"):
        decode(opening * (2 * MOST_PARTS))


def test_a_text_with_as_many_quotes_colons_and_brackets_is_accepted():
    text = '{"a": [1]}' * (MOST_PARTS + 1)
    for _ in range(2):  # JSON in a string, and once more
        body = msgspec.json.encode({"inputs": text})
        assert decode(body) == {"inputs": text}
        text = body.decode()


def test_a_prompt_may_have_more_token_ids_than_keys():
    ids = list(range(2 * MOST_PARTS))

    assert decode(msgspec.json.encode({"prompt": ids})) == {"prompt": ids}
