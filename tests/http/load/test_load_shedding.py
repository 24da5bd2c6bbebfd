"""Requests that would wait too long are refused, by what the engine reports and what was submitted since."""

import time

import msgspec
import pytest

from server.engine.core.messages import MAX_LISTED_ADAPTERS, EngineStats
from server.engine.core.queue.length_counts import MAX_LENGTH_CLASSES, length_class
from server.engine.link.protocol import EngineState
from server.errors import OverloadedError
from server.http.config import HTTPConfig
from server.http.load import load_shedding
from server.http.load.load_shedding import LoadShedding
from tests.http.fakes import INFO

OUTPUT = 50
"""Tokens that each sequence generates."""
BUSY = EngineStats(prompt_rate=1000.0, output_rate=4.0 * OUTPUT, num_free_places=400, num_running=1)


class Engine:
    def __init__(self, stats=BUSY):
        self.stats = stats
        self.state = EngineState.READY


def waiting(*lengths, **others):
    counts, tokens = [0] * MAX_LENGTH_CLASSES, [0] * MAX_LENGTH_CLASSES
    for length in lengths:
        counts[length_class(length)] += 1
        tokens[length_class(length)] += length
    fields = {
        "waiting_by_length": counts,
        "waiting_tokens_by_length": tokens,
        "waiting_output_by_length": [OUTPUT * count for count in counts],
    }
    return msgspec.structs.replace(BUSY, **fields | others)


def shedding(stats=BUSY, **limits):
    return LoadShedding(Engine(stats), HTTPConfig(model_id="m", **limits))


def expected_wait(shed, length):
    return shed._expected_wait(length, INFO, shed._update())


@pytest.fixture(autouse=True)
def no_spread(monkeypatch):
    monkeypatch.setattr(load_shedding.random, "random", lambda: 0.0)


def test_a_prompt_waits_for_the_whole_queue_or_for_twice_the_prompts_that_are_no_longer():
    shed = shedding(waiting(*[2000] * 10, *[100] * 8, num_prefill_tokens=1456))

    assert expected_wait(shed, 2000) == pytest.approx((20_000 + 800 + 1456 - 256) / 1000)
    assert expected_wait(shed, 100) == pytest.approx((1600 - 256) / 1000)
    assert expected_wait(shed, 10) == 0.0


def test_a_prompt_waits_for_sequences_to_end_if_places_are_short():
    shed = shedding(waiting(*[10] * 20, num_free_places=0))

    assert expected_wait(shed, 10) == pytest.approx(21 / 4)


def test_prompts_submitted_since_the_last_stats_count_until_the_engine_must_have_reported_them():
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m"))
    waits = []
    for _ in range(3):
        shed.admit([(1256, OUTPUT)], INFO)
        waits.append(expected_wait(shed, 1256))
    for _ in range(2):
        engine.stats = msgspec.structs.replace(BUSY)
        waits.append(expected_wait(shed, 1256))
        shed.admit([(16, OUTPUT)], INFO)

    assert waits == pytest.approx([1.0, 2.256, 3.512, 3.512, 0.0])


def test_an_idle_engine_that_reports_nothing_more_accepts_requests_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(load_shedding.time, "monotonic", lambda: now[0])
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m", max_queue_seconds=1.0))
    shed.admit([(1000, OUTPUT)], INFO)
    shed.admit([(1000, OUTPUT)], INFO)
    # All have ended, but these stats may have been sent before the requests came.
    engine.stats = msgspec.structs.replace(BUSY)

    with pytest.raises(OverloadedError):
        shed.admit([(1000, OUTPUT)], INFO)
    now[0] += 1.1

    shed.admit([(1000, OUTPUT)], INFO)


@pytest.mark.parametrize("change", [{"num_running": 0}, {"num_steps": 2}])
def test_what_newer_stats_must_include_does_not_count_twice(change):
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m", max_queue_seconds=1.0))
    for _ in range(100):
        shed.admit([(10, OUTPUT)], INFO)
    engine.stats = msgspec.structs.replace(BUSY, **change)

    shed.admit([(2000, OUTPUT)], INFO, deadline=time.monotonic() + 0.1)


def test_what_came_during_a_long_step_counts_until_the_next_one_has_ended():
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m", max_queue_seconds=10.0))
    for _ in range(10):
        shed.admit([(1000, OUTPUT)], INFO)
    engine.stats = msgspec.structs.replace(BUSY, num_steps=1)

    assert expected_wait(shed, 1000) == pytest.approx((10_000 - 256) / 1000)


