"""Failed steps: an arithmetic model with injected faults; only the sequences that make a step fail end."""

import itertools
import logging
import random
from types import SimpleNamespace

import pytest

from server.engine.core.messages import AbortRequests, EngineConfig
from server.engine.core.progress import Progress
from server.engine.core.request import FinishReason
from server.engine.core.results.step_retry import (
    OUT_OF_MEMORY,
    STEP_FAILED,
    retry_step,
)
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.step import PromptLogprobs, SampledRows, ScheduledSequence, StepResult
from tests.engine.core.bookkeeping import Token, make_request, make_sequence
from tests.engine.link.fake_engine import ArithmeticRunner, make_engine, next_token
from tests.faults.engine import inject
from tests.faults.runner import InjectedError


class Channel:
    def __init__(self):
        self.incoming = []
        self.messages = []

    def send(self, message):
        self.messages.append(message)

    def receive(self, *, wait):
        messages, self.incoming = self.incoming, []
        return messages

    def events(self):
        found = {}
        for message in self.messages:
            for i, request_id in enumerate(message.request_ids):
                found.setdefault(request_id, []).append(message.event(i))
        return found


class Harness:
    """An engine with faults, whose launches are counted."""

    def __init__(self, *faults, runs_ahead=False, num_blocks=256, **config):
        self.channel = Channel()
        config = EngineConfig(model_path="ok", model_id="test", **config)
        self.engine = make_engine(config, self.channel, num_blocks)
        self.engine._runs_ahead = runs_ahead
        self.runner = inject(self.engine, *faults)
        self.launched = []
        launch = self.runner.launch

        def count(output):
            rows = (*output.decode, *output.prefill)
            self.launched.append((output.step, [r.sequence.request_id for r in rows]))
            return launch(output)

        self.runner.launch = count

    def submit(self, *requests):
        self.channel.incoming += requests
        self.engine.receive(wait=0)

    def run(self, most_steps=1000):
        for _ in range(most_steps):
            if not self.engine.has_work:
                return self.channel.events()
            self.engine.receive(wait=0)
            self.engine.step()
            self.engine._scheduler.check_invariants()
        raise AssertionError("the engine still has work")

    def assert_idle(self):
        self.engine.check_idle()
        assert self.engine.stats().num_invariant_violations == 0


def expected_tokens(request):
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt_token_ids) :]


def tokens_of(events):
    return [event.token_id for event in events if event.token_id is not None]


def requests(count, prompt=5, max_new_tokens=8):
    return [make_request(i, prompt + i % 3, max_new_tokens) for i in range(count)]


@pytest.mark.parametrize(
    ("fault", "error"), [("raise", STEP_FAILED), ("oom", OUT_OF_MEMORY)], ids=["raise", "oom"]
)
@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.parametrize("step", [1, 4])
def test_a_sequence_that_makes_steps_fail_ends_alone(fault, error, row, step):
    harness = Harness(f"{fault}@step={step}:row={row}")
    made = requests(7)
    harness.submit(*made)

    events = harness.run()

    (failed,) = [i for i, found in events.items() if found[-1].finish_reason is FinishReason.ERROR]
    assert events[failed][-1].error == error
    assert len(tokens_of(events[failed])) == step - 1
    for request in made:
        if request.request_id != failed:
            assert tokens_of(events[request.request_id]) == expected_tokens(request)
            assert events[request.request_id][-1].finish_reason is FinishReason.LENGTH
    assert harness.engine.stats().num_failed_steps == 1
    harness.assert_idle()


@pytest.mark.parametrize("fault", ["raise@step=3", "oom@step=3", "raise@step=3:times=2"])
def test_a_temporary_failure_ends_no_sequence(fault):
    harness = Harness(fault)
    made = requests(5)
    harness.submit(*made)

    events = harness.run()

    assert all(tokens_of(events[r.request_id]) == expected_tokens(r) for r in made)
    assert harness.engine.stats().num_failed_steps == 1
    harness.assert_idle()


