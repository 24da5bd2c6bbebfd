"""The client with a scripted server: times, counts and failures."""

import asyncio
import itertools
import time

import pytest

from server.cli.bench.serve import load
from server.cli.bench.serve.apis import APIS, Options
from server.cli.bench.serve.load import Job, LoadGenerator, Share, _Answer, run_here, run_processes
from server.cli.client.http_client import Client, RequestError, Target
from tests.cli import fake_server as fake


def job(api="tgi", tokens=3, arrival=None):
    return Job(APIS[api]().body("hello", tokens, Options("m")), tokens, 9, arrival)


SHORT_SECONDS = 0.3


def send(script, api="tgi", timeout=5.0, **fields):
    """Send one request to a server with this script; return its record and the server."""

    async def run():
        async with fake.FakeServer({APIS[api].path: script}) as server:
            generator = LoadGenerator(Target.from_url(server.url), APIS[api](), timeout)
            try:
                return await generator.send(job(api, **fields)), server
            finally:
                generator.close()

    return asyncio.run(run())


def test_a_tgi_stream_is_timed_token_by_token():
    script = fake.chunked(0.05, fake.tgi_token(), 0.1, fake.tgi_token(), 0.02, fake.tgi_last(3))
    begin = time.perf_counter()
    record, _ = send(script)
    took = time.perf_counter() - begin

    assert record.error is None
    # A pause may be longer on a busy machine; it is shorter only by the clock's rounding.
    waits = [record.ttft, *(after - before for before, after in itertools.pairwise(record.times))]
    assert all(wait > least - 0.005 for wait, least in zip(waits, (0.05, 0.1, 0.02), strict=True))
    assert sum(waits) < took
    assert (record.output_tokens, record.prompt_tokens, record.counted) == (3, 3, True)


def test_the_tokens_of_an_openai_stream_are_counted_by_its_usage():
    script = fake.chunked(
        fake.openai_token(), fake.openai_token("", "length"), fake.openai_usage(5), fake.DONE
    )
    record, server = send(script, "openai")

    assert record.error is None
    assert len(record.times) == 1  # the event with only a finish reason has no token
    assert (record.output_tokens, record.prompt_tokens, record.counted) == (5, 3, True)
    assert b'"ignore_eos":true' in server.requests[0][2]
    assert b'"repetition_penalty":1.0' in server.requests[0][2]
    assert b'"include_usage":true' in server.requests[0][2]


def test_without_usage_the_events_are_counted_and_the_record_says_so():
    record, _ = send(fake.chunked(fake.openai_token(), fake.openai_token(), fake.DONE), "openai")

    assert (record.output_tokens, record.prompt_tokens, record.counted) == (2, 9, False)


def test_the_times_of_events_are_those_of_the_pieces_that_complete_them():
    answer = _Answer(APIS["tgi"]())
    whole, last = fake.tgi_token() + fake.tgi_token(), fake.tgi_last(3)
    answer.take(200, whole[:10], 1.0)
    answer.take(200, whole[10:], 2.0)
    answer.take(200, last, 3.5)

    assert answer.times == [2.0, 2.0, 3.5]
    assert answer.reads == 2
    assert answer.problem(200) == (None, "")


@pytest.mark.parametrize(
    ("script", "error", "detail"),
    [
        (fake.plain({"error": "busy"}, "429 Too Many Requests"), "HTTP 429", "busy"),
        (fake.plain(b"", "503 Service Unavailable"), "HTTP 503", ""),
        (
            fake.chunked(fake.tgi_token(), b'data:{"error":"broke","error_type":"incomplete"}\n\n'),
            "error event: incomplete",
            "broke",
        ),
        (fake.chunked(fake.tgi_token()), "stream ended early", ""),
        (fake.chunked(b"data:{nonsense\n\n"), "unreadable event", "nonsense"),
        (fake.chunked(fake.tgi_token(), fake.HANG_UP), "connection lost", ""),
        ([fake.HANG_UP], "connection lost", ""),
        ([b"SSH-2.0-hello\r\n\r\n"], "not HTTP", ""),
        (fake.chunked(fake.tgi_token(), 60.0), "timeout", "after 0.3 s"),
        (fake.plain(b""), "stream ended early", ""),
    ],
)
def test_every_failure_has_a_category(script, error, detail):
    record, _ = send(script, timeout=SHORT_SECONDS)

    assert record.error == error
    assert detail in record.detail


def test_a_refusal_says_when_to_try_again():
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n"
    record, _ = send([refusal])

    assert (record.error, record.retry_after) == ("HTTP 429", 3)
    assert record.ended > record.started
    assert send(fake.plain(b"", "503 Service Unavailable"))[0].retry_after is None


def test_the_end_of_a_failed_request_is_recorded():
    record, _ = send(fake.chunked(fake.tgi_token(), 0.05, fake.HANG_UP))

    assert record.ended > record.times[0] + 0.04


def test_an_absent_server_is_a_failure():
    async def run():
        generator = LoadGenerator(Target("127.0.0.1", 9), APIS["tgi"](), 5.0)
        return await generator.send(job())

    assert asyncio.run(run()).error == "cannot connect"


