"""How device time, steps and blocks are charged; `test_bookkeeping_machines` has the general case."""

import math
from types import SimpleNamespace

import msgspec
import pytest

from server.engine.core import engine as engine_module
from server.engine.core.accounting import Accounting, SequenceAccount
from server.engine.core.engine import Engine
from server.engine.core.messages import (
    AbortRequests,
    EngineStats,
    EngineTotals,
    add_counters,
    encode_totals,
)
from server.engine.core.request import FinishReason
from server.engine.core.sequence import Sequence
from tests.engine.core.bookkeeping import (
    Token,
    begin,
    commit,
    make_request,
    make_scheduler,
    make_sequence,
    sampled_rows,
)
from tests.plans import PLAN

INFO = SimpleNamespace(vocab_size=1_000_000, plan=PLAN, engine=0)


def end(scheduler, output, seconds, token_id=7):
    rows = (*output.decode, *output.prefill)
    return commit(scheduler, output, [[Token(token_id)] * row.num_logits for row in rows], seconds)


def test_a_step_is_shared_by_scheduled_tokens():
    scheduler = make_scheduler(16)
    short, long = make_sequence(0, 1, 1), make_sequence(1, 3, 1)
    scheduler.add(short)
    scheduler.add(long)

    end(scheduler, begin(scheduler), 8.0)

    assert short.usage.device_seconds == 2.0
    assert long.usage.device_seconds == 6.0
    assert (short.usage.num_steps, long.usage.num_computed_prompt_tokens) == (1, 3)


def test_blocks_are_charged_while_they_are_held():
    scheduler = make_scheduler(16, block_size=4)
    sequence = make_sequence(0, 3, 3)
    scheduler.add(sequence)
    for now in (10.0, 12.0, 15.0):  # the second block comes with the last step
        scheduler.accounting.now = now
        output = begin(scheduler)
        scheduler.accounting.now = now + 1.0
        end(scheduler, output, 1.0)

    assert sequence.usage.block_seconds == (16.0 - 10.0) + (16.0 - 15.0)
    assert sequence.usage.prefill_seconds == 1.0
    assert sequence.usage.decode_seconds == 5.0
    assert scheduler.accounting.block_seconds == sequence.usage.block_seconds


def test_cached_and_recomputed_tokens_are_told_apart():
    scheduler = make_scheduler(6, block_size=4, enable_prefix_caching=True)
    first = make_sequence(0, list(range(8)), 1)
    scheduler.add(first)
    end(scheduler, begin(scheduler), 1.0)
    second = make_sequence(1, list(range(8)), 1)
    scheduler.add(second)
    end(scheduler, begin(scheduler), 1.0)

    assert (first.usage.num_cached_prompt_tokens, first.usage.num_computed_prompt_tokens) == (0, 8)
    assert (second.usage.num_cached_prompt_tokens, second.usage.num_computed_prompt_tokens) == (
        4,
        4,
    )


def run(scheduler, count):
    for _ in range(count):
        end(scheduler, begin(scheduler), 1.0)


def tokens_of(usage):
    """Return the cached and the computed prompt tokens, and the recomputed tokens."""
    return (
        usage.num_cached_prompt_tokens,
        usage.num_computed_prompt_tokens,
        usage.num_recomputed_tokens,
    )


def test_tokens_computed_again_after_a_preemption_are_recomputed_and_nothing_else_is():
    scheduler = make_scheduler(16, block_size=4, enable_prefix_caching=False)
    sequence = make_sequence(0, 6, 5)
    scheduler.add(sequence)
    run(scheduler, 3)  # 6 tokens of the prompt and 2 of the output
    scheduler._live.preempt(scheduler._live.running[-1])
    run(scheduler, 2)  # these 8 again, and the last 2

    assert tokens_of(sequence.usage) == (0, 6, 8)
    assert sequence.usage.num_steps == 5
    assert scheduler.accounting.num_computed_tokens == 8 + 9 + 1
    assert scheduler.accounting.num_recomputed_tokens == 8
    assert scheduler.accounting.num_computed_prompt_tokens == 6