def test_a_step_that_failed_once_is_computed_again_as_a_whole():
    harness = Harness("raise@step=3")
    harness.submit(*requests(5))
    harness.run()

    computed = [ids for step, ids in harness.launched if step == 2]
    assert computed == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("count", [2, 5, 16, 64])
def test_a_culprit_is_found_in_a_logarithmic_number_of_launches(count):
    rng = random.Random(count)
    harness = Harness(f"raise@step=2:row={rng.randrange(count)}")
    harness.submit(*requests(count))
    harness.run()

    num_launches = sum(step == 1 for step, _ in harness.launched)
    assert num_launches <= 2 + 2 * (count - 1).bit_length()


def test_two_culprits_are_both_found():
    harness = Harness("raise@step=2:row=3, oom@step=2:row=11")
    made = requests(16)
    harness.submit(*made)

    events = harness.run()

    failed = {i for i, found in events.items() if found[-1].finish_reason is FinishReason.ERROR}
    assert failed == {3, 11}
    for request in made:
        if request.request_id not in failed:
            assert tokens_of(events[request.request_id]) == expected_tokens(request)
    harness.assert_idle()


def test_memory_that_suffices_for_half_a_step_ends_no_sequence(monkeypatch):
    launch = ArithmeticRunner.launch

    def small(runner, output):
        if len(output.decode) + len(output.prefill) > 4:
            raise MemoryError
        return launch(runner, output)

    monkeypatch.setattr(ArithmeticRunner, "launch", small)
    harness = Harness()
    made = requests(7)
    harness.submit(*made)

    events = harness.run()

    assert all(tokens_of(events[r.request_id]) == expected_tokens(r) for r in made)


def test_a_step_of_which_nothing_can_be_computed_fails_all_its_sequences_after_a_few_launches():
    harness = Harness("raise@step=2:times=0")
    harness.submit(*requests(40))

    events = harness.run()

    assert {found[-1].error for found in events.values()} == {STEP_FAILED}
    assert sum(step == 1 for step, _ in harness.launched) == 8
    harness.assert_idle()


def test_the_engine_ends_after_five_steps_in_sequence_of_which_nothing_can_be_computed():
    harness = Harness("raise@step=2:times=0")
    harness.submit(*requests(1))
    harness.run()
    for i in range(1, 4):
        harness.submit(make_request(i, 3))
        harness.run()

    harness.submit(make_request(9, 3))
    with pytest.raises(InjectedError):
        harness.run()

    assert harness.channel.events()[9][-1].error == STEP_FAILED


def test_a_step_between_failures_keeps_the_engine_running():
    harness = Harness("raise@step=1:row=0:every=1")
    for i in range(20):
        poison, healthy = make_request(2 * i, 4), make_request(2 * i + 1, 3, 2)
        harness.submit(poison, healthy)
        events = harness.run()
        assert events[2 * i][-1].error == STEP_FAILED


def test_after_an_error_that_breaks_the_device_the_sequences_end_and_the_engine_too():
    harness = Harness("fatal@step=2")
    harness.submit(*requests(3))

    with pytest.raises(InjectedError):
        harness.run()

    assert {found[-1].error for found in harness.channel.events().values()} == {STEP_FAILED}


def test_a_device_that_breaks_while_a_step_is_computed_again_ends_the_engine():
    harness = Harness("raise@step=2, fatal@step=2")
    harness.submit(*requests(3))

    with pytest.raises(InjectedError, match="fatal"):
        harness.run()

    assert {found[-1].error for found in harness.channel.events().values()} == {STEP_FAILED}


def test_a_row_that_is_not_a_number_ends_alone_and_its_prompt_works_afterwards():
    harness = Harness("nan@step=3:row=1")
    made = requests(4)
    harness.submit(*made)

    events = harness.run()

    assert events[1][-1].finish_reason is FinishReason.ERROR
    assert "finite" in events[1][-1].error
    assert len(tokens_of(events[1])) == 2
    for i in (0, 2, 3):
        assert tokens_of(events[i]) == expected_tokens(made[i])
    again = make_request(1, 6, 8)
    harness.channel.messages.clear()
    harness.submit(again)
    assert tokens_of(harness.run()[1]) == expected_tokens(again)
    harness.assert_idle()


