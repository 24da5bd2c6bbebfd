"""Admission: places for sequences, places for tokenizing, and one budget of bytes for bodies and replies."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from server.errors import OverloadedError, ValidationError
from server.http.load.admission import FREE_BYTES, Admission
from server.http.metrics.client_counts import Counts
from server.http.request_id import CurrentRequest, _current
from server.http.text.grammar_compiler import GrammarCompiler, Verdict
from server.http.transport import HTTP11Protocol
from tests.http.conftest import CONFIG
from tests.http.fakes import INFO, silent
from tests.http.serving import Server, head, read_reply
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio

LIMIT = 100_000
ROUTES = ("/generate", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations", "/tokenize", "/detokenize",
          "/chat_tokenize", "/abort")  # fmt: skip


class Places:
    """The counts of sequences in flight of a service with one process."""

    def __init__(self):
        self.in_flight, self.clients, self._held = 0, self, {}

    def add_in_flight(self, count):
        self.in_flight += count

    def add(self, client, counts):
        self._held[client] = self._held.get(client, 0) + counts.places

    def of(self, client):
        return Counts(places=self._held.get(client, 0))

    def num_clients(self, client):
        return len({client, *(it for it, held in self._held.items() if held)})


@pytest.fixture
def admission():
    return Admission(replace(CONFIG, max_buffered_body_bytes=LIMIT), None, None)


@pytest.fixture
async def server(make_app):
    app = make_app(max_buffered_body_bytes=LIMIT, max_concurrent_requests=4)
    async with Server(app, HTTP11Protocol) as server:
        yield server


async def status(reader):
    return int((await asyncio.wait_for(reader.readuntil(b"\r\n"), GIVE_UP)).split()[1])


async def test_bytes_beyond_the_budget_are_refused_until_others_are_given_back(admission):
    with admission.buffer() as one, admission.buffer() as two:
        one.hold(FREE_BYTES + 60_000)
        one.hold(FREE_BYTES + 50_000)
        assert admission._budget.held == 60_000
        with pytest.raises(OverloadedError):
            two.hold(FREE_BYTES + 60_000)
        two.hold(FREE_BYTES + 40_000)
        two.hold(FREE_BYTES)
        one.release()
        two.hold(FREE_BYTES + 90_000)
        two.add(5_000)
        assert admission._budget.held == 95_000
    assert admission._budget.held == 0


async def test_a_request_alone_may_exceed_the_budget_since_it_could_never_fit(admission):
    with admission.buffer() as one, admission.buffer() as two:
        one.hold(10 * LIMIT)
        two.hold(FREE_BYTES)
        with pytest.raises(OverloadedError):
            two.hold(FREE_BYTES + 1)
    assert admission._budget.held == 0


async def test_the_budget_and_the_bytes_that_do_not_count_include_their_last_byte(admission):
    with admission.buffer() as one, admission.buffer() as two, admission.buffer() as free:
        free.hold(FREE_BYTES)
        assert admission._budget.held == 0
        one.hold(FREE_BYTES + 1)
        assert admission._budget.held == 1
        two.hold(FREE_BYTES + LIMIT - 1)
        assert admission._budget.held == LIMIT
        for buffer, size in (
            (two, FREE_BYTES + LIMIT),
            (free, FREE_BYTES + 1),
            (one, FREE_BYTES + 2),
        ):
            with pytest.raises(OverloadedError, match="too many bytes of requests"):
                buffer.hold(size)
        assert admission._budget.held == LIMIT
        two.release()
        two.add(FREE_BYTES + 3)  # nothing counts yet, so the free bytes come first
        two.add(4)
        assert admission._budget.held == 1 + 3 + 4
    assert admission._budget.held == 0


@pytest.mark.parametrize(("configured", "limit"), [(3, 3), (None, 2 * 21)])
async def test_the_last_place_is_given_and_no_more(configured, limit):
    info = msgspec.structs.replace(INFO, max_num_seqs=21)
    places = Places()
    asked = []
    config = replace(CONFIG, max_concurrent_requests=configured)
    admission = Admission(config, places, lambda count: asked.append(count) or 7)

    with admission.admit(limit - 1, info):
        admission.check(info)
        with pytest.raises(OverloadedError):
            admission.admit(2, info).__enter__()
        with admission.admit(1, info):
            assert places.in_flight == limit
            with pytest.raises(OverloadedError) as caught:
                admission.check(info)
            with pytest.raises(OverloadedError):
                admission.admit(3, info).__enter__()
        assert places.in_flight == limit - 1

    assert (places.in_flight, caught.value.retry_after) == (0, 7)
    assert asked == [1, 1, 3]
    with admission.admit(limit, info):
        pass
    admission.check_sequences("n", limit, info)
    with pytest.raises(ValidationError, match=f"at most {limit} .* Given: {limit + 1}"):
        admission.check_sequences("n", limit + 1, info)


async def test_places_are_given_back_after_an_error():
    places = Places()
    admission = Admission(CONFIG, places, lambda _: 1)
    for admit in (lambda: admission.admit(4, INFO), lambda: admission.admit_tokenizing(INFO)):
        with pytest.raises(KeyError), admit():
            raise KeyError
    assert (places.in_flight, admission._tokenizing.total) == (0, 0)


async def test_requests_that_tokenize_have_places_of_their_own(admission):
    limit = admission.limit(INFO)
    assert limit == 2 * INFO.max_num_seqs
    places = [admission.admit_tokenizing(INFO) for _ in range(limit + 1)]
    for place in places[:limit]:
        place.__enter__()
    with pytest.raises(OverloadedError), places[limit]:
        pass
    places[0].__exit__(None, None, None)
    with admission.admit_tokenizing(INFO):
        pass


@pytest.mark.parametrize(("device", "limit"), [("cpu", 128), ("cuda:0", 1024)])
async def test_a_gpu_has_more_places_for_each_sequence_that_it_computes(admission, device, limit):
    assert admission.limit(msgspec.structs.replace(INFO, device=device, max_num_seqs=64)) == limit


async def test_more_sequences_than_places_are_a_users_mistake(admission):
    admission.check_sequences("n", 128, INFO)
    with pytest.raises(ValidationError, match=r"`n` must ask for at most 128 .* Given: 129"):
        admission.check_sequences("n", 129, INFO)


async def test_a_request_is_refused_before_its_body_is_read_if_the_service_is_full(server, engine):
    engine.script = silent
    running = [await server.post("/generate") for _ in range(4)]
    await reached(lambda: len(engine.running) == 4)
    reader, writer = await server.connect()

    writer.write(head("/generate", 1_000_000))

    assert await status(reader) == 429
    for _, one in (*running, (reader, writer)):
        one.close()


@pytest.mark.parametrize("path", ROUTES)
async def test_bodies_that_would_exceed_the_budget_are_refused_on_every_route(server, path):
    _, writer = await server.connect()
    writer.write(head("/tokenize", FREE_BYTES + LIMIT - 10))
    await asyncio.sleep(0.01)
    other_reader, other = await server.connect()

    other.write(head(path, FREE_BYTES + 11))

    text = (await asyncio.wait_for(other_reader.readuntil(b"\r\n\r\n"), GIVE_UP)).decode()
    assert text.startswith("HTTP/1.1 429")
    assert "retry-after: 1" in text
    writer.close()
    other.close()
    await asyncio.sleep(0.01)
    _, again = await server.connect()
    again.write(head(path, FREE_BYTES + 11))
    await asyncio.sleep(0.01)
    again.close()


async def test_a_body_without_a_length_is_counted_as_it_arrives(server):
    _, writer = await server.connect()
    writer.write(head("/tokenize", FREE_BYTES + LIMIT - 10))
    await asyncio.sleep(0.01)
    other_reader, other = await server.connect()
    other.write(
        b"POST /generate HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"20000\r\n" + b"x" * 0x20000 + b"\r\n"
    )

    assert await status(other_reader) == 429
    writer.close()
    other.close()


async def test_small_requests_are_served_while_the_budget_is_used_up(server):
    """Also while many clients send bodies slowly: these hold no places."""
    slow = [await server.connect() for _ in range(10)]
    for _, writer in slow:
        writer.write(head("/generate", FREE_BYTES + LIMIT - 10) + b'{"inputs": "')
    await asyncio.sleep(0.02)

    reader, served = await server.post("/generate")

    assert "generated_text" in await asyncio.wait_for(read_reply(reader), GIVE_UP)
    for _, writer in (*slow, (reader, served)):
        writer.close()


async def test_a_body_counts_until_its_prompt_is_submitted(make_app, engine):
    engine.script = silent
    app = make_app(max_buffered_body_bytes=LIMIT)
    body = {"inputs": "x" * (FREE_BYTES + LIMIT - 100), "parameters": {"truncate": 5}}
    running = []
    async with Server(app, HTTP11Protocol) as server:
        for count in (1, 2):
            running.append(await server.post("/generate", body))
            await reached(lambda count=count: len(engine.running) == count)
        for _, writer in running:
            writer.close()


async def test_replies_that_are_not_read_count_until_their_clients_are_given_up(make_app):
    app = make_app(max_buffered_body_bytes=LIMIT)
    long, short = {"inputs": "x" * 50_000}, {"inputs": "x"}
    async with Server(app, HTTP11Protocol, send_buffer=4096, send_timeout_seconds=0.4) as server:
        opened = [await server.post("/tokenize", long, receive_buffer=4096)]
        assert await status(opened[0][0]) == 200
        seen = []
        for body, delay in ((long, 0), (short, 0), (long, 1.0)):
            await asyncio.sleep(delay)
            opened.append(await server.post("/tokenize", body, receive_buffer=4096))
            seen.append(await status(opened[-1][0]))
        for _, writer in opened:
            writer.transport.abort()

    assert seen == [429, 200, 200]


# Clients: by key here, so that all of them have one address.


@pytest.fixture
async def tenants(open_client):
    """Returns a function that posts with a client's key."""
    client = await open_client(
        api_key=("a", "b", "c"), max_concurrent_requests=4, max_buffered_body_bytes=LIMIT
    )

    def post(key, body=None, path="/generate"):
        request = client.post(
            path, json=body or {"inputs": "hello"}, headers={"authorization": f"Bearer {key}"}
        )
        return asyncio.ensure_future(request)

    return post