def test_the_wait_for_places_depends_on_what_the_waiting_sequences_will_generate():
    short = waiting(*[10] * 20, num_free_places=0)
    output = [10 * count for count in short.waiting_output_by_length]
    long = msgspec.structs.replace(short, waiting_output_by_length=output)

    assert expected_wait(shedding(short), 10) == pytest.approx(21 / 4)
    assert expected_wait(shedding(long), 10) == pytest.approx(10 * 21 / 4)


def test_a_request_for_an_adapter_without_a_slot_waits_until_others_have_ended():
    stats = waiting(
        *[10] * 20, num_waiting_for_slots=20, running_adapters=["a", "b"], waiting_adapters=["b", "c"],
    )  # fmt: skip
    shed = shedding(stats, max_queue_seconds=2.0)

    for adapter in ("b", "c", "d"):
        with pytest.raises(OverloadedError, match="about 5 s, longer than 2 s"):
            shed.admit([(10, OUTPUT)], INFO, adapter=adapter)
    for adapter in (None, "a"):
        shed.admit([(10, OUTPUT)], INFO, adapter=adapter)


def test_an_adapter_is_not_refused_where_the_names_of_those_with_slots_are_not_known():
    names = [str(it) for it in range(MAX_LISTED_ADAPTERS)]
    stats = waiting(*[10] * 20, num_waiting_for_slots=20, running_adapters=names)
    shedding(stats, max_queue_seconds=2.0).admit([(10, OUTPUT)], INFO, adapter="other")


def test_a_request_that_would_wait_too_long_is_refused_until_the_queue_is_short_enough():
    engine = Engine(waiting(*[1000] * 24))
    shed = LoadShedding(engine, HTTPConfig(model_id="m", max_queue_seconds=10))

    with pytest.raises(OverloadedError, match="about 24 s, longer than 10 s") as caught:
        shed.admit([(1000, OUTPUT)], INFO)
    assert caught.value.retry_after == 14
    shed.admit([(16, OUTPUT)], INFO)  # short ones do not wait for long ones
    engine.stats = waiting(*[1000] * 9)
    shed.admit([(1000, OUTPUT)], INFO)


def test_nothing_is_refused_before_a_rate_was_measured_or_without_a_queue():
    unknown = msgspec.structs.replace(waiting(*[1000] * 100), prompt_rate=0.0, output_rate=0.0)
    shedding(unknown, max_queue_seconds=1).admit(
        [(1000, OUTPUT)], INFO, deadline=time.monotonic() + 1
    )
    slow = msgspec.structs.replace(BUSY, prompt_rate=0.5, output_rate=0.01)
    shedding(slow, max_queue_seconds=1, max_queued_tokens=100).admit([(5000, OUTPUT)], INFO)


def test_a_request_that_would_wait_beyond_its_deadline_is_refused_at_once():
    shed = shedding(waiting(*[1000] * 24))
    now = time.monotonic()

    with pytest.raises(OverloadedError, match="`timeout_ms`") as caught:
        shed.admit([(1000, OUTPUT)], INFO, deadline=now + 20)
    assert caught.value.retry_after in (4, 5)
    shed.admit([(1000, OUTPUT)], INFO, deadline=now + 30)


def test_the_queued_tokens_are_limited_but_a_request_alone_is_not():
    shed = shedding(waiting(1000, num_prefill_tokens=500), max_queued_tokens=4000)
    shed.admit([(2000, OUTPUT)], INFO)

    with pytest.raises(OverloadedError, match="3500 tokens of prompts are queued") as caught:
        shed.admit([(3000, OUTPUT)], INFO)

    assert caught.value.retry_after == 3
    shedding(max_queued_tokens=4000).admit([(5000, OUTPUT)], INFO)


@pytest.mark.parametrize(("waiting_tokens", "prefill"), [(1000, 0), (700, 300), (0, 1000)])
def test_the_limit_of_queued_tokens_includes_its_last_token(waiting_tokens, prefill):
    """The tokens that wait, those of running prompts, those submitted since, and those of the request."""
    stats = waiting(*[waiting_tokens] * bool(waiting_tokens), num_prefill_tokens=prefill)
    shed = shedding(stats, max_queued_tokens=4000, max_queue_seconds=600)
    shed.admit([(500, OUTPUT)], INFO)
    for lengths in ([2501], [2500, 1], [4000]):
        with pytest.raises(OverloadedError, match="1500 tokens of prompts are queued"):
            shed.admit([(length, OUTPUT) for length in lengths], INFO)

    shed.admit([(1250, OUTPUT), (1250, OUTPUT)], INFO)

    with pytest.raises(OverloadedError, match=r"4000 tokens .* with 1 more .* more than 4000"):
        shed.admit([(1, OUTPUT)], INFO)