def test_sequences_aborted_between_launch_and_failure_do_not_take_part_again():
    class Later:
        feeds_next = True

        def sample(self):
            pass

        def result(self):
            raise RuntimeError("a late error")

    harness = Harness(runs_ahead=True)
    made = requests(4)
    harness.submit(*made)
    launch = harness.runner.launch
    harness.runner.launch = lambda output: (
        launch(output) and Later() if output.step == 0 else launch(output)
    )
    harness.engine.step()
    harness.runner.launch = launch
    harness.submit(AbortRequests([2]))

    events = harness.run()

    assert harness.launched[-1]
    assert [ids for step, ids in harness.launched if step == 0][1] == [0, 1, 3]
    for i in (0, 1, 3):
        assert tokens_of(events[i]) == expected_tokens(made[i])
    harness.assert_idle()


def test_prompt_log_probabilities_of_a_step_computed_in_parts_reach_every_client(monkeypatch):
    """Prompts of more than one chunk too: what earlier steps computed is kept."""
    launch = ArithmeticRunner.launch

    def scored(runner, output):
        pending = launch(runner, output)
        result = pending.result()
        result.prompt_logprobs = {
            row.sequence.request_id: PromptLogprobs(
                row.start, [-1.0 * (row.start + i) for i in range(row.num_tokens)]
            )
            for row in output.prefill
        }
        return pending

    monkeypatch.setattr(ArithmeticRunner, "launch", scored)
    harness = Harness("raise@step=1:row=2, raise@step=2:row=0")
    lengths = [5, 400, 7, 9, 6, 300]
    made = [make_request(i, n, 2, prompt_logprobs=True) for i, n in enumerate(lengths)]
    harness.submit(*made)

    events = harness.run()

    found = {}
    for message in harness.channel.messages:
        for request_id, logprobs in message.prompt_logprobs.items():
            assert request_id not in found
            found[request_id] = logprobs
    failed = {i for i, e in events.items() if e[-1].finish_reason is FinishReason.ERROR}
    assert 1 <= len(failed) <= 2
    for request, length in zip(made, lengths, strict=True):
        if request.request_id not in failed:
            assert found[request.request_id][: length - 1] == [-1.0 * i for i in range(length - 1)]
    harness.assert_idle()


@pytest.fixture
def with_states(monkeypatch):
    """Let no step be computed again, as where layers have states of fixed size."""
    monkeypatch.setattr(Scheduler, "repeats_steps", property(lambda scheduler: False))


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("fault", ["raise@step=3", "oom@step=1", "raise@step=3:times=2"])
@pytest.mark.usefixtures("with_states")
def test_sequences_of_a_step_that_replaced_states_begin_again(fault, ahead):
    harness = Harness(fault, runs_ahead=ahead)
    made = requests(5)
    harness.submit(*made)

    events = harness.run()

    assert all(tokens_of(events[r.request_id]) == expected_tokens(r) for r in made)
    assert harness.engine.stats().num_preemptions >= 5
    harness.assert_idle()


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("place", [0, 4, 11])
@pytest.mark.usefixtures("with_states")
def test_a_sequence_that_makes_steps_fail_which_replaced_states_ends_alone(place, ahead):
    harness = Harness(runs_ahead=ahead)
    made = requests(12)
    made[place].prompt_token_ids[1] = 666
    harness.submit(*made)

    events = harness.run()

    assert events[place][-1].error == STEP_FAILED
    for request in made[:place] + made[place + 1 :]:
        assert tokens_of(events[request.request_id]) == expected_tokens(request)
    assert harness.engine.stats().num_failed_steps <= 6
    assert not harness.engine._scheduler._live.suspects
    harness.assert_idle()


@pytest.mark.usefixtures("with_states")
def test_a_lone_sequence_begins_again_once():
    harness = Harness()
    made = make_request(0, [1, 666, 3], 8)
    harness.submit(made)

    events = harness.run()

    assert events[0][-1].error == STEP_FAILED
    assert len(harness.launched) == 2
    harness.assert_idle()


