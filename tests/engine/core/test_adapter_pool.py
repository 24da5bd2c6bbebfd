"""The pool of adapters: slots, host memory and waiting sequences, whatever happens in between."""

from collections import OrderedDict
from concurrent.futures import Future

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.errors import AdapterError
from server.engine.core import adapter_pool
from server.engine.core.adapter_pool import AdapterPool
from server.engine.core.queue.length_counts import LengthCounts, length_class
from server.engine.core.request import AdapterRef, GenerateRequest
from server.engine.core.sequence import Sequence
from tests.engine.core.bookkeeping import make_request

NAMES = "abcdef"


class Loader:
    """A loader whose reads end when a test says so, and a device that remembers what is in its slots."""

    bytes_each = 1

    def __init__(self, *, at_once=False):
        self.slots, self.reads, self._at_once = {}, {}, at_once
        self.dropped = []
        self.started = []

    def read(self, adapter):
        future = self.reads[adapter.digest] = Future()
        self.started.append(adapter.digest)
        if self._at_once:
            self.finish(adapter.digest)
        return future

    def finish(self, digest, error=None):
        future = self.reads.pop(digest)
        if error is None:
            future.set_result(f"content of {digest}")
        else:
            future.set_exception(error)

    def write(self, slot, content):
        self.slots[slot] = content

    def drop(self, content):
        self.dropped.append(content)

    def num_bytes(self, content):
        return self.bytes_each


def sequence(number, name, priority=0, digest=None, *, shows_paths=False):
    request = make_request(number, 3, priority=priority)
    adapter = AdapterRef(name, f"/adapters/{name}", digest or f"digest of {name}", shows_paths)
    fields = {it: getattr(request, it) for it in request.__struct_fields__}
    return Sequence(GenerateRequest(**fields | {"adapter": adapter}))


def pool(slots=2, capacity=4, **options):
    loader = Loader(**options)
    return AdapterPool(slots, capacity, loader), loader


def ready(pool):
    return [(it.request_id, error) for it, error in pool.take(wait=False)]


def settle(pool):
    """Start reads, and use what they have read."""
    return ready(pool) + ready(pool)


def test_a_sequence_runs_once_its_adapter_is_read_and_written():
    it, loader = pool()
    first = sequence(1, "a")

    assert not it.add(first)
    assert ready(it) == []
    loader.finish("digest of a")
    assert ready(it) == [(1, None)]
    assert loader.slots[first.adapter_slot] == "content of digest of a"
    assert it.add(second := sequence(2, "a"))
    assert second.adapter_slot == first.adapter_slot
    assert loader.started == ["digest of a"]


def test_the_same_name_with_other_weights_is_another_adapter():
    it, loader = pool(at_once=True)
    it.add(old := sequence(1, "a"))
    settle(it)
    it.add(new := sequence(2, "a", digest="new"))
    settle(it)

    assert old.adapter_slot != new.adapter_slot
    assert loader.slots[new.adapter_slot] == "content of new"


def test_the_adapter_whose_last_sequence_ended_first_loses_its_slot():
    it, loader = pool(at_once=True)
    for number, name in enumerate("ab"):
        it.add(sequence(number, name))
        settle(it)
    it.release(1)
    it.release(0)
    it.add(third := sequence(2, "c"))
    settle(it)

    assert sorted(loader.slots.values()) == ["content of digest of a", "content of digest of c"]
    assert it.num_evictions == 1
    assert it.add(sequence(3, "a"))
    assert not it.add(sequence(4, "b"))
    assert loader.slots[third.adapter_slot] == "content of digest of c"


def test_an_absent_adapter_waits_without_holding_up_others():
    it, loader = pool()
    it.add(sequence(1, "a"))
    it.add(sequence(2, "b"))
    it.take(wait=False)
    loader.finish("digest of b")

    assert ready(it) == [(2, None)]
    assert it.add(sequence(3, "b"))
    assert len(it) == 1


