"""Drafts are as long as makes the tokens of a second more, and change nothing else."""

import random

import msgspec
import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.request import AdapterRef
from server.engine.core.schedule.draft import NO_DRAFT, Draft
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.sequence import Sequence
from tests.engine.core.bookkeeping import Token, begin, commit, make_request, output_of

CERTAIN = 4


class KnownText:
    """Proposes what follows in texts known by request id; of some tokens a wrong one.

    Attributes:
        predicts: whether a draft after so many known tokens of a sequence is from its prediction.
    """

    predicts = staticmethod(lambda _: False)

    def __init__(self, texts, rng=None, wrong=0.0):
        self.texts, self.rng, self.wrong = texts, rng, wrong
        self.limits, self.ended = [], []

    def begin_step(self):
        pass

    def propose(self, sequence, limit):
        self.limits.append(limit)
        known = sequence.num_tokens
        tokens = list(self.texts[sequence.request_id][known : known + limit])
        for i in range(len(tokens)):
            if self.wrong and self.rng.random() < self.wrong:
                tokens[i] += 1
        return Draft(tuple(tokens), CERTAIN, self.predicts(known)) if tokens else NO_DRAFT

    def forget(self, sequence):
        self.ended.append(sequence.request_id)


def text_of(request_id, length=400):
    return [1000 * request_id + i for i in range(length)]


def cheap(num_tokens):
    """A device on which up to 8 tokens are nearly free."""
    return 1.0 + 0.01 * num_tokens if num_tokens <= 8 else 1.08 + 0.2 * (num_tokens - 8)


def dear(num_tokens):
    """A device on which every token costs the same."""
    return float(num_tokens)


class Service:
    """A scheduler with a device that takes `cost` and samples the known texts."""

    def __init__(
        self, cost=cheap, *, wrong=0.0, num_blocks=400, pads=False, most=7, seed=1, **limits
    ):
        config = SchedulerConfig(**{
            "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1000, "max_queries": 1 + most,
        } | limits)  # fmt: skip
        self.scheduler = Scheduler(config, BlockManager(num_blocks, 4), pads_drafts=pads)
        self.texts = {}
        self.drafter = KnownText(self.texts, random.Random(seed), wrong)
        self.scheduler.drafts.drafter = self.drafter
        self.cost, self.seconds, self.outputs = cost, 0.0, []

    def add(self, request_id, num_prompt=5, max_new_tokens=200, **options):
        self.texts[request_id] = text_of(request_id)
        fields = {
            name: options.pop(name)
            for name in ("deterministic", "max_draft_tokens")
            if name in options
        }
        request = make_request(
            request_id, text_of(request_id, num_prompt), max_new_tokens, **options
        )
        request = msgspec.structs.replace(request, **{"deterministic": True} | fields)
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        output = begin(self.scheduler)
        self.scheduler.check_invariants()
        self.outputs.append(output)
        results = []
        for row in (*output.decode, *output.prefill):
            text = self.texts[row.sequence.request_id]
            results.append(
                [Token(text[at]) for at in row.sampled_positions] if row.num_logits else []
            )
        seconds = self.cost(output.num_tokens)
        self.seconds += seconds
        events = commit(self.scheduler, output, results, seconds)
        self.scheduler.check_invariants()
        return events

    def run(self):
        while self.scheduler.has_work:
            self.step()
        assert (
            self.scheduler.block_manager.num_free_blocks == self.scheduler.block_manager.num_blocks
        )
        return self.seconds

    @property
    def lengths(self):
        """The lengths of all drafts, by step."""
        return [
            [] if it.decode.drafts is None else [len(draft) for draft in it.decode.drafts if draft]
            for it in self.outputs
        ]


def test_right_drafts_save_steps_and_change_no_token():
    service = Service()
    sequence = service.add(1)

    seconds = service.run()

    assert output_of(sequence) == text_of(1)[5:205]
    assert seconds < 200 * cheap(1) / 4
    assert max(map(max, filter(None, service.lengths))) == 7
    usage = sequence.usage
    assert usage.num_accepted_tokens == usage.num_draft_tokens == 200 - usage.num_steps
    assert (
        service.drafter.ended == [1]
        or service.scheduler.drafts._records.pop(sequence, None) is not None
    )