@pytest.mark.usefixtures("with_states")
def test_the_engine_ends_if_every_sequence_makes_its_step_fail():
    harness = Harness()
    harness.submit(*(make_request(i, [i, 666, 3], 8) for i in range(12)))

    with pytest.raises(RuntimeError, match="token 666"):
        harness.run()
    assert len(harness.channel.events()) == 5


# The retry alone: a runner that fails with every part that has a culprit.


def rows_of(num_decode, num_prefill=0, drafts=()):
    """Return rows of new sequences, of which the first may have drafts; their request ids are their places."""
    sequences = [make_sequence(i, 4) for i in range(num_decode + num_prefill)]
    return [
        ScheduledSequence(sequence, 3, 1 + len(draft), 1 + len(draft), draft)
        if i < num_decode
        else ScheduledSequence(sequence, 0, 4, 1)
        for i, (sequence, draft) in enumerate(
            itertools.zip_longest(sequences, drafts, fillvalue=())
        )
    ]


class CulpritRunner:
    """Computes parts without culprits: 100 times the request id, and one more for each further row of logits."""

    def __init__(self, *culprits, error=RuntimeError, fails=None, recovers=True):
        self.fails = fails or (lambda ids: not set(culprits).isdisjoint(ids))
        self.error, self.recovers, self.parts, self.num_tokens = error, recovers, [], []

    def launch(self, part):
        rows = (*part.decode, *part.prefill)
        ids = [row.sequence.request_id for row in rows]
        self.parts.append(ids)
        self.num_tokens.append(part.num_tokens)
        assert [row.is_decode for row in rows] == [True] * len(part.decode) + [False] * len(
            part.prefill
        )
        assert (part.step, part.first_scheduled, part.preempted) == (8, (), ())
        if self.fails(ids):
            raise self.error(f"launch {len(self.parts)}")
        tokens = [
            [Token(100 * i + at) for at in range(row.num_logits)]
            for i, row in zip(ids, rows, strict=True)
        ]
        decode = [token for found in tokens[: len(part.decode)] for token in found]
        scores = {row.sequence.request_id: PromptLogprobs(0, [-1.0]) for row in part.prefill}
        result = StepResult(SampledRows.of(decode, tokens[len(part.decode) :]), scores)
        return SimpleNamespace(sample=lambda: None, result=lambda: result)

    def recover(self, error):
        return self.recovers


def retry(runner, rows, progress=None):
    """Compute step 8 again; return what was retried, the failed places, and check the results of the others."""
    retried = retry_step(runner, 8, rows, progress)
    assert set(retried.results) == {row.sequence for row in rows}
    failed = []
    for place, row in enumerate(rows):
        results = retried.results[row.sequence]
        if results[0].error is not None:
            assert len(results) == 1
            failed.append(place)
        else:
            assert [r.token_id for r in results] == [
                100 * place + at for at in range(row.num_logits)
            ]
    return retried, failed