def test_an_adapter_in_constant_use_keeps_no_other_one_out():
    it, _ = pool(slots=1, at_once=True)
    it.add(sequence(0, "a"))
    assert settle(it) == [(0, None)]
    it.add(sequence(1, "b"))
    assert settle(it) == []

    assert not it.add(sequence(2, "a")), "the slot drains"
    it.release(0)
    assert ready(it) == [(1, None)]
    it.release(1)
    assert ready(it) == [(2, None)]


def test_a_slot_stops_draining_when_nothing_waits_for_it():
    it, _ = pool(slots=1, at_once=True)
    it.add(sequence(0, "a"))
    settle(it)
    it.add(sequence(1, "b"))
    settle(it)
    assert it.remove(1)

    assert it.add(sequence(2, "a"))


def test_sequences_with_a_lower_priority_number_get_a_slot_first():
    it, _ = pool(slots=1, at_once=True)
    it.add(sequence(0, "a"))
    it.add(sequence(1, "b", priority=-1))

    assert settle(it) == [(1, None)]


def test_an_adapter_that_cannot_be_read_ends_its_sequences_only():
    it, loader = pool()
    for number, name in enumerate("aab"):
        it.add(sequence(number, name))
    it.take(wait=False)
    loader.finish("digest of a", AdapterError("/adapters/a/file: its files have changed"))
    loader.finish("digest of b")

    found = dict(ready(it))
    assert found[2] is None
    assert found[0] == found[1] == "the adapter cannot be loaded: file: its files have changed"
    it.add(sequence(3, "a"))
    it.take(wait=False)
    assert loader.started.count("digest of a") == 2, "it is read again for the next request"


@pytest.mark.parametrize("capacity", [2, 3])
def test_host_memory_holds_a_bounded_number_of_adapters(capacity):
    it, loader = pool(capacity=capacity, at_once=True)
    for number, name in enumerate(NAMES):
        it.add(sequence(number, name))
        settle(it)
        it.release(number)
    kept = NAMES[-capacity:]
    loader.started.clear()
    for number, name in enumerate(kept, 10):
        if not it.add(sequence(number, name)):
            settle(it)
        it.release(number)

    assert loader.started == []


def test_host_memory_never_holds_more_than_its_capacity():
    it, loader = pool(slots=1, capacity=2, at_once=True)
    it.add(sequence(0, "a"))
    settle(it)
    for number, name in enumerate("bcdef", 1):
        it.add(sequence(number, name))
    for _ in range(10):
        it.take(wait=False)
        it.check_invariants()
    assert loader.started == ["digest of a", "digest of b"], "the others wait for room"

    order = []
    for number in range(6):
        it.release(number)
        order += settle(it)
    assert order == [(number, None) for number in range(1, 6)]


def test_adapters_are_read_in_the_order_of_priority_then_arrival():
    it, loader = pool(slots=1, capacity=1, at_once=True)
    for number, priority in enumerate((1, 1, 0, 2)):
        it.add(sequence(number, NAMES[number], priority))
    order = []
    for _ in range(30):
        found = ready(it)
        order += [number for number, _ in found]
        it.check_invariants()
        for number, _ in found:
            it.release(number)

    assert order == [2, 0, 1, 3]
    assert len(loader.started) == 4


def test_a_sequence_of_a_higher_priority_takes_the_room_of_one_that_waits():
    it, _ = pool(slots=1, capacity=2, at_once=True)
    for number, name in enumerate("abc"):
        it.add(sequence(number, name))
        settle(it)
    it.add(sequence(3, "d", priority=-1))
    settle(it)
    it.add(sequence(4, "e", priority=-2))
    settle(it)
    it.release(0)

    assert settle(it) == [(4, None)]
    it.release(4)
    assert settle(it) == [(3, None)]


def test_the_slot_of_the_lowest_priority_drains_then_that_with_the_fewest_sequences():
    it, _ = pool(slots=3, at_once=True)
    for number, (name, priority) in enumerate(
        [("a", 0), ("b", 1), ("b", 1), ("c", 1), ("c", 1), ("c", 1)]
    ):
        if not it.add(sequence(number, name, priority)):
            settle(it)
    it.add(sequence(10, "d"))
    settle(it)

    assert it.add(sequence(11, "a"))
    assert it.add(sequence(12, "c"))
    assert not it.add(sequence(13, "b"))


