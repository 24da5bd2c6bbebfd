"""Hypothesis state machines for the block manager and the scheduler; invariants are checked after every rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.request import FinishReason
from server.engine.core.request_checks import CapacityError
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.sequence import Sequence
from server.engine.core.step import DecodeRows
from tests.engine.core.bookkeeping import (
    VOCAB_SIZE,
    NumberModel,
    Token,
    commit,
    generate_alone,
    make_request,
    make_sequence,
    output_of,
    propose,
    rows_of,
)

# Most prompts have a common prefix, like prompts with a common instruction.
PROMPTS = st.builds(
    lambda num_common, own: [1, 0, 0, 1, 0, 1, 1, 0][:num_common] + own,
    st.integers(0, 8),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
approx = partial(pytest.approx, rel=1e-6, abs=1e-9)
LOST, READ_LOST = "lost", "computed from lost results"
CULPRIT = "makes the step fail again"
RESERVES = st.sampled_from([0.0, 0.5])


class BlockManagerMachine(RuleBasedStateMachine):
    """Records which prefix was last computed into every block, and which state was written to every slot."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        reserve=RESERVES,
        num_slots=st.integers(0, 8),
        chunk=st.integers(1, 3),
        keeps_inside=st.booleans(),
    )
    def start(self, num_blocks, block_size, reserve, num_slots, chunk, keeps_inside):
        self.manager = BlockManager(
            num_blocks,
            block_size,
            contiguity_reserve=reserve,
            num_slots=num_slots,
            state_chunk=chunk,
            keeps_inside=keeps_inside,
        )
        self.content = {}
        self.states = {}
        self.sequences = []
        self.num_admitted = 0

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from([None, "a"]),
        num_spare=st.integers(0, 2),
        deterministic=st.booleans(),
        partings=st.sets(st.integers(0, 4), max_size=2),
    )
    def admit(self, prompt, salt, num_spare, deterministic, partings):
        manager, slots = self.manager, self.manager.slots
        sequence = make_sequence(
            self.num_admitted, prompt, 100, salt=salt, deterministic=deterministic
        )
        num_free = manager.num_free_blocks
        num_needed = len(prompt) // manager.block_size + 1

        def shared(start):
            counts = (it * slots.unit for it in partings)
            return [it for it in counts if start < it < len(prompt)]

        pending = manager.num_pending_tokens(sequence)
        assert pending < len(prompt)
        if not manager.admit(sequence, num_spare, shared):
            assert num_needed + num_spare > num_free or (slots is not None and not slots.num_free)
            assert (sequence.block_table, manager.num_free_blocks) == ([], num_free)
            assert sequence.slots is None
            return
        self.num_admitted += 1
        self.sequences.append(sequence)
        assert len(sequence.block_table) == num_needed
        assert sequence.num_computed_tokens < len(prompt)
        assert manager.num_free_blocks >= num_spare
        for index in range(sequence.num_computed_tokens // manager.block_size):
            stop = (index + 1) * manager.block_size
            assert self.content[sequence.block_table[index]] == (
                sequence.cache_salt,
                tuple(prompt[:stop]),
            )
        if slots is not None:
            assert sequence.num_computed_tokens % slots.unit == 0
            assert self.state_of(sequence) == self.expected_state(sequence)

    def state_of(self, sequence):
        """Return the state that the next step of a sequence reads."""
        read = sequence.slots.read
        return (sequence.cache_salt, ()) if read < 0 else self.states[read]

    def expected_state(self, sequence, count=None):
        count = sequence.num_computed_tokens if count is None else count
        return sequence.cache_salt, tuple(sequence.token_ids[:count])

    def write_states(self, sequence, stop):
        """Do what a step does that computes a sequence up to a number of tokens."""
        start, held = sequence.num_computed_tokens, sequence.slots
        assert self.state_of(sequence) == self.expected_state(sequence)
        if stop - start > 1:
            self.manager.plan_state(sequence, start, stop)
            for count, kept in held.planned.items():
                if count < stop:
                    self.states[kept.slot] = self.expected_state(sequence, count)
        self.states[held.write] = self.expected_state(sequence, stop)
        self.manager.advance_state(sequence, stop)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(2, 8))
    def plan_a_step_that_is_not_launched(self, data, num_tokens):
        sequence = data.draw(st.sampled_from(self.sequences))
        start = sequence.num_computed_tokens
        self.manager.plan_state(sequence, start, min(start + num_tokens, sequence.num_tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def compute(self, data, num_tokens):
        """Compute some tokens, and generate the missing ones."""
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.slots is not None:
            num_tokens = sequence.slots.cut(sequence.num_computed_tokens, num_tokens)
        stop = sequence.num_computed_tokens + num_tokens
        while sequence.num_tokens < stop:
            sequence.append(data.draw(st.integers(0, 1)))
        size = self.manager.block_size
        num_needed = -(-stop // size) - len(sequence.block_table)
        if not self.manager.grow(sequence, stop):
            assert num_needed > self.manager.num_free_blocks
            return
        for index in range(sequence.num_computed_tokens // size, stop // size):
            tokens = tuple(sequence.token_ids[: (index + 1) * size])
            self.content[sequence.block_table[index]] = (sequence.cache_salt, tokens)
        if sequence.slots is not None:
            self.write_states(sequence, stop)
        sequence.num_computed_tokens = stop
        self.manager.cache_full_blocks(sequence, stop)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), discard=st.booleans())
    def free(self, data, discard):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        shared = {block for other in self.sequences for block in other.block_table}
        alone = set(sequence.block_table) - shared
        self.manager.free(sequence, discard_cached=discard)
        if discard:
            assert alone.isdisjoint(self.manager._idle)

    @invariant()
    def books_balance(self):
        if hasattr(self, "manager"):
            self.manager.check_invariants()
            used = {block for sequence in self.sequences for block in sequence.block_table}
            assert self.manager.num_free_blocks == self.manager.num_blocks - len(used)
            for sequence in self.sequences:
                size = self.manager.block_size
                for index in range(sequence.num_computed_tokens // size):
                    tokens = tuple(sequence.token_ids[: (index + 1) * size])
                    block = sequence.block_table[index]
                    assert self.content[block] == (sequence.cache_salt, tokens)

    def teardown(self):
        if hasattr(self, "manager"):
            for sequence in self.sequences:
                self.manager.free(sequence)
            assert self.manager.num_free_blocks == self.manager.num_blocks
            self.manager.check_invariants()


class Bills:
    """What each sequence must be charged, computed row by row and second by second."""

    def __init__(self):
        self.now = 0.0
        self.device_seconds = defaultdict(float)
        self.block_seconds = defaultdict(float)
        self.steps = defaultdict(int)
        self.cached = defaultdict(set)  # positions that were first taken from the prefix cache
        self.computed = defaultdict(set)  # positions that were first computed
        self.recomputed = defaultdict(int)
        self.all_device_seconds = 0.0
        self.late_seconds = defaultdict(
            float
        )  # of ended sequences in steps in flight, by finish reason

    def wait(self, seconds, sequences):
        self.now += seconds
        for sequence in sequences:
            self.block_seconds[sequence.request_id] += seconds * len(sequence.block_table)

    def end_step(self, output, seconds):
        self.all_device_seconds += seconds
        for row in (*output.decode, *output.prefill):
            share = seconds * row.num_tokens / output.num_tokens
            if row.sequence.finish_reason is not None:
                self.late_seconds[row.sequence.finish_reason] += share
                continue
            request_id = row.sequence.request_id
            self.device_seconds[request_id] += share
            self.steps[request_id] += 1
            cached, computed = self.cached[request_id], self.computed[request_id]
            cached |= set(range(row.start)) - computed
            positions = set(range(row.start, row.start + row.num_tokens))
            self.recomputed[request_id] += len(positions & (cached | computed))
            computed |= positions - cached

    def reject(self, output, events):
        """Forget the tokens of drafts that a sequence does not have: computing others there is the first time."""
        kept = Counter(request_id for request_id, event in events if event.token_id is not None)
        for row in output.decode:
            request_id = row.sequence.request_id
            if row.draft:
                stop = row.start + row.num_tokens
                rejected = range(row.start + max(1, kept[request_id]), stop)
                self.computed[request_id] -= set(rejected)


class SchedulerMachine(RuleBasedStateMachine):
    """Serves requests with an arithmetic model; each request must get the text that it gets alone, and pay for what it
    used.
    """

    @initialize(
        num_tokens=st.integers(16, 32),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 8),
        prefill_budget=st.none() | st.integers(0, 8),
        enable_prefix_caching=st.booleans(),
        reserve=RESERVES,
        num_snapshots=st.none() | st.integers(0, 8),
        chunk=st.integers(1, 4),
        keeps_inside=st.booleans(),
    )
    def start(
        self,
        num_tokens,
        block_size,
        max_num_seqs,
        spare_budget,
        prefill_budget,
        enable_prefix_caching,
        reserve,
        num_snapshots,
        chunk,
        keeps_inside,
    ):
        num_blocks = num_tokens // block_size
        num_slots = 0 if num_snapshots is None else max_num_seqs + num_snapshots
        manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching, reserve, num_slots, chunk, keeps_inside
        )
        if manager.slots is not None:
            manager.slots.reserve_for_drafts(min(3, num_slots - max_num_seqs))
        self.chunk = chunk if num_slots else 1
        budget = max_num_seqs + self.chunk - 1 + spare_budget
        most = None if prefill_budget is None else budget + prefill_budget
        config = SchedulerConfig(max_num_seqs, budget, 22, most)
        self.scheduler = Scheduler(config, manager)
        self.model = NumberModel(num_blocks, block_size)
        self.live: dict[int, Sequence] = {}
        self.requests = {}
        self.texts: dict[int, list[int]] = {}
        self.num_added = 0
        self.num_steps_owed = 0
        self.in_flight = None
        self.culprits: set[int] = set()
        self.runs_ahead = False
        self.num_proposed = 0
        self.bills = Bills()
        self.ended = []
        self.head = None
        self.num_overtaken = 0
        self.admitted_by_share = set()
        self.admit_by_share = self.scheduler._shares.admit
        self.scheduler._shares.admit = self.check_shares

    def check_shares(self):
        """Admit the sequences of clients with fewer places than others, and check at whose cost."""
        live = self.scheduler._live
        before, places = list(live.running), Counter(live.num_places)
        victims = self.admit_by_share()
        admitted = set(live.running) - set(before)
        self.admitted_by_share = admitted
        assert before[:1] == live.running[:1] or live.running[0] in admitted
        assert not before or before[0] not in victims
        if not admitted and victims:
            assert self.scheduler.block_manager.enable_prefix_caching  # a victim's blocks were hits
        for sequence in admitted:
            assert places[sequence.client] + 2 <= max(places.values())
            assert all(victim.priority >= sequence.priority for victim in victims)
        if len(before) + len(admitted) > self.scheduler.config.max_num_seqs:
            assert victims
        return victims

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=5),
        max_new_tokens=st.integers(1, 12),
        min_new_tokens=st.integers(0, 4),
        eos=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        stop=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        prompt_logprobs=st.booleans(),
        salt=st.sampled_from([None, "a"]),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        client=st.sampled_from(["", "", "b", "c"]),
        client_priority=st.sampled_from([0, 0, 0, -3, 7]),
        seconds=st.sampled_from([None, None, None, 0.5, 5.0]),
        deterministic=st.booleans(),
    )
    def add(
        self,
        prompts,
        max_new_tokens,
        min_new_tokens,
        eos,
        stop,
        prompt_logprobs,
        salt,
        priority,
        client,
        client_priority,
        seconds,
        deterministic,
    ):
        for prompt in prompts:
            self.add_one(
                make_request(
                    self.num_added,
                    prompt,
                    max_new_tokens,
                    min_new_tokens=min_new_tokens,
                    eos_token_ids=tuple(eos),
                    stop_token_ids=tuple(stop),
                    prompt_logprobs=prompt_logprobs,
                    salt=salt,
                    priority=priority,
                    client=client,
                    client_priority=client_priority,
                    deterministic=deterministic,
                    deadline=None if seconds is None else self.bills.now + seconds,
                )
            )

    def add_one(self, request):
        sequence = Sequence(request)
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_new_tokens
        try:
            self.scheduler.add(sequence)
        except CapacityError:
            assert num_tokens > self.scheduler.max_total_tokens
            return
        self.num_added += 1
        self.live[request.request_id] = sequence
        self.requests[request.request_id] = request
        self.texts[request.request_id] = []
        self.num_steps_owed += num_tokens

    @rule()
    def step(self):
        self.serve(self.model.execute)

    @precondition(lambda self: self.live)
    @rule()
    def run_for_a_while(self):
        for _ in range(4):
            self.step()
            self.scheduler.check_invariants()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        sequence = self.live.pop(request_id)
        assert self.scheduler.abort(request_id) is sequence
        assert sequence.block_table == []
        self.check_bill(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def expire(self, data):
        """A deadline passes: without output, or in the queue, the sequence ends now, otherwise with its next token."""
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        sequence = self.live[request_id]
        goes_on = sequence.block_table and sequence.num_output_tokens
        event = self.scheduler.expire(request_id)
        if goes_on:
            assert event is None
            assert sequence.is_expired
            return
        assert event.finish_reason is FinishReason.TIMEOUT
        assert event.usage is sequence.usage
        del self.live[request_id]
        assert sequence.block_table == []
        self.check_bill(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort_during_a_step(self, data):
        def execute(output):
            results = self.model.execute(output)
            if self.live:  # the results of the step before may have ended all of them
                self.abort(data)
            return results

        self.serve(execute)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail_one_row(self, data):
        def execute(output):
            results = self.model.execute(output)
            sampling = [index for index, tokens in enumerate(results) if tokens]
            if sampling:
                row = data.draw(st.sampled_from(sampling))
                results[row] = [Token(None, error="not a number")] * len(results[row])
            return results

        self.serve(execute)

    @precondition(lambda self: self.live)
    @rule(culprits=st.sets(st.integers(0, 4), max_size=2))
    def lose_the_results_and_compute_again(self, culprits):
        """The step fails after it was started, and maybe after the next one was; some sequences fail again."""

        def execute(output):
            self.model.execute(output)
            self.culprits = {row[0] for i, row in enumerate(rows_of(output)) if i in culprits}
            return LOST

        self.serve(execute)

    @rule()
    def fail_to_compute_and_try_again(self):
        self.wait_for_results()
        self.scheduler.schedule()
        self.end_late()

    @rule(runs_ahead=st.booleans())
    def run_ahead_or_not(self, runs_ahead):
        """From now on, schedule the next step before the results of the last are committed, or after."""
        self.runs_ahead = runs_ahead

    @rule(num_proposed=st.integers(0, 7))
    def propose_tokens_or_not(self, num_proposed):
        """From now on, decode rows have drafts of up to so many tokens, the right ones or not."""
        self.num_proposed = num_proposed

    def propose(self, output):
        """Add drafts of different lengths to the decode rows of a step; some are wrong from some token on."""
        drafts = {}
        for row in output.decode:
            sequence = row.sequence
            text, _ = generate_alone(self.requests[sequence.request_id])
            known = sequence.num_output_tokens
            draft = text[known : known + (output.step + row.start) % (self.num_proposed + 1)]
            if draft and output.step % 3 == 0:
                draft[row.start % len(draft)] += 1
            drafts[sequence.request_id] = draft
        return propose(self.scheduler, output, drafts)

    def wait(self, seconds):
        self.bills.wait(seconds, self.live.values())
        self.scheduler.accounting.now = self.bills.now

    def check_bill(self, sequence):
        """Compare the figures of a sequence that has ended with those computed row by row."""
        self.ended.append(sequence)
        usage, bills, request_id = sequence.usage, self.bills, sequence.request_id
        assert usage.block_seconds == approx(bills.block_seconds[request_id])
        in_flight = sequence.num_tokens_in_flight
        assert usage.num_steps == bills.steps[request_id] + in_flight
        if not in_flight:
            assert usage.device_seconds == approx(bills.device_seconds[request_id])
        assert usage.device_seconds >= bills.device_seconds[request_id] - 1e-9
        reason = sequence.finish_reason
        if reason in (FinishReason.ABORT, FinishReason.TIMEOUT) or sequence.error == CULPRIT:
            return  # a chunk of its prompt may be in flight
        prompt = range(sequence.num_prompt_tokens)
        assert usage.num_computed_prompt_tokens == len(bills.computed[request_id] & set(prompt))
        assert usage.num_cached_prompt_tokens == len(bills.cached[request_id] & set(prompt))
        # After a lost step that cannot be repeated, the token in flight may have been computed before.
        most = 0 if self.scheduler.repeats_steps else in_flight
        assert 0 <= usage.num_recomputed_tokens - bills.recomputed[request_id] <= most
        if sequence.num_output_tokens:
            total = usage.num_computed_prompt_tokens + usage.num_cached_prompt_tokens
            assert total == len(prompt)

    def serve(self, execute):
        """Run a step; every running sequence must advance in it, or have its last token in flight."""
        scheduler = self.scheduler
        self.wait_for_results()
        before, self.in_flight = self.in_flight, None
        self.wait(0.25)
        output = self.propose(self.schedule())
        results = execute(output)
        scheduler.start(output)
        scheduler.check_invariants()
        if before is not None:
            if before[1] is LOST:
                results = READ_LOST
            self.end(*before)
        if self.runs_ahead:
            self.in_flight = output, results
        else:
            self.end(output, results)
        self.model.poison_empty_blocks(scheduler.block_manager)
        self.model.poison_free_slots(scheduler.block_manager)

    def wait_for_results(self):
        """End the step in flight if the next one cannot read its results on the device."""
        before = self.in_flight
        if before is not None and (before[1] is READ_LOST or before[0].decode.drafts is not None):
            self.in_flight = None
            self.end(*before)

    def schedule(self):
        scheduler = self.scheduler
        for request_id in [i for i, s in self.live.items() if s.is_expired]:
            if event := scheduler.expire(request_id):
                self.receive(request_id, event)
        ending = {
            request_id
            for request_id, sequence in self.live.items()
            if sequence.num_known_tokens == sequence.max_num_tokens
        }
        head = scheduler.waiting.head
        decoding = {
            sequence
            for sequence in scheduler._live.running
            if sequence.num_known_tokens - sequence.num_computed_tokens == 1
        }
        first = scheduler._live.running[:1]
        output = scheduler.schedule()
        scheduler.check_invariants()
        self.end_late()
        self.check_overtaking(head, output)
        rows = rows_of(output)
        assert output.num_tokens == sum(row[2] for row in rows)
        config = scheduler.config
        assert output.num_tokens <= config.prefill_budget
        # Not a single token of a prompt, or of a sequence that is admitted again.
        if any(row.sequence in decoding for row in output.decode):
            assert output.num_tokens <= config.max_num_batched_tokens
        assert not {row[0] for row in rows} & set(output.preempted)
        served = {row[0] for row in rows} | ending
        if self.chunk == 1:
            assert {sequence.request_id for sequence in scheduler._live.running} <= served
        served |= {i for i, sequence in self.live.items() if sequence.num_tokens_in_flight}
        if self.live:
            assert served
        now_running = scheduler._live.running
        # A prompt of more importance may leave no room for a whole chunk of the one that was the first.
        is_behind = self.chunk > 1 and first != now_running[:1] and set(first) <= {*now_running}
        if first and not is_behind:
            assert first[0].request_id in served  # never preempted
        for row in (*output.decode, *output.prefill):
            assert (row.num_tokens == 1) == (row in output.decode)
            assert bool(row.num_logits) == (
                row.start + row.num_tokens == row.sequence.num_known_tokens
            )
            if self.chunk > 1:
                self.check_division(row)
        return output

    def check_division(self, row):
        """Steps divide prompts where the bits of states allow it, and generated tokens one by one if those matter."""
        sequence, stop = row.sequence, row.start + row.num_tokens
        assert row.num_tokens
        if row.start >= sequence.num_prompt_tokens and sequence.deterministic:
            assert row.num_tokens == 1
            return
        ends = {sequence.num_prompt_tokens if sequence.deterministic else sequence.num_known_tokens}
        assert stop % self.chunk == 0 or stop in ends

    def end_late(self):
        """Sequences without a token end if the fastest step so far would be too slow for their deadline."""
        price = self.scheduler.accounting.least_price
        for request_id, event in self.scheduler.take_late():
            sequence = self.live[request_id]
            assert not sequence.num_output_tokens
            assert sequence.deadline < self.bills.now + sequence.num_prompt_tokens * price
            sequence.is_expired = True
            self.receive(request_id, event)

    def check_overtaking(self, head, output):
        """Shorter prompts are admitted before the head, but only within the bound."""
        if head is not self.head:
            self.head, self.num_overtaken = head, 0
        if head is None or head not in self.scheduler.waiting:
            return
        config = self.scheduler.config
        share = config.max_num_batched_tokens // config.max_num_seqs
        for sequence in output.first_scheduled:
            assert sequence.priority <= head.priority
            if sequence in self.admitted_by_share:
                continue
            if sequence.priority == head.priority:
                assert not head.num_preemptions
                assert sequence.num_prompt_tokens <= head.num_prompt_tokens
                self.num_overtaken += max(sequence.num_prompt_tokens, share)
        assert self.num_overtaken <= max(head.num_prompt_tokens, config.max_num_batched_tokens)

    def end(self, output, results):
        seconds = (0.5 + output.step % 4) if output.num_tokens else 0.0
        self.wait(seconds)
        self.bills.end_step(output, seconds)
        is_lost = results in (LOST, READ_LOST)
        events = (
            self.end_again(output, seconds)
            if is_lost and self.scheduler.repeats_steps
            else list(
                self.scheduler.begin_again(output, CULPRIT, seconds, is_cause=results is LOST)
            )
            if is_lost
            else commit(self.scheduler, output, results, seconds)
        )
        self.bills.reject(output, events)
        for request_id, event in events:
            self.receive(request_id, event)

    def end_again(self, output, seconds):
        """Compute a step again, without its culprits, in two parts; nothing that it wrote before may be needed."""
        results = {}
        with self.scheduler.not_started(output) as rows:
            for row in rows:
                for position in range(row.start, row.start + row.num_tokens):
                    self.model.slots[self.model.slot(row.sequence, position)] = None
            healthy = [row for row in rows if row.sequence.request_id not in self.culprits]
            for part in (healthy[::2], healthy[1::2]):
                decode = tuple(row for row in part if row.is_decode)
                prefill = tuple(row for row in part if not row.is_decode)
                again = msgspec.structs.replace(
                    output, decode=DecodeRows.of(decode), prefill=prefill
                )
                results |= zip(
                    (row.sequence for row in decode + prefill),
                    self.model.execute(again),
                    strict=True,
                )
            for row in rows:
                results.setdefault(row.sequence, [Token(None, error=CULPRIT)])
        self.culprits = set()
        return list(self.scheduler.commit_parts(output, results, seconds))

    def receive(self, request_id, event):
        text = self.texts[request_id]
        if event.token_id is not None:
            text.append(event.token_id)
        if event.finish_reason is None:
            return
        sequence = self.live.pop(request_id)
        assert sequence.finish_reason is event.finish_reason
        assert sequence.usage is event.usage
        self.check_bill(sequence)
        if event.finish_reason is FinishReason.TIMEOUT:
            assert sequence.is_expired
            expected, _ = generate_alone(self.requests[request_id])
            assert text == expected[: len(text)]
        elif event.finish_reason is not FinishReason.ERROR:
            assert (text, event.finish_reason) == generate_alone(self.requests[request_id])

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
            for request_id, sequence in self.live.items():
                assert output_of(sequence) == self.texts[request_id]
                expected, _ = generate_alone(self.requests[request_id])
                assert expected[: len(self.texts[request_id])] == self.texts[request_id]

    def teardown(self):
        """Finish all sequences; this takes at most as many steps as they have tokens."""
        if not hasattr(self, "scheduler"):
            return
        # Deterministic sequences compute again one by one what they generated before a preemption.
        for _ in range((2 if self.chunk == 1 else 6) * self.num_steps_owed):
            if not self.live and self.in_flight is None:
                break
            self.step()
            self.scheduler.check_invariants()
            self.runs_ahead &= bool(self.live)
        assert not self.live
        assert not self.scheduler.has_work
        manager = self.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        self.check_totals()

    def check_totals(self):
        accounting, bills = self.scheduler.accounting, self.bills
        assert accounting.device_seconds == approx(bills.all_device_seconds)
        assert accounting.block_seconds == approx(sum(bills.block_seconds.values()))
        assert accounting.num_reserved_tokens == 0
        charged = 0.0
        for reason in FinishReason:
            ended = [s for s in self.ended if s.finish_reason is reason]
            seconds = sum(bills.device_seconds[s.request_id] for s in ended)
            seconds += bills.late_seconds[reason]
            assert accounting.num_ended[reason - 1] == len(ended)
            assert accounting.ended_device_seconds[reason - 1] == approx(seconds)
            blocks = sum(s.usage.block_seconds for s in ended)
            assert accounting.ended_block_seconds[reason - 1] == approx(blocks)
            charged += seconds
        assert charged == approx(accounting.device_seconds)
        assert accounting.num_recomputed_tokens == sum(
            s.usage.num_recomputed_tokens for s in self.ended
        )


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=80, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)