def test_a_body_that_ends_with_the_connection_is_complete():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    record, _ = send([head, fake.tgi_token(), fake.tgi_last(2), fake.HANG_UP])

    assert record.error is None
    assert record.output_tokens == 2


def test_connections_are_reused_and_closed_ones_are_replaced():
    script = fake.chunked(fake.tgi_last(1))

    async def run():
        async with fake.FakeServer({"/generate_stream": lambda _: next(scripts)}) as server:
            generator = LoadGenerator(Target.from_url(server.url), APIS["tgi"](), 5.0)
            records = [await generator.send(job()) for _ in range(2)]
            assert server.connections == 1
            records.append(await generator.send(job()))
            generator.close()
            return [record.error for record in records], server.connections

    scripts = iter([script, script, [fake.HANG_UP], script])

    assert asyncio.run(run()) == ([None] * 3, 2)


def test_a_number_of_streams_is_kept_and_never_exceeded():
    script = fake.chunked(fake.tgi_token(), 0.01, fake.tgi_last(2))

    async def run():
        async with fake.FakeServer({"/generate_stream": script}) as server:
            generator = LoadGenerator(Target.from_url(server.url), APIS["tgi"](), 5.0)
            records = await generator.keep_streams([job() for _ in range(20)], 4)
            generator.close()
            return records, server

    records, server = asyncio.run(run())

    assert [record.error for record in records] == [None] * 20
    assert server.most_in_flight == server.connections == 4


def test_arrivals_are_kept_while_earlier_requests_are_in_flight():
    script = fake.chunked(0.2, fake.tgi_last(1))

    async def run():
        async with fake.FakeServer({"/generate_stream": script}) as server:
            generator = LoadGenerator(Target.from_url(server.url), APIS["tgi"](), 5.0)
            begin = time.perf_counter() + 0.05
            jobs = [job(arrival=0.03 * i) for i in range(4)]
            records = await generator.keep_times(jobs, begin)
            generator.close()
            return begin, records, server.most_in_flight

    begin, records, most = asyncio.run(run())

    assert most == 4
    for i, record in enumerate(records):
        assert record.started == pytest.approx(begin + 0.03 * i, abs=0.05)
        assert record.lag == pytest.approx(record.started - begin - 0.03 * i)


def _share(server):
    return Share(server.url, [("X-Key", "1")], "tgi", [job() for _ in range(6)], [job()], 2, 5.0)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_warm_up_comes_first_and_is_not_counted(processes):
    script = fake.chunked(fake.tgi_token(), fake.tgi_last(2))
    seen = []

    def when_warm(records):
        seen.append(len(records))
        return time.perf_counter()

    async def run():
        async with fake.FakeServer({"/generate_stream": script}) as server:
            shares = [_share(server) for _ in range(processes)]
            if processes == 1:
                return await asyncio.to_thread(run_here, shares[0], when_warm), server
            return await asyncio.to_thread(run_processes, shares, when_warm), server

    outcomes, server = asyncio.run(run())

    assert seen == [processes]
    assert [len(outcome.records) for outcome in outcomes] == [6] * processes
    assert len(server.requests) == 7 * processes
    assert all(headers["x-key"] == "1" for _, headers, _ in server.requests)
    assert all(record.error is None for outcome in outcomes for record in outcome.records)
    assert all(outcome.busy > 0 for outcome in outcomes)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_requests_that_have_ended_are_counted_while_a_run_goes_on(monkeypatch, processes):
    monkeypatch.setattr(load, "_POLL_SECONDS", 0.005)
    script = fake.chunked(fake.tgi_token(), 0.05, fake.tgi_last(2))
    counts = []

    async def run():
        async with fake.FakeServer({"/generate_stream": script}) as server:
            shares = [_share(server) for _ in range(processes)]
            begin = lambda _: time.perf_counter()  # noqa: E731 - replaces a function
            if processes == 1:
                await asyncio.to_thread(run_here, shares[0], begin, counts.append)
            else:
                await asyncio.to_thread(run_processes, shares, begin, counts.append)

    asyncio.run(run())

    assert 0 < max(counts) <= 6 * processes


def test_a_cancelled_run_leaves_no_process():
    def when_warm(_):
        raise RuntimeError("off")

    async def run():
        async with fake.FakeServer({"/generate_stream": fake.chunked(fake.tgi_last(1))}) as server:
            await asyncio.to_thread(run_processes, [_share(server)], when_warm)

    with pytest.raises(RuntimeError, match="off"):
        asyncio.run(run())


def test_a_client_reads_replies_without_a_stream():
    async def run():
        async with fake.FakeServer({"/base/info": fake.plain({"a": 1})}) as server:
            client = Client(Target.from_url(server.url + "/base/"))
            response = await client.request("GET", "/info")
            client.close()
            return response

    response = asyncio.run(run())

    assert (response.status, response.body) == (200, b'{"a": 1}')


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ValueError, match=r"address|[Pp]ort"):
        Target.from_url(url)


def test_the_repr_of_a_target_hides_its_headers():
    assert "secret" not in repr(Target.from_url("http://x", (("Authorization", "secret"),)))


def test_an_error_message_has_its_category_and_detail():
    assert str(RequestError("cannot connect", "refused")) == "cannot connect: refused"