PAIRS = [(n, *pair) for n in range(2, 14) for pair in itertools.combinations(range(n), 2)]
LARGE = [
    (n, *pair)
    for n in (16, 17, 31, 64, 100, 255, 1000)
    for pair in (
        (0, 1),
        (0, n - 1),
        (n // 2 - 1, n // 2),
        (n - 2, n - 1),
        sorted(random.Random(n).sample(range(n), 2)),
    )
]


@pytest.fixture
def without_logs(caplog):
    """Tracebacks of the many errors would take most of the time."""
    caplog.set_level(logging.CRITICAL, "tessera.engine")


@pytest.mark.usefixtures("without_logs")
def test_a_culprit_at_any_place_of_a_step_of_any_size_ends_alone():
    for num_rows in range(1, 24):
        for culprit in range(num_rows):
            retried, failed = retry(CulpritRunner(culprit), rows_of(num_rows))

            assert failed == [culprit]
            assert (retried.error is None) is (num_rows > 1)


@pytest.mark.usefixtures("without_logs")
def test_two_culprits_at_any_places_of_a_step_of_any_size_end_alone():
    for num_rows, *culprits in [*PAIRS, *LARGE]:
        num_prefill = num_rows // 3

        retried, failed = retry(
            CulpritRunner(*culprits), rows_of(num_rows - num_prefill, num_prefill)
        )

        assert failed == culprits, num_rows
        assert (retried.error is None) is (num_rows > 2)
        assert not retried.is_broken


@pytest.mark.usefixtures("without_logs")
@pytest.mark.parametrize(("num_rows", "launches"), [(64, 7 + 4 * 7), (1000, 7 + 4 * 10)])
def test_more_culprits_than_two_end_a_step_after_a_bounded_number_of_launches(num_rows, launches):
    """The first quarter is sound. What could not be computed in time ends with the culprits."""
    runner = CulpritRunner(*range(num_rows // 4 + 1, num_rows, 2))

    retried, failed = retry(runner, rows_of(num_rows))

    assert failed == list(range(num_rows // 4, num_rows))
    assert len(runner.parts) == launches
    assert retried.error is None


def test_a_step_of_which_no_part_can_be_computed_reports_why_and_fails_all_rows():
    runner = CulpritRunner(fails=lambda ids: True)

    retried, failed = retry(runner, rows_of(30, 3))

    assert failed == list(range(33))
    assert [len(part) for part in runner.parts] == [33, 16, 17, 8, 8, 8, 9]
    assert str(retried.error) == "launch 7"
    assert {found[0].error for found in retried.results.values()} == {STEP_FAILED}


def test_prompt_log_probabilities_of_all_parts_are_kept():
    rows = rows_of(2, 9)

    retried, failed = retry(CulpritRunner(5), rows)

    assert failed == [5]
    assert set(retried.prompt_logprobs) == {2, 3, 4, 6, 7, 8, 9, 10}


def test_rows_with_drafts_get_the_results_of_all_their_rows_of_logits_in_every_part():
    rows = rows_of(5, 2, drafts=[(7, 8), (), (9,)])
    runner = CulpritRunner(4)

    _, failed = retry(runner, rows)

    assert failed == [4]
    assert (runner.parts[0], runner.num_tokens[0]) == (
        [0, 1, 2, 3, 4, 5, 6],
        3 + 1 + 2 + 1 + 1 + 4 + 4,
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError, OUT_OF_MEMORY),
        (lambda text: RuntimeError(f"CUDA out of memory. {text}"), OUT_OF_MEMORY),
        (RuntimeError, STEP_FAILED),
        (ValueError, STEP_FAILED),
    ],
)
def test_a_sequence_that_fails_alone_learns_whether_memory_was_the_cause(error, reason):
    rows = rows_of(4)

    retried, failed = retry(CulpritRunner(2, error=error), rows)

    assert failed == [2]
    assert retried.results[rows[2].sequence][0].error == reason


def test_nothing_is_computed_on_a_device_that_does_not_work_any_more():
    runner = CulpritRunner(3, recovers=False)

    retried, failed = retry(runner, rows_of(8))

    assert retried.is_broken
    assert (len(runner.parts), failed) == (1, list(range(8)))
    assert str(retried.error) == "launch 1"


def test_results_that_came_before_the_device_broke_are_kept():
    runner = CulpritRunner(7)
    runner.recover = lambda error: len(runner.parts) < 3

    retried, failed = retry(runner, rows_of(8))

    assert runner.parts == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert failed == [4, 5, 6, 7]
    assert str(retried.error) == "launch 3"


def test_a_step_without_rows_is_not_computed():
    runner = CulpritRunner()

    retried, failed = retry(runner, [])

    assert (runner.parts, failed, retried.error, retried.is_broken) == ([], [], None, False)


def test_each_part_counts_as_progress_so_that_a_long_retry_is_no_hang():
    progress, runner = Progress(), CulpritRunner(3)
    before = progress.count

    retry(runner, rows_of(8), progress)

    assert progress.count - before == len(runner.parts) == 7