async def test_a_client_below_its_share_is_admitted_though_another_one_has_all_places(
    tenants, engine
):
    engine.script = silent
    flood = [tenants("a") for _ in range(6)]
    await reached(lambda: len(engine.running) == 4)
    assert [(await task).status_code for task in flood[4:]] == [429, 429]

    others = [tenants("b") for _ in range(3)]
    await reached(lambda: len(engine.running) == 6)
    third = tenants("c")
    await reached(lambda: len(engine.running) == 7)

    assert (await others[2]).status_code == 429, "half of four places are the share of one of two"
    assert (await tenants("a")).status_code == 429
    for task in (*flood, *others, third):
        task.cancel()


async def test_a_client_that_has_left_is_forgotten(tenants, engine):
    assert (await tenants("a")).status_code == 200
    engine.script = silent

    alone = [tenants("b") for _ in range(5)]
    await reached(lambda: len(engine.running) == 4)

    assert (await alone[4]).status_code == 429
    for task in alone:
        task.cancel()


async def test_bodies_of_one_client_leave_another_one_its_part_of_the_budget(admission):
    token = _current.set(CurrentRequest("", "a"))
    flood, more = admission.buffer(), admission.buffer()
    _current.set(CurrentRequest("", "b"))
    other, second = admission.buffer(), admission.buffer()
    _current.reset(token)
    flood.hold(FREE_BYTES + LIMIT)

    other.hold(FREE_BYTES + LIMIT // 2)

    for buffer in (more, second):
        with pytest.raises(OverloadedError):
            buffer.hold(FREE_BYTES + 1)


async def test_a_request_holds_no_place_while_its_grammar_is_compiled(tenants, engine, monkeypatch):
    may_end = asyncio.Event()

    async def check(*_):
        await may_end.wait()
        return Verdict(grammar="g")

    monkeypatch.setattr(GrammarCompiler, "check", check)
    engine.script = silent
    grammar = {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": {}}}}
    compiling = [tenants("a", grammar) for _ in range(4)]
    await asyncio.sleep(0.05)

    plain = [tenants("a") for _ in range(3)]
    await reached(lambda: len(engine.running) == 3)
    may_end.set()

    await reached(lambda: len(engine.running) == 4)
    await reached(lambda: sum(task.done() for task in compiling) == 3)
    assert {task.result().status_code for task in compiling if task.done()} == {429}
    for task in (*compiling, *plain):
        task.cancel()
