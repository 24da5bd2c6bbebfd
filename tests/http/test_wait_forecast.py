"""Who is refused and who waits how long, with the real scheduler on a clock that its steps advance."""

import random
import types

import msgspec
import pytest

from server.engine.core.reports import StatsReporter
from server.engine.link.protocol import EngineState
from server.errors import OverloadedError
from server.http.config import HTTPConfig
from server.http.load import load_shedding
from server.http.load.load_shedding import LoadShedding
from tests.engine.core.bookkeeping import Token, commit, make_scheduler, make_sequence
from tests.http.fakes import INFO

END, OTHER = 9, 7
NO_LIMIT = 40_000
PLACES, BUDGET = 64, 2048
STEP_SECONDS, TOKEN_SECONDS = 0.02, 5e-5
MAX_WAIT = 60.0


class Service:
    """A scheduler whose steps take 20 ms and 50 us for each token, and what refuses requests before it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(load_shedding, "time", clock)
        self._scheduler = make_scheduler(
            10**6, 16, PLACES, BUDGET, 50_000, enable_prefix_caching=False
        )
        self._reporter = StatsReporter(self._scheduler, (), 0)
        self._engine = types.SimpleNamespace(state=EngineState.READY, stats=self._reporter.read())
        self._shedding = LoadShedding(
            self._engine, HTTPConfig(model_id="m", max_queue_seconds=MAX_WAIT)
        )
        self._info = msgspec.structs.replace(
            INFO, max_num_batched_tokens=BUDGET, max_num_seqs=PLACES
        )
        self._lengths, self._submitted = [], []
        self.waits, self.num_refused = [], 0

    def send(self, limit, num_tokens):
        """Send a request that stops after `num_tokens`."""
        try:
            self._shedding.admit([(50, limit)], self._info)
        except OverloadedError:
            self.num_refused += 1
            return
        sequence = make_sequence(len(self._lengths), 50, limit, stop_token_ids=(END,))
        self._lengths.append(num_tokens)
        self._submitted.append(self.now)
        self._scheduler.add(sequence)

    def run(self, seconds=float("inf"), arrivals=()):
        """Compute for some time, or until nothing is left; `arrivals` are seconds from now and arguments of `send`."""
        arrivals, began = list(arrivals), self.now
        while self.now < began + seconds and (self._scheduler.has_work or arrivals):
            while arrivals and began + arrivals[0][0] <= self.now:
                self.send(*arrivals.pop(0)[1:])
            if self._scheduler.has_work:
                self._step()
            else:
                self.now = began + arrivals[0][0]

    def _step(self):
        output = self._scheduler.schedule()
        self._scheduler.start(output)
        self.waits += [self.now - self._submitted[s.request_id] for s in output.first_scheduled]
        seconds = STEP_SECONDS + TOKEN_SECONDS * output.num_tokens
        self.now += seconds
        rows = (*output.decode, *output.prefill)
        commit(self._scheduler, output, [self._tokens(row) for row in rows], seconds)
        self._engine.stats = self._reporter.read()

    def _tokens(self, row):
        is_last = row.sequence.num_output_tokens + 1 >= self._lengths[row.sequence.request_id]
        return [Token(END if is_last else OTHER)] if row.num_logits else []

    def count(self):
        """Return the refused requests and the longest wait since the last call."""
        found = self.num_refused, max(self.waits, default=0.0)
        self.num_refused, self.waits = 0, []
        return found


@pytest.fixture
def service(monkeypatch):
    return Service(monkeypatch)


def burst(service, number, *lengths):
    for _ in range(number):
        service.send(*lengths)
    service.run()
    service.now += 20.0
    return service.count()


def test_short_requests_after_long_ones_are_not_refused(service):
    burst(service, 124, 1900, 1900)

    for _ in range(3):
        assert burst(service, 500, 8, 8)[0] == 0


def test_chats_without_a_limit_are_not_taken_for_as_long_as_the_context(service):
    burst(service, 300, 200, 200)

    for _ in range(2):
        refused, wait = burst(service, 200, NO_LIMIT, 200)
        assert refused == 0
        assert wait < MAX_WAIT / 2


def test_long_requests_after_short_ones_wait_no_longer_than_the_limit_and_one_of_them(service):
    burst(service, 1000, 8, 8)
    burst(service, PLACES, 1500, 1500)
    for i in range(200):
        service.send(1500, 1500)
        service.run(0.1 if i < 199 else float("inf"))
    refused, wait = service.count()

    assert refused > 20  # 64 run, and 104 of 1500 tokens are generated in a minute
    assert wait <= MAX_WAIT + 1500 * 0.025


def test_under_overload_the_longest_wait_is_the_limit(service):
    rng = random.Random(1)
    burst(service, 200, 200, 200)
    seconds = 0.0
    arrivals = []
    while seconds < 240.0:
        seconds += rng.expovariate(30.0)
        arrivals.append((seconds, NO_LIMIT, rng.randint(100, 300)))
    service.run(120.0, [it for it in arrivals if it[0] < 120.0])
    service.count()
    service.run(120.0, [(it[0] - 120.0, *it[1:]) for it in arrivals if it[0] >= 120.0])
    refused, wait = service.count()

    assert refused > 0.3 * 30 * 120
    assert 0.8 * MAX_WAIT < wait < 1.1 * MAX_WAIT
