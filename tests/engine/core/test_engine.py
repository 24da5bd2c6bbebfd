"""Deadlines in the engine's loop: a clock that the test sets, an arithmetic model and a channel of lists."""

import concurrent.futures
import itertools

import msgspec
import pytest

from server.engine.core import engine as engine_module
from server.engine.core.messages import AbortRequests, EngineConfig, newest_stats
from server.engine.core.queue.length_counts import LengthCounts, length_class
from server.engine.core.request import AdapterRef, FinishReason, GenerateRequest
from tests.engine.core.bookkeeping import make_request
from tests.engine.link.fake_engine import ArithmeticRunner, make_engine


class Channel:
    def __init__(self):
        self.incoming = []
        self.events = []
        self.stats = []
        self.steps = []

    def send(self, message):
        self.stats.append(message.stats)
        self.steps.append(message)
        self.events += [(i, message.event(n)) for n, i in enumerate(message.request_ids)]

    def receive(self, *, wait):
        messages, self.incoming = self.incoming, []
        return messages


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Harness:
    def __init__(self, monkeypatch, **config):
        self.clock, self.channel = Clock(), Channel()
        monkeypatch.setattr(engine_module, "time", self.clock)
        config = EngineConfig(model_path="ok", model_id="test", **config)
        self.engine = make_engine(config, self.channel)
        self.computed = set()
        launch = ArithmeticRunner.launch

        def record(runner, output):
            self.computed |= {r.sequence.request_id for r in (*output.decode, *output.prefill)}
            return launch(runner, output)

        monkeypatch.setattr(ArithmeticRunner, "launch", record)

    def submit(self, request_id, *, deadline, max_new_tokens=8, grammar=None, adapter=None):
        made = make_request(request_id, 5, max_new_tokens)
        self.channel.incoming.append(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=made.prompt_token_ids,
                sampling=msgspec.structs.replace(made.sampling, grammar=grammar),
                deadline=deadline,
                adapter=adapter,
            )
        )

    def step(self, count=1):
        for _ in range(count):
            self.engine.receive(wait=0)
            self.engine.step()

    def events_of(self, request_id):
        return [event for i, event in self.channel.events if i == request_id]


@pytest.fixture
def harness(monkeypatch):
    return Harness(monkeypatch, max_num_seqs=1)


def test_a_request_whose_deadline_passes_in_the_queue_is_never_computed(harness):
    harness.submit(1, deadline=None)
    harness.submit(2, deadline=100.5)
    harness.step(2)
    harness.clock.now = 100.5
    harness.step(20)

    (end,) = harness.events_of(2)
    assert (end.token_id, end.finish_reason) == (None, FinishReason.TIMEOUT)
    assert harness.computed == {1}
    assert len(harness.events_of(1)) == 8
    assert not harness.engine.has_work


def test_a_request_that_arrives_after_its_deadline_is_never_computed(harness):
    harness.submit(1, deadline=99.0)
    harness.step()

    assert [e.finish_reason for e in harness.events_of(1)] == [FinishReason.TIMEOUT]
    assert not harness.computed


def test_a_running_request_ends_with_the_first_token_after_its_deadline(harness):
    harness.submit(1, deadline=101.0)
    harness.step(3)
    harness.clock.now = 101.0
    harness.step(5)

    events = harness.events_of(1)
    assert [e.finish_reason for e in events] == [None, None, None, FinishReason.TIMEOUT]
    assert events[-1].token_id is not None
    blocks = harness.engine._scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks


def test_a_request_that_ends_in_time_is_not_affected(harness):
    harness.submit(1, deadline=101.0, max_new_tokens=3)
    harness.step(3)
    harness.clock.now = 102.0
    harness.submit(2, deadline=None, max_new_tokens=2)
    harness.step(3)

    assert [e.finish_reason for e in harness.events_of(1)][-1] is FinishReason.LENGTH
    assert len(harness.events_of(2)) == 2
    assert not harness.engine._deadlines


def test_deadlines_pass_in_any_order_of_arrival(harness):
    for request_id, deadline in ((1, None), (2, 103.0), (3, 101.0), (4, 102.0)):
        harness.submit(request_id, deadline=deadline, max_new_tokens=50)
    expired = []
    for now in (100.9, 101.0, 102.0, 103.0):
        harness.clock.now = now
        harness.step()
        expired.append([i for i, e in harness.channel.events if e.finish_reason])

    assert expired == [[], [3], [3, 4], [3, 4, 2]]