def test_wrong_drafts_are_given_up():
    service = Service(wrong=1.0)
    sequence = service.add(1)

    seconds = service.run()

    assert output_of(sequence) == text_of(1)[5:205]
    assert sequence.usage.num_accepted_tokens == 0
    assert seconds < 1.01 * 200 * cheap(1)


def test_a_sequence_whose_text_begins_to_repeat_gets_drafts_again():
    service = Service(wrong=1.0)
    service.add(1, max_new_tokens=390)
    while not service.outputs or len(service.outputs) < 120:
        service.step()
    service.drafter.wrong = 0.0

    before = len(service.outputs)
    service.run()

    assert len(service.outputs) - before < 150


@pytest.mark.parametrize("cost", [cheap, dear])
@pytest.mark.parametrize("num_seqs", [1, 3, 8, 16])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_are_never_much_slower_than_none(cost, num_seqs, wrong):
    times = []
    for most in (7, 0):
        service = Service(cost, wrong=wrong, most=most)
        for turn in range(3):
            if (
                turn == 1
            ):  # those before have shown what tokens cost, and how often drafts are right
                service.seconds = 0.0
            for number in range(num_seqs):
                service.add(1 + turn * num_seqs + number)
            service.run()
        times.append(service.seconds)

    assert times[0] < 1.01 * times[1]


def test_where_every_token_costs_the_same_nothing_is_looked_up():
    service = Service(dear)
    service.add(1)
    service.run()

    assert len(service.drafter.limits) < 40


def test_drafts_of_several_rows_share_what_is_cheap():
    service = Service(wrong=0.1)
    for request_id in (1, 2, 3, 4):
        service.add(request_id)
    service.run()

    totals = [4 + sum(lengths) for lengths in service.lengths if len(lengths) == 4]
    assert totals
    assert 6 < sum(totals) / len(totals) < 16


def test_a_step_has_no_more_tokens_than_memory_was_reserved_for():
    service = Service(lambda n: 1.0, max_num_seqs=12, max_num_batched_tokens=48)
    for request_id in range(1, 13):
        service.add(request_id)
    service.run()

    assert max(it.decode.num_logits for it in service.outputs) == 48
    assert service.scheduler.config.max_logits == 48


@pytest.mark.parametrize("rows", [1, 3])
def test_padded_rows_count_with_the_tokens_of_the_longest(rows):
    asked = []

    def cost(num_tokens):
        return 1.0

    service = Service(cost, pads=True)
    costs = service.scheduler.drafts.kinds[0].costs
    seconds = costs.seconds
    costs.seconds = lambda n: asked.append(n) or seconds(n)
    for request_id in range(1, rows + 1):
        service.add(request_id)
    service.run()

    assert set(asked) <= {n * queries for queries in (1, 2, 4, 8) for n in range(rows + 1)}


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 7), ({"max_draft_tokens": 2}, 2), ({"max_draft_tokens": 0}, 0), ({"max_draft_tokens": 30}, 7),
     ({"deterministic": False}, 0)],
)  # fmt: skip
def test_a_request_limits_its_drafts(options, most):
    service = Service()
    service.add(1, **options)
    service.run()

    assert max(map(max, filter(None, service.lengths)), default=0) == most


def test_rows_of_one_step_have_drafts_or_none_as_their_requests_want():
    service = Service()
    plain = service.add(1, max_draft_tokens=0)
    service.add(2)
    service.run()

    assert plain.usage.num_draft_tokens == 0
    assert plain.usage.num_steps >= 199
    assert any(service.lengths)


def test_no_draft_passes_the_end_of_a_sequence():
    service = Service()
    sequence = service.add(1, max_new_tokens=9)
    service.run()

    assert sequence.num_output_tokens == 9
    ends = [row.start + row.num_tokens for it in service.outputs for row in it.decode]
    assert max(ends) < sequence.max_num_tokens