def test_queued_sequences_of_a_slot_that_drains_wait_again_once():
    it, _ = pool(slots=1, at_once=True)
    queued = {}

    def step():
        for made, error in it.take(wait=False):
            assert error is None
            queued[made.request_id] = made
        it.return_queued(lambda made: queued.pop(made.request_id, None) is not None)
        it.check_invariants()

    it.add(running := sequence(0, "a"))
    step()
    step()
    running.first_scheduled_step = 1
    for number in (1, 2):
        queued[number] = sequence(number, "a")
        assert it.add(queued[number])
    it.add(sequence(3, "b", priority=1))
    for _ in range(3):
        step()
    assert set(queued) == {0, 1, 2}, "b has a lower priority"
    it.remove(3)

    it.add(sequence(4, "b"))
    for _ in range(3):
        step()
    assert set(queued) == {0}
    assert len(it) == 3
    it.release(0)
    step()
    assert set(queued) == {0, 4}, "a waits behind b"
    it.release(4)
    for _ in range(2):
        step()
    it.add(sequence(5, "b"))
    for _ in range(3):
        step()
    assert set(queued) == {0, 1, 2, 4}, "nothing returns twice"
    for number in (1, 2):
        it.release(number)
    step()
    it.release(5)
    assert it.idle_violations() == []


def test_one_digest_at_two_paths_fails_only_where_it_cannot_be_read():
    it, loader = pool()
    it.add(sequence(0, "gone", digest="same"))
    it.add(sequence(1, "here", digest="same"))
    it.take(wait=False)
    loader.finish("same", AdapterError("its files have changed"))

    assert ready(it) == [(0, "the adapter cannot be loaded: its files have changed")]
    loader.finish("same")
    assert ready(it) == [(1, None)]


def test_paths_are_told_to_those_who_may_know_them():
    it, loader = pool()
    it.add(sequence(0, "a"))
    it.add(sequence(1, "a", shows_paths=True))
    it.take(wait=False)
    loader.finish("digest of a", AdapterError("/adapters/a/adapter_config.json is not valid JSON"))

    assert ready(it) == [
        (0, "the adapter cannot be loaded: adapter_config.json is not valid JSON"),
        (1, "the adapter cannot be loaded: /adapters/a/adapter_config.json is not valid JSON"),
    ]


def test_weights_that_replace_others_in_place_take_another_slot_while_those_are_used():
    it, loader = pool(slots=2, at_once=True)
    it.add(old := sequence(0, "a", digest="first"))
    settle(it)
    old.first_scheduled_step = 0
    it.add(waiting := sequence(1, "a", digest="first"))
    it.add(new := sequence(2, "a", digest="second"))
    settle(it)

    assert waiting.adapter_slot == old.adapter_slot != new.adapter_slot
    assert loader.slots[old.adapter_slot] == "content of first"
    assert loader.slots[new.adapter_slot] == "content of second"
    it.add(third := sequence(3, "a", digest="third"))
    settle(it)
    assert third.adapter_slot == -1, "both are used"
    it.release(2)
    settle(it)
    assert loader.slots[third.adapter_slot] == "content of third"
    assert loader.slots[old.adapter_slot] == "content of first"


def test_few_adapters_are_written_between_two_steps_of_running_sequences(monkeypatch):
    monkeypatch.setattr(adapter_pool, "_MOST_READS", 4)
    it, loader = pool(slots=4, at_once=True)
    loader.bytes_each = adapter_pool._MOST_WRITTEN
    for number, name in enumerate("ab"):
        it.add(sequence(number, name))
    assert len(settle(it)) == 2, "nothing ran before"

    for number, name in enumerate("cd", 2):
        it.add(sequence(number, name))
    assert [len(ready(it)) for _ in range(2)] == [0, 1]
    assert not it.is_full
    assert it.add(sequence(4, "a")), "no slot drains, for d gets a free one"
    assert [len(ready(it)) for _ in range(2)] == [1, 0]
    assert it.is_full