def test_the_time_until_queued_tokens_suffice_is_that_of_the_excess_and_at_most_of_the_queue():
    shed = shedding(waiting(30_000), max_queued_tokens=40_000, max_queue_seconds=600)
    for wanted, seconds in ((15_000, 5), (39_000, 29), (100_000, 30)):
        with pytest.raises(OverloadedError) as caught:
            shed.admit([(wanted, OUTPUT)], INFO)
        assert caught.value.retry_after == seconds
    unknown = waiting(30_000, prompt_rate=0.0)
    with pytest.raises(OverloadedError) as caught:
        shedding(unknown, max_queued_tokens=30_000).admit([(1, OUTPUT)], INFO)
    assert caught.value.retry_after == 1


@pytest.mark.parametrize("seconds", [10, 10.5])
def test_a_wait_of_exactly_the_limit_is_accepted_and_a_longer_one_refused(seconds):
    """Ten seconds and a half, of a step that all prompts share and of 1000 tokens a second."""
    tokens = int(seconds * 1000) + INFO.max_num_batched_tokens
    shedding(waiting(tokens), max_queue_seconds=seconds).admit([(tokens, OUTPUT)], INFO)

    with pytest.raises(OverloadedError, match=f"longer than {seconds:g} s") as caught:
        shedding(waiting(tokens + 1), max_queue_seconds=seconds).admit([(tokens, OUTPUT)], INFO)

    assert caught.value.retry_after == 1


def test_a_wait_for_twice_the_shorter_prompts_of_exactly_the_limit_is_accepted():
    shorter = (10_000 + INFO.max_num_batched_tokens) // 2
    longer = [9000] * 10
    shedding(waiting(shorter, *longer), max_queue_seconds=10).admit([(8000, OUTPUT)], INFO)

    with pytest.raises(OverloadedError, match="longer than 10 s"):
        shedding(waiting(shorter + 1, *longer), max_queue_seconds=10).admit([(8000, OUTPUT)], INFO)


def test_a_deadline_at_the_end_of_the_wait_suffices_and_an_earlier_one_does_not(monkeypatch):
    monkeypatch.setattr(load_shedding.time, "monotonic", lambda: 100.0)
    shed = shedding(waiting(8000 + INFO.max_num_batched_tokens))

    with pytest.raises(OverloadedError, match=r"about 8\.0 s, longer than `timeout_ms`") as caught:
        shed.admit([(9000, OUTPUT)], INFO, deadline=104.5)
    assert caught.value.retry_after == 4
    shed.admit([(9000, OUTPUT)], INFO, deadline=108.0)


def test_a_deadline_that_has_passed_is_no_reason_to_refuse_without_a_queue(monkeypatch):
    """The engine ends such a request, with its own message."""
    monkeypatch.setattr(load_shedding.time, "monotonic", lambda: 100.0)
    shedding(waiting(INFO.max_num_batched_tokens)).admit([(9, OUTPUT)], INFO, deadline=99.0)


def test_a_prompt_waits_for_twice_those_of_its_class_of_lengths_and_of_smaller_ones():
    """Classes end at powers of two: 1023 is below 1024, which is with 2047."""
    shed = shedding(waiting(*[1023] * 4, *[1024] * 4, *[2047] * 4, *[2048] * 40))

    step = INFO.max_num_batched_tokens
    assert expected_wait(shed, 512) == pytest.approx((2 * 4 * 1023 - step) / 1000)
    assert expected_wait(shed, 1023) == pytest.approx((2 * 4 * 1023 - step) / 1000)
    for length in (1024, 2047):
        expected = 2 * 4 * (1023 + 1024 + 2047)
        assert expected_wait(shed, length) == pytest.approx((expected - step) / 1000)


def test_of_several_prompts_the_longest_decides_how_long_the_request_waits():
    stats = waiting(*[2000] * 20)
    shedding(stats, max_queue_seconds=10).admit([(9, OUTPUT), (800, OUTPUT)], INFO)
    for lengths in ([9, 1500], [1500, 9]):
        with pytest.raises(OverloadedError):
            shedding(stats, max_queue_seconds=10).admit([(n, OUTPUT) for n in lengths], INFO)