def test_no_sequence_is_preempted_for_a_draft():
    service = Service(num_blocks=30, max_num_seqs=3)
    for request_id in (1, 2, 3):
        service.add(request_id, max_new_tokens=33)
    service.run()

    assert service.scheduler.num_preemptions == 0
    assert any(service.lengths)


def test_sequences_that_are_preempted_keep_their_texts():
    service = Service(num_blocks=40, max_num_seqs=3)
    sequences = [service.add(request_id, max_new_tokens=90) for request_id in (1, 2, 3)]
    service.run()

    assert service.scheduler.num_preemptions
    for sequence in sequences:
        assert output_of(sequence) == text_of(sequence.request_id)[5:95]


def test_steps_with_prompts_have_no_drafts():
    service = Service()
    service.add(1)
    for request_id in range(2, 9):
        service.step()
        service.add(request_id, max_new_tokens=20)
    service.run()

    assert all(it.decode.drafts is None for it in service.outputs if it.prefill)


def test_a_sequence_that_ends_is_dropped():
    service = Service()
    for request_id in range(1, 6):
        service.add(request_id, max_new_tokens=20 * request_id)
    service.run()
    service.add(6)
    service.run()

    assert service.drafter.ended == [1, 2, 3, 4, 5]


def test_accepted_tokens_are_counted_by_place():
    service = Service(wrong=0.2)
    sequence = service.add(1)
    service.run()

    counts = service.scheduler.accounting.num_accepted_tokens
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == sequence.usage.num_accepted_tokens > 0
    assert service.scheduler.accounting.num_draft_tokens == sequence.usage.num_draft_tokens
    assert service.scheduler.accounting.num_drafts == sum(map(len, service.lengths))


def test_the_next_step_is_expected_to_have_drafts_where_those_before_it_were_right():
    service = Service()
    service.add(1)
    expected = []
    for _ in range(20):
        expected.append(service.scheduler.expects_drafts)
        service.step()

    assert not expected[0]
    assert all(expected[5:])


def test_a_token_in_flight_stands_first_in_what_is_expected():
    service = Service()
    sequence = service.add(1, max_new_tokens=12)
    for _ in range(3):
        service.step()
    output = begin(service.scheduler)

    assert sequence.num_tokens_in_flight == output.decode.num_logits
    if output.decode.drafts is None:
        assert isinstance(service.scheduler.expects_drafts, bool)
    [row] = output.decode
    commit(service.scheduler, output, [[Token(text_of(1)[at]) for at in row.sampled_positions]])
    service.run()
    assert output_of(sequence) == text_of(1)[5:17]


@pytest.mark.parametrize("num_seqs", [1, 3, 7])
def test_any_sequence_has_drafts_in_steps_of_few_rows(num_seqs):
    service = Service(exact_rows=8)
    for i in range(num_seqs):
        service.add(i, deterministic=False)
    service.run()

    decodes = [output.decode for output in service.outputs if not output.prefill]
    assert all(decode.num_tokens <= 8 for decode in decodes)
    assert any(decode.drafts for decode in decodes)
    assert len(service.outputs) < 200


@pytest.mark.parametrize("fields", [{}, {"exact_rows": 8}])
def test_no_other_sequence_has_drafts_where_its_bits_depend_on_the_rows(fields):
    service = Service(num_blocks=600, **fields)
    others = [service.add(i, deterministic=False) for i in range(8)]
    one = service.add(8) if fields else others[0]
    while one.finish_reason is None:
        service.step()
        batch, drafts = service.outputs[-1].decode.batch, service.outputs[-1].decode.drafts or ()
        drafted = [it for it, draft in zip(batch.sequences, drafts, strict=False) if draft]
        assert set(drafted) <= ({one} if fields else set())


def test_a_sequence_with_an_adapter_has_drafts_only_if_it_is_deterministic():
    for deterministic in (False, True):
        service = Service(exact_rows=8)
        service.add(1, deterministic=deterministic).adapter = AdapterRef("a", "folder", "digest")
        service.run()

        assert any(it.decode.drafts for it in service.outputs) is deterministic


