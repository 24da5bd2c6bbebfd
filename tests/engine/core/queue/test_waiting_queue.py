"""The order of waiting sequences, and the time that the order costs: simulations without a clock."""

import random

import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.core.queue.length_counts import length_class
from server.engine.core.queue.waiting_queue import WaitingQueue
from tests.engine.core.bookkeeping import (
    Token,
    begin,
    commit,
    make_scheduler,
    make_sequence,
    rows_of,
    step,
)


def make_queue(*sequences, max_num_seqs=4, max_num_batched_tokens=64):
    queue = WaitingQueue(SchedulerConfig(max_num_seqs, max_num_batched_tokens, 1000))
    for sequence in sequences:
        queue.add(sequence)
    return queue


def admit_head(queue):
    order = []
    while (head := queue.head) is not None:
        queue.admit(head)
        queue.check_invariants()
        order.append(head.request_id)
    return order


def test_sequences_of_one_client_are_admitted_in_order_of_arrival():
    queue = make_queue(*(make_sequence(i, 50 - i) for i in range(5)))

    assert admit_head(queue) == [0, 1, 2, 3, 4]
    assert not queue


def test_clients_get_equal_shares_of_tokens():
    flood = [make_sequence(i, 100, client="flood") for i in range(4)]
    others = [make_sequence(10 + i, 200, client="other") for i in range(2)]

    assert admit_head(make_queue(*flood, *others)) == [0, 10, 1, 11, 2, 3]


def test_a_client_that_returns_after_a_pause_has_saved_no_share():
    queue = make_queue(*(make_sequence(i, 100, client="steady") for i in range(4)))
    for _ in range(3):
        queue.admit(queue.head)
    for i in range(3):
        queue.add(make_sequence(10 + i, 100, client="returns"))
        queue.add(make_sequence(20 + i, 100, client="steady"))

    order = admit_head(queue)

    assert order.index(20) < order.index(12)


def test_lower_priority_numbers_come_first_whatever_the_start_tags():
    queue = make_queue(make_sequence(0, 9), make_sequence(1, 900, priority=-1))

    assert (queue.head.request_id, queue.shortest.request_id) == (1, 1)
    assert admit_head(queue) == [1, 0]


def test_the_shortest_prompt_may_go_first_until_the_allowance_of_the_head_is_used():
    head = make_sequence(0, 100)
    queue = make_queue(head, *(make_sequence(i, 40) for i in range(1, 6)))
    overtaking = []
    while (shortest := queue.shortest) is not head:
        queue.admit(shortest)
        overtaking.append(shortest.request_id)

    assert overtaking == [1, 2]  # 80 of 100 tokens
    queue.admit(head)
    assert queue.shortest.request_id == queue.head.request_id == 3


def test_each_overtaking_prompt_counts_at_least_as_a_share_of_a_step():
    head = make_sequence(0, 10)
    queue = make_queue(head, *(make_sequence(i, 1) for i in range(1, 9)))
    num_overtaking = 0
    while queue.shortest is not head:
        queue.admit(queue.shortest)
        num_overtaking += 1

    assert num_overtaking == 4  # a step has 64 tokens for 4 sequences


def test_preempted_sequences_come_first_and_are_not_overtaken():
    queue = make_queue(make_sequence(0, 2))
    for request_id, rank in ((1, (0, 7)), (2, (0, 5))):
        sequence = make_sequence(request_id, 90)
        sequence.rank, sequence.num_preemptions = rank, 1
        queue.put_back(sequence)

    assert queue.head.request_id == queue.shortest.request_id == 2
    assert admit_head(queue) == [2, 1, 0]


def test_sequences_and_tokens_are_counted_by_length():
    queue = make_queue(make_sequence(0, 1), make_sequence(1, 64), make_sequence(2, 127))
    removed = make_sequence(3, 65)
    queue.add(removed)
    queue.remove(removed)

    assert [length_class(n) for n in (1, 2, 3, 4, 64, 127, 128)] == [1, 2, 2, 3, 7, 7, 8]
    assert queue.by_length.sequences[:9] == [0, 1, 0, 0, 0, 0, 0, 2, 0]
    assert queue.by_length.tokens[7] == 64 + 127
    assert len(queue) == 3


def test_the_record_of_shares_does_not_grow_with_the_clients_that_were_served():
    queue = make_queue(make_sequence(0, 9, client="first"))
    for i in range(1, 1000):
        queue.add(make_sequence(i, 9, client=f"client {i}"))
        queue.admit(queue.head)

    assert len(queue._priorities[0]._finish_tags) < 40


def test_the_record_of_shares_does_not_grow_with_the_clients_that_left():
    queue = make_queue(make_sequence(0, 9, client="first"))
    for i in range(1, 1000):
        removed = make_sequence(i, 9, client=f"client {i}")
        queue.add(removed)
        queue.remove(removed)

    assert len(queue._priorities[0]._finish_tags) < 40


# Simulations. The unit of time is the token computed, that of a full step its budget.