def test_places_that_are_free_need_no_sequence_to_end():
    for free, ends in ((0, 21), (1, 20), (20, 1), (21, 0), (22, 0)):
        shed = shedding(waiting(*[1] * 20, num_free_places=free))

        assert expected_wait(shed, 1) == pytest.approx(ends / 4)


@pytest.mark.parametrize(("elapsed", "num_steps", "counts"), [
    (1.0, 1, True), (1.01, 1, False), (0.0, 2, False), (0.0, 1, True),
])  # fmt: skip
def test_what_was_submitted_counts_for_a_second_or_until_two_steps_later(
    monkeypatch, elapsed, num_steps, counts
):
    now = [100.0]
    monkeypatch.setattr(load_shedding.time, "monotonic", lambda: now[0])
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m"))
    shed.admit([(2256, OUTPUT)], INFO)
    now[0] += 50.0
    engine.stats = msgspec.structs.replace(BUSY, num_steps=num_steps)
    assert expected_wait(shed, 4000) == (2.0 if num_steps == 1 else 0.0)
    now[0] += elapsed

    assert expected_wait(shed, 4000) == (2.0 if counts else 0.0)


def test_the_wait_after_the_limit_of_requests_follows_from_the_rate_at_which_sequences_end():
    full = waiting(*[10] * 8, num_free_places=0)

    assert shedding(full).retry_after() == 1
    assert shedding(full).retry_after(20) == 5
    assert shedding(EngineStats()).retry_after(20) == 1
    assert shedding(msgspec.structs.replace(full, output_rate=0.001)).retry_after(20) == 600


def test_clients_refused_at_one_moment_return_at_different_times(monkeypatch):
    values = iter([0.0, 0.5, 0.999])
    monkeypatch.setattr(load_shedding.random, "random", lambda: next(values))
    shed = shedding(waiting(10, output_rate=0.05 * OUTPUT))

    assert [shed.retry_after() for _ in range(3)] == [20, 25, 30]


@pytest.mark.parametrize(
    ("seconds", "share", "expected"),
    [
        (0.0, 0.999, 1),
        (0.2, 0.999, 1),
        (1.0, 0.999, 1),  # not spread: the header has whole seconds
        (1.01, 0.999, 2),
        (1.5, 0.0, 2),
        (1.5, 0.999, 3),
        (10.0, 0.999, 15),
        (399.0, 0.999, 599),
        (401.0, 0.999, 600),
        (1e9, 0.0, 600),
    ],
)
def test_the_time_to_try_again_is_spread_by_up_to_half_from_1_to_600_s(
    monkeypatch, seconds, share, expected
):
    monkeypatch.setattr(load_shedding.random, "random", lambda: share)
    rate = OUTPUT / seconds if seconds else 0.0

    assert shedding(waiting(10, output_rate=rate)).retry_after(1) == expected


@pytest.mark.anyio
async def test_a_refused_request_gets_429_with_retry_after_and_never_reaches_the_engine(
    open_client, engine
):
    client = await open_client(max_queue_seconds=10)
    engine.stats = waiting(*[100] * 300)

    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}
    admitted = await client.post("/generate", json=body)
    refused = await client.post("/generate", json=body | {"inputs": "x" * 100})

    assert admitted.status_code == 200
    assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "20"  # 300 * 100 tokens, less a step
    assert len(engine.requests) == 1


@pytest.mark.anyio
async def test_requests_share_the_engine_by_api_key_or_by_address(open_client, engine):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}
    keyed = await open_client(api_key=("one", "two"))
    for name, key in (("authorization", "Bearer one"), ("x-api-key", "two"), ("x-api-key", "one")):
        reply = await keyed.post("/generate", json=body, headers={name: key})
        assert reply.status_code == 200
    plain = await open_client()
    await plain.post("/generate", json=body)

    first, second, again, address = [request.client for request in engine.requests]
    assert first == again != second
    assert "one" not in first
    assert address == "127.0.0.1"


def test_requests_that_wait_for_a_restarting_engine_do_not_count_as_its_queue():
    engine = Engine()
    shed = LoadShedding(engine, HTTPConfig(model_id="m", max_queue_seconds=1.0))
    engine.state = EngineState.RESTARTING
    for _ in range(100):
        shed.admit([(2000, OUTPUT)], INFO)
    engine.state = EngineState.READY

    shed.admit([(2000, OUTPUT)], INFO)