def test_waiting_sequences_are_counted_by_the_lengths_of_their_prompts():
    it, _ = pool(slots=1, at_once=True)
    it.add(sequence(0, "a"))
    settle(it)
    for number in (1, 2):
        it.add(sequence(number, "b"))
    at = length_class(3)
    assert (it.by_length.sequences[at], it.by_length.tokens[at]) == (2, 6)
    it.remove(1)
    assert it.by_length.sequences[at] == 1
    it.release(0)
    settle(it)
    assert it.by_length == LengthCounts.zeros()


def test_many_waiting_adapters_cost_no_search_of_the_slots_for_each():
    it, _ = pool(slots=1, at_once=True)
    it.add(sequence(0, "a"))
    settle(it)
    for number in range(1, 2000):
        it.add(sequence(number, "b", digest=f"digest {number}"))
    counted = Counted(it._slots)
    it._slots = counted
    settle(it)

    assert counted.num_walks < 20


class Counted(OrderedDict):
    """Slots that count how often somebody looks at all of them."""

    num_walks = 0

    def __iter__(self):
        self.num_walks += 1
        return super().__iter__()


class PoolMachine(RuleBasedStateMachine):
    """Requests, ends, aborts, reads that succeed or fail, and adapters that change, in any order."""

    @initialize(slots=st.integers(1, 3), more=st.integers(0, 2), large=st.booleans())
    def start(self, slots, more, large):
        self.pool, self.loader = pool(slots, slots + more)
        self.loader.bytes_each = adapter_pool._MOST_WRITTEN if large else 1
        self.num, self.version = 0, dict.fromkeys(NAMES, 0)
        self.waiting, self.running = {}, {}

    @rule(name=st.sampled_from(NAMES), priority=st.integers(-1, 1))
    def request(self, name, priority):
        self.num += 1
        digest = f"{name}{self.version[name]}"
        made = sequence(self.num, name, priority, digest)
        target = self.running if self.pool.add(made) else self.waiting
        target[self.num] = made

    @rule(name=st.sampled_from(NAMES))
    def load_other_weights_under_the_name(self, name):
        self.version[name] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[number]
        self.pool.release(number)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[number]
        assert self.pool.remove(number)

    @rule(number=st.integers(1, 99))
    def forget_an_unknown_request(self, number):
        if number not in self.waiting and number not in self.running:
            assert not self.pool.remove(number)
            self.pool.release(number)

    @precondition(lambda self: self.loader.reads)
    @rule(data=st.data(), fails=st.booleans(), known=st.booleans())
    def finish_a_read(self, data, fails, known):
        digest = data.draw(st.sampled_from(sorted(self.loader.reads)))
        error = (AdapterError if known else OSError)("broken") if fails else None
        self.loader.finish(digest, error)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def schedule(self, data):
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.running[number].first_scheduled_step = 0

    @rule()
    def return_queued(self):
        def withdraw(made):
            assert made.first_scheduled_step is None
            assert self.running.pop(made.request_id) is made
            self.waiting[made.request_id] = made
            return True

        self.pool.return_queued(withdraw)

    @rule()
    def take(self):
        for made, error in self.pool.take(wait=False):
            assert self.waiting.pop(made.request_id) is made
            if error is None:
                self.running[made.request_id] = made

    @invariant()
    def each_running_sequence_has_its_own_adapter(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert len(self.pool) == len(self.waiting)
        for made in self.running.values():
            content = self.loader.slots[made.adapter_slot]
            assert content == f"content of {made.adapter.digest}"
            assert made.cache_salt[0] == f"adapter {made.adapter.digest}"

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _ in range(20 * (len(self.waiting) + len(self.running) + 1)):
            for digest in list(self.loader.reads):
                self.loader.finish(digest)
            self.take()
            for number in list(self.running):
                self.pool.release(number)
                del self.running[number]
        assert not self.waiting, "every sequence gets its turn"
        assert self.pool.idle_violations() == []


TestPoolMachine = PoolMachine.TestCase