def test_tokens_that_a_preempted_sequence_finds_again_count_neither_as_cached_nor_as_recomputed():
    scheduler = make_scheduler(16, block_size=4)
    sequence = make_sequence(0, 6, 8)
    scheduler.add(sequence)
    run(scheduler, 4)  # 9 tokens computed, 8 of them in full blocks
    scheduler._live.preempt(scheduler._live.running[-1])
    run(scheduler, 4)

    assert sequence.num_cached_tokens == 0
    assert tokens_of(sequence.usage) == (0, 6, 1)


def test_cached_tokens_are_counted_once_however_often_a_sequence_is_preempted():
    scheduler = make_scheduler(32, block_size=4)
    scheduler.add(make_sequence(0, range(50, 58), 1))
    run(scheduler, 1)
    sequence = make_sequence(1, [*range(50, 58), 1, 2, 3], 6)
    scheduler.add(sequence)
    for _ in range(3):
        run(scheduler, 1)
        scheduler._live.preempt(scheduler._live.running[-1])
    run(scheduler, 3)

    assert sequence.num_cached_tokens == 8
    # After the second step the third block is full. Computed again: tokens 8 to 11, and token 12.
    assert tokens_of(sequence.usage) == (8, 3, 3 + 1)
    assert sequence.usage.num_steps == 6


def test_tokens_that_others_cached_during_a_preemption_are_cached_ones():
    """Those of the prompt only where they belong to the prompt; those that the sequence had computed do not count."""
    accounting, account = Accounting(), SequenceAccount(12)
    for num_found, num_computed in ((0, 4), (8, 10), (12, 14), (20, 21), (16, 20)):
        accounting.admit(account, 5, num_found)
        account.charge(num_computed - num_found, 1.0, 1)
        accounting.leave(account, 5, num_computed)

    usage = accounting.end(account, FinishReason.LENGTH, num_tokens_in_flight=0, has_output=True)

    # Found and not computed before: 4 to 7, 10 to 13 less 12 and 13, and 14 to 19. First computed: 0 to 3, 8 and 9, 12
    # and 13, and 20. Again: 16 to 19.
    assert tokens_of(usage) == (4 + 2, 4 + 2, 4)
    assert (account.num_cached_tokens, account.num_first_tokens) == (4 + 2 + 6, 21)


def test_the_time_before_the_first_token_is_prefill_and_the_rest_decode():
    accounting, account = Accounting(), SequenceAccount(3)
    accounting.now = 5.0
    accounting.admit(account, 1, 0)
    accounting.leave(account, 1, 0)
    accounting.now = 6.0
    accounting.admit(account, 1, 0)  # again after a preemption: the first time counts
    account.first_token_at = 8.0
    accounting.now = 12.0
    accounting.leave(account, 1, 3)

    usage = accounting.end(account, FinishReason.EOS, num_tokens_in_flight=2, has_output=True)

    assert (usage.prefill_seconds, usage.decode_seconds, usage.num_steps) == (3.0, 4.0, 2)
    assert usage.block_seconds == 0.0 + 6.0

    waited = SequenceAccount(3)
    accounting.admit(waited, 1, 0)
    accounting.now = 14.0
    accounting.leave(waited, 1, 0)
    usage = accounting.end(waited, FinishReason.ABORT, num_tokens_in_flight=0, has_output=False)
    assert (usage.prefill_seconds, usage.decode_seconds) == (2.0, 0.0)


def test_a_sequence_that_ends_while_a_step_is_in_flight_reports_an_estimate_for_it():
    scheduler = make_scheduler(16)
    sequence = make_sequence(0, 1, 9, eos_token_ids=(7,))
    scheduler.add(sequence)
    first = begin(scheduler)
    second = begin(scheduler)

    end(scheduler, first, 2.0)
    assert sequence.usage.device_seconds == 4.0
    assert sequence.usage.num_steps == 2
    end(scheduler, second, 3.0)

    assert scheduler.accounting.ended_device_seconds[FinishReason.EOS - 1] == 5.0
    assert scheduler.accounting.device_seconds == 5.0


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT])
def test_the_totals_of_an_ended_sequence_are_those_of_its_reason(reason):
    scheduler = make_scheduler(16)
    scheduler.add(make_sequence(0, 3, 9))
    end(scheduler, begin(scheduler), 2.0)

    scheduler.abort(0, reason)

    assert scheduler.accounting.num_ended[reason - 1] == 1
    assert scheduler.accounting.ended_device_seconds[reason - 1] == 2.0
    assert sum(scheduler.accounting.ended_device_seconds) == 2.0