def test_a_request_that_cannot_meet_its_deadline_ends_before_it_and_is_never_computed(harness):
    harness.engine._scheduler.accounting.least_price = 0.1
    harness.submit(1, deadline=100.4)
    harness.submit(2, deadline=100.6)
    harness.step()

    (end,) = harness.events_of(1)
    assert (end.token_id, end.finish_reason) == (None, FinishReason.TIMEOUT)
    assert harness.computed == {2}
    assert 1 not in harness.engine._deadlines


def test_the_stats_say_what_waits_and_how_fast_it_goes(harness):
    for request_id in (1, 2, 3):
        harness.submit(request_id, deadline=None)
    harness.step()
    stats = harness.engine.stats()

    assert (stats.num_waiting, stats.num_free_places) == (2, 0)
    assert (sum(stats.waiting_by_length), sum(stats.waiting_tokens_by_length)) == (2, 10)
    assert sum(stats.waiting_output_by_length) == 2 * 8
    for _ in range(40):
        harness.clock.now += 0.5
        harness.step()
    stats = harness.engine.stats()
    assert (stats.num_free_places, stats.waiting_by_length) == (1, [])


class PoolOfWaiting:
    """Adapters of which none ever gets a slot."""

    running = waiting = ()
    num_reads = num_writes = num_evictions = 0
    is_full = True

    def __init__(self):
        self.by_length, self._waiting = LengthCounts.zeros(), []

    def __len__(self):
        return len(self._waiting)

    def add(self, sequence):
        self._waiting.append(sequence)
        self.by_length.add(sequence)
        return False

    def take(self, *, wait):
        return []

    def return_queued(self, withdraw):
        pass


def test_what_waits_for_an_adapter_counts_as_what_waits_for_a_place(harness):
    harness.engine._adapters = harness.engine._stats._adapters = PoolOfWaiting()
    for number in range(1, 4):
        harness.submit(number, deadline=None)
    harness.submit(4, deadline=None, max_new_tokens=300, adapter=AdapterRef("a", "/a", "digest"))
    harness.step()

    stats, at = harness.engine.stats(), length_class(5)
    assert stats.num_waiting == 3
    assert stats.num_waiting_for_slots == 1
    assert stats.waiting_by_length[at] == 3
    assert stats.waiting_tokens_by_length[at] == 15
    assert stats.waiting_output_by_length[at] == 8 + 8 + 256, "an estimate, not the limit"


def test_the_rate_of_output_is_measured_while_sequences_wait_for_a_slot(harness):
    harness.engine._adapters = harness.engine._stats._adapters = PoolOfWaiting()
    ticks = itertools.count(100.0, 0.25)
    harness.clock.monotonic = lambda: next(ticks)
    harness.submit(1, deadline=None, max_new_tokens=40)
    harness.step(10)
    assert harness.engine.stats().output_rate == 0.0
    harness.submit(2, deadline=None, adapter=AdapterRef("a", "/a", "digest"))
    harness.step(10)
    assert harness.engine.stats().output_rate > 0.0


def test_stats_are_sent_when_sequences_start_or_end_and_every_two_milliseconds(harness):
    harness.submit(1, deadline=None)
    harness.step(4)
    harness.clock.now += 0.003
    harness.step(4)

    sent = harness.channel.stats
    assert [stats is not None for stats in sent] == [True, *[False] * 3, True, *[False] * 2, True]
    assert (sent[0].num_running, sent[4].generation_tokens) == (1, 5)
    assert (sent[-1].num_running, sent[-1].generation_tokens) == (0, 8)
    assert newest_stats(harness.channel.steps[:-1]) == sent[4]


def test_an_abort_sends_stats(harness):
    harness.submit(1, deadline=None)
    harness.step(2)
    harness.channel.incoming.append(AbortRequests([1]))
    harness.engine.receive(wait=0)

    assert harness.channel.stats[-1].num_running == 0


def test_a_deadline_passes_also_while_the_grammar_is_compiled(harness, monkeypatch):
    compiling = concurrent.futures.Future()
    monkeypatch.setattr(harness.engine._compiling, "_compile", lambda _grammar: compiling)
    harness.submit(1, deadline=100.5, grammar="a grammar")
    harness.step(2)
    assert harness.events_of(1) == []

    harness.clock.now = 101.0
    harness.step()

    (event,) = harness.events_of(1)
    assert event.finish_reason is FinishReason.TIMEOUT
    assert not harness.engine.has_work
    assert not harness.engine._deadlines