class Simulation:
    """Runs a scheduler, adds requests at given steps, and notes the step of the first token and of the end."""

    def __init__(self, num_blocks=10_000, **config):
        self.scheduler = make_scheduler(num_blocks, 16, max_model_len=100_000, **config)
        self.num_added = 0
        self.added, self.first, self.ended = {}, {}, {}

    def add(self, num_tokens, max_new_tokens=1, **options):
        request_id = self.num_added
        self.num_added += 1
        prompt = [request_id] * num_tokens
        self.scheduler.add(make_sequence(request_id, prompt, max_new_tokens, **options))
        self.added[request_id] = self.scheduler.num_steps
        return request_id

    def step(self):
        output, events = step_unchecked(self.scheduler)
        for request_id, event in events:
            self.first.setdefault(request_id, self.scheduler.num_steps)
            if event.finish_reason:
                self.ended[request_id] = self.scheduler.num_steps
        return output

    def finish(self):
        while self.scheduler.has_work:
            self.step()

    def wait(self, request_id):
        return self.first[request_id] - self.added[request_id]


def step_unchecked(scheduler):
    output = begin(scheduler)
    rows = (*output.decode, *output.prefill)
    return output, commit(scheduler, output, [[Token(7)] * row.num_logits for row in rows])


@pytest.mark.parametrize("client", ["flood", "other"])
def test_a_short_prompt_behind_fifty_long_ones_is_computed_in_the_next_step(client):
    simulation = Simulation(max_num_seqs=64, max_num_batched_tokens=512)
    longs = [simulation.add(2000, 16, client="flood") for _ in range(50)]
    for _ in range(3):
        simulation.step()
    short = simulation.add(16, 16, client=client)

    simulation.finish()

    assert simulation.wait(short) == 1
    assert max(simulation.ended[i] for i in longs) <= 50 * 2000 / 512 + 20


def test_a_long_prompt_is_not_starved_by_ever_new_short_ones():
    """Short prompts arrive at one and a half times the rate of the engine; the long one gets half of each step."""
    simulation = Simulation(max_num_seqs=64, max_num_batched_tokens=512)
    simulation.add(2000)
    long = simulation.add(2000)
    while long not in simulation.first:
        for _ in range(12):
            simulation.add(64)
        simulation.step()

    assert simulation.wait(long) <= 2 * (2000 + 2000) / 512 + 2


@pytest.mark.parametrize("num_blocks", [10_000, 40])
def test_every_sequence_is_served_within_a_bound_while_short_ones_keep_coming(num_blocks):
    """With few places or few blocks, each admission of a head lets at most a prompt's tokens pass."""
    rng = random.Random(3)
    simulation = Simulation(num_blocks, max_num_seqs=4, max_num_batched_tokens=64)
    longs = [simulation.add(rng.randrange(200, 400), 4) for _ in range(6)]
    num_steps = 0
    while any(i not in simulation.first for i in longs):
        for _ in range(2):
            simulation.add(rng.randrange(1, 16), 4)
        simulation.step()
        num_steps += 1
        assert num_steps < 400

    order = [simulation.first[i] for i in longs]
    assert order == sorted(order) or num_blocks > 40


def test_clients_that_send_one_request_each_do_not_starve_one_that_sent_many():
    """Each new client starts at the virtual time, which goes on."""
    simulation = Simulation(max_num_seqs=2, max_num_batched_tokens=64)
    many = [simulation.add(60, client="many") for _ in range(8)]
    for i in range(400):
        simulation.add(60, client=f"one {i}")
        simulation.step()

    assert all(i in simulation.first for i in many)


def test_a_client_that_floods_gets_no_more_than_its_share():
    simulation = Simulation(max_num_seqs=8, max_num_batched_tokens=128)
    flood = [simulation.add(100, 2, client="flood") for _ in range(60)]
    for _ in range(4):
        simulation.step()
    others = [simulation.add(100, 2, client="other") for _ in range(6)]

    simulation.finish()

    before = sum(simulation.first[i] <= simulation.first[others[-1]] for i in flood)
    assert before <= 4 + 2 * len(others) + 4


def test_a_sequence_that_cannot_meet_its_deadline_is_not_computed():
    scheduler = make_scheduler(64, max_num_batched_tokens=64)
    scheduler.accounting.now = 10.0
    scheduler.add(make_sequence(0, 64, 1))
    output = scheduler.schedule()
    scheduler.start(output)
    commit(scheduler, output, [[Token(7)]], seconds=6.4)  # 0.1 s for each token
    scheduler.accounting.now = 20.0
    for request_id, deadline in ((1, 21.9), (2, 22.1), (3, None)):
        scheduler.add(make_sequence(request_id, 20, deadline=deadline))

    output, _ = step(scheduler)

    assert [row[0] for row in rows_of(output)] == [2, 3]
    [(request_id, event)] = scheduler.take_late()
    assert (request_id, event.finish_reason.name) == (1, "TIMEOUT")
    assert event.usage.num_steps == 0
    assert not scheduler.take_late()


def test_tokens_in_the_prefix_cache_count_as_computed_for_a_deadline():
    scheduler = make_scheduler(64, max_num_batched_tokens=64)
    prompt = list(range(64))
    scheduler.add(make_sequence(0, prompt, 1))
    output = scheduler.schedule()
    scheduler.start(output)
    commit(scheduler, output, [[Token(7)]], seconds=6.4)
    scheduler.add(make_sequence(1, prompt, deadline=1.0))

    output, _ = step(scheduler)

    assert rows_of(output) == [(1, 60, 4, 1)]