class Channel:
    def __init__(self, *messages):
        self.inbox = list(messages)
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self, *, wait):
        inbox, self.inbox = self.inbox, []
        return inbox


class Device:
    """Computes each step in one second, after the steps before; launching takes no time."""

    def __init__(self, clock):
        self.clock = clock
        self.free_at = 0.0

    def launch(self, output):
        self.free_at = done = max(self.free_at, self.clock.now) + 1.0
        sampled = [[Token(3)] * row.num_logits for row in (*output.decode, *output.prefill)]

        def result():
            self.clock.now = max(self.clock.now, done)
            return SimpleNamespace(sampled=sampled_rows(output, sampled), prompt_logprobs={})

        return SimpleNamespace(feeds_next=True, sample=lambda: None, result=result)

    def forget(self, request_id):
        pass

    def compile_grammar(self, sampling):
        raise NotImplementedError


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(engine_module, "time", clock)
    return clock


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_overlapping_steps_are_not_charged_twice(clock, runs_ahead):
    channel = Channel(make_request(1, 3, 5), make_request(2, 3, 5))
    engine = Engine(make_scheduler(16), Device(clock), channel, INFO, runs_ahead=runs_ahead)
    engine.receive(wait=math.inf)
    while engine.has_work:
        engine.step()

    usages = [usage for message in channel.sent for usage in message.usage.values()]
    stats = channel.sent[-1].stats
    assert len(usages) == 2
    assert stats.prefill_seconds + stats.decode_seconds == 5.0
    assert sum(usage.device_seconds for usage in usages) == pytest.approx(5.0)
    totals = stats.decode_totals()
    assert sum(totals.device_seconds) == pytest.approx(5.0)
    assert totals.num_ended[FinishReason.LENGTH - 1] == 2
    assert sum(totals.prefill_steps + totals.decode_steps) == 5


def test_a_request_that_the_front_end_stops_gets_a_last_event_with_its_usage(clock):
    channel = Channel(make_request(1, 3, 50), make_request(2, 3, 50))
    engine = Engine(make_scheduler(64), Device(clock), channel, INFO)
    engine.receive(wait=math.inf)
    engine.step()
    channel.inbox = [AbortRequests([1, 9], FinishReason.STOP), AbortRequests([2])]

    engine.receive(wait=0)

    stopped, aborted = channel.sent[-2:]
    event = stopped.event(0)
    assert (stopped.request_ids, event.token_id) == ([1], None)
    assert event.finish_reason is FinishReason.STOP
    assert event.usage.device_seconds == 0.5
    assert aborted.request_ids == []
    assert not engine.has_work


def test_counters_of_two_engine_processes_add_up():
    a = EngineStats(
        num_steps=1,
        block_seconds=2.0,
        num_running=5,
        totals=encode_totals(EngineTotals([1], [2, 3])),
    )
    b = EngineStats(num_steps=2, totals=encode_totals(EngineTotals([], [4, 5], [6])))

    both = add_counters(a, b)

    assert (both.num_steps, both.block_seconds, both.num_running) == (3, 2.0, 0)
    assert both.decode_totals() == EngineTotals([1], [6, 8], [6])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=EngineStats) == both


def test_a_sequence_that_never_ran_used_nothing():
    scheduler = make_scheduler(16)
    sequence = Sequence(make_request(0, 3, 4))
    scheduler.add(sequence)

    scheduler.abort(0)

    assert set(msgspec.structs.astuple(sequence.usage)) == {0}