def test_a_step_that_scores_a_prompt_has_no_draft():
    service = Service(exact_rows=8)
    service.add(1, deterministic=False)
    for _ in range(12):
        service.step()
    policy, others = service.scheduler.drafts, service.outputs[-1].decode.batch.sequences
    assert policy.choose(others)
    one = service.add(2, num_prompt=1, deterministic=False)
    one.sampling = msgspec.structs.replace(one.sampling, prompt_logprobs=True)

    assert policy.choose([*others, one]) is None


def test_beside_a_grammar_whose_forced_tokens_are_skipped_nothing_is_proposed():
    service = Service(exact_rows=8)
    service.add(1, deterministic=False)
    one = service.add(2, deterministic=False)
    for _ in range(12):
        service.step()
    policy, both = service.scheduler.drafts, service.outputs[-1].decode.batch.sequences
    assert policy.choose(both)
    one.sampling = msgspec.structs.replace(one.sampling, grammar="{}")

    assert policy.choose(both) is None
    assert not policy.expects(both)


def test_a_deterministic_row_that_does_not_sample_makes_the_step_deterministic():
    service = Service(exact_rows=8)
    one, other = service.add(1), service.add(2, deterministic=False)
    service.step()
    policy = service.scheduler.drafts
    policy.kinds[0].costs.note(2, 1.0)
    policy.kinds[1].costs.note(2, 1.0)

    assert policy.choose([other, one], 1) is None


def test_no_step_has_drafts_once_its_rows_have_other_bits():
    service = Service(exact_rows=8)
    service.scheduler.drafts.has_exact_rows = lambda: False
    service.add(1, deterministic=False)
    service.run()

    assert not any(it.decode.drafts for it in service.outputs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_with_adapters_count_only_where_such_steps_may_have_drafts(deterministic):
    service = Service(exact_rows=8)
    service.add(1, deterministic=deterministic).adapter = AdapterRef("a", "folder", "digest")
    service.add(2, deterministic=deterministic)
    service.run()

    measured = [it.seconds(2, 2, 1) > 0 for it in service.scheduler.drafts.kinds]
    assert measured == [False, False, deterministic]


def test_drafts_of_steps_with_adapters_depend_on_the_cost_of_such_steps_alone():
    plain, adapted = Service(dear), Service(cheap)
    adapted.scheduler.drafts = plain.scheduler.drafts
    for service in (plain, adapted):
        sequence = service.add(1)
        if service is adapted:
            sequence.adapter = AdapterRef("a", "folder", "digest")
        service.drafter = adapted.scheduler.drafts.drafter = KnownText(service.texts)
        service.run()

    counts = [sum(bool(it.decode.drafts) for it in service.outputs) for service in (plain, adapted)]
    assert counts[0] < 5 < counts[1], "of those for which the costs are known to be high, a probe"


def test_a_step_of_several_tokens_is_computed_as_a_power_of_two():
    asked = []
    service = Service(exact_rows=8)
    costs = service.scheduler.drafts.kinds[1].costs
    seconds = costs.seconds
    costs.seconds = lambda n: asked.append(n) or seconds(n)
    for i in range(3):
        service.add(i, deterministic=False)
    service.run()

    assert set(asked) == {1, 2, 4, 8}


def test_drafts_of_a_prediction_are_counted_by_themselves():
    for predicts, share in ((lambda _: True, 1), (lambda _: False, 0)):
        service = Service(wrong=0.3)
        service.drafter.predicts = predicts
        sequence = service.add(1)
        service.run()

        used = sequence.usage
        assert 0 < used.num_accepted_tokens < used.num_draft_tokens
        assert used.num_predicted_tokens == share * used.num_draft_tokens
        assert used.num_accepted_predicted_tokens == share * used.num_accepted_tokens


def test_of_drafts_from_two_texts_only_those_of_the_prediction_count():
    service = Service()
    service.drafter.predicts = lambda known: known < 100
    sequence = service.add(1)
    service.run()

    used = sequence.usage
    assert 80 < used.num_predicted_tokens < 110
    assert used.num_predicted_tokens == used.num_accepted_predicted_tokens
    assert used.num_draft_tokens > used.num_predicted_tokens + 50
