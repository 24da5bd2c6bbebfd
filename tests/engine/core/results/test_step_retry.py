"""Failed steps: an arithmetic model with injected faults; only the sequences that make a step fail end."""

import random

import pytest

from server.engine.core.messages import AbortRequests, EngineConfig
from server.engine.core.request import FinishReason
from server.engine.core.results.step_retry import OUT_OF_MEMORY, STEP_FAILED
from tests.engine.core.bookkeeping import make_request
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
