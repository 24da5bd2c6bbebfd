"""The clients of the measurement on Ray Serve: what they send, and how their streams count."""

import itertools

from benchmarks.ray_service.streams import Load, summary
from server.cli.bench.serve.metrics import RequestRecord
from tests.cli import fake_server as fake


def record(begun, ended, error=None, tokens=64):
    return RequestRecord(begun, 64, output_tokens=tokens, error=error, ended=ended)


def test_a_row_counts_failures_and_what_was_in_flight_when_something_was_killed():
    records = [
        record(0.0, 1.0),
        record(0.5, 2.5, "connection lost", 10),
        record(0.6, 2.25, "error event: generation", 3),
        record(1.9, 3.0),
        record(2.1, 2.2, "HTTP 500", 0),
        record(2.3, 4.0, tokens=63),
    ]

    assert summary(records, fault=2.0) == {
        "requests": 6,
        "failed": 4,
        "outcomes": {
            "complete": 2,
            "connection lost": 1,
            "error event: generation": 1,
            "HTTP 500": 1,
            "63 tokens": 1,
        },
        "failed_begun_after": 2,
        "in_flight": 3,
        "told_after_s": 2.0,
    }
    assert summary(records[:1]) == {"requests": 1, "failed": 0, "outcomes": {"complete": 1}}


def test_the_clients_send_as_many_streams_as_asked_each_on_its_own_connection():
    script = fake.chunked(*[fake.tgi_token()] * 63, fake.tgi_last(64))

    with fake.ThreadedServer({"/generate_stream": script}) as server:
        load = Load(server.port, 2, 5)
        load.start()
        outcomes = summary(load.join())

    assert outcomes == {"requests": 5, "failed": 0, "outcomes": {"complete": 5}}
    assert server.connections == 5
    assert b'"ignore_eos": true' in server.requests[0][2]


def test_a_load_without_a_number_ends_when_it_is_stopped():
    numbers = itertools.count()

    def script(_):
        if next(numbers) == 3:
            load.stop()
        return fake.chunked(fake.tgi_last(64))

    with fake.ThreadedServer({"/generate_stream": script}) as server:
        load = Load(server.port, 1)
        load.start()
        records = load.join()

    assert len(records) == 4
    assert load.ended == 3  # the last one has no successor
