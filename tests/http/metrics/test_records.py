"""A request is counted once, and the wait between its tokens is that of each token."""

from types import SimpleNamespace

import pytest

from server.engine.core.request import FinishReason
from server.errors import (
    AbortedError,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
    ValidationError,
)
from server.http.body.request_body import ClientDisconnectedError
from server.http.metrics.records import RequestRecord, outcome_of
from server.http.metrics.specs import Outcome
from server.http.metrics.usage import RequestUsage

HISTOGRAMS = (
    "ttft", "itl", "duration", "validation", "queue", "prefill", "decode", "inference", "time_per_token",
    "prompt_length", "output_length", "max_new_tokens",
)  # fmt: skip


class Observed:
    """A histogram that keeps each value."""

    def __init__(self):
        self.values = []

    def observe(self, value, times=1):
        self.values += [value] * times


@pytest.fixture
def metrics():
    counted = []
    histograms = {name: Observed() for name in HISTOGRAMS}
    count = SimpleNamespace(
        counted=counted, count_request=lambda endpoint, outcome: counted.append((endpoint, outcome))
    )
    return SimpleNamespace(**histograms, **vars(count))


def succeed(record, reason=FinishReason.LENGTH, **sizes):
    usage = RequestUsage(
        queue_ms=100.0,
        prefill_ms=300.0,
        decode_ms=1500.0,
        computed_prompt_tokens=7,
        cached_prompt_tokens=0,
        recomputed_tokens=0,
        steps=4,
        device_seconds=1.0,
        kv_block_seconds=1.0,
    )
    given = {"prompt_tokens": 7, "completion_tokens": 10, "longest": 6, "max_new_tokens": 32}
    record.succeed(reason, usage=usage, submitted=record.started + 0.25, **given | sizes)


def values_of(metrics):
    return {name: getattr(metrics, name).values for name in HISTOGRAMS}


def test_tokens_that_come_together_share_the_wait_since_the_tokens_before(metrics):
    record = RequestRecord(metrics, "generate")
    clock = record.clock()
    for count, after in ((1, 1.0), (1, 1.5), (4, 3.5), (2, 3.5), (1, 4.0)):
        clock.tokens(count, record.started + after)

    assert metrics.ttft.values == pytest.approx([1.0])
    assert metrics.itl.values == pytest.approx([0.5, *[0.5] * 4, 0.0, 0.0, 0.5])
    assert sum(metrics.itl.values) == pytest.approx(4.0 - 1.0)


def test_several_first_tokens_are_one_first_token_and_wait_for_none(metrics):
    record = RequestRecord(metrics, "generate")
    record.clock().tokens(3, record.started + 2.0)

    assert metrics.ttft.values == pytest.approx([2.0])
    assert metrics.itl.values == []


def test_each_sequence_has_a_clock_and_the_request_the_first_of_their_first_tokens(metrics):
    record = RequestRecord(metrics, "generate")
    first, second = record.clock(), record.clock()
    first.tokens(1, record.started + 1.0)
    second.tokens(1, record.started + 3.0)
    first.tokens(1, record.started + 4.0)
    second.tokens(2, record.started + 5.0)

    assert metrics.ttft.values == pytest.approx([1.0, 3.0])
    assert metrics.itl.values == pytest.approx([3.0, 1.0, 1.0])
    assert record.first_token_seconds == pytest.approx(1.0)


def test_a_success_is_counted_and_observed_once(metrics):
    record = RequestRecord(metrics, "generate")
    succeed(record, FinishReason.EOS)
    observed = {name: list(values) for name, values in values_of(metrics).items()}

    succeed(record, FinishReason.LENGTH)
    record.finish(Outcome.ERROR)
    with pytest.raises(ValueError, match="late"), record:
        raise ValueError("late")

    assert metrics.counted == [("generate", Outcome.EOS_TOKEN)]
    assert record.outcome is Outcome.EOS_TOKEN
    assert values_of(metrics) == observed
    [duration] = observed.pop("duration")
    assert duration > 0
    assert observed.pop("validation") == pytest.approx([0.25])
    assert observed == {
        "ttft": [], "itl": [], "queue": [0.1], "prefill": [0.3], "decode": [1.5], "inference": [1.8],
        "time_per_token": [0.3], "prompt_length": [7], "output_length": [10], "max_new_tokens": [32],
    }  # fmt: skip


def test_a_request_that_was_counted_observes_no_success_afterwards(metrics):
    record = RequestRecord(metrics, "generate")
    record.finish(Outcome.ABORT)
    succeed(record, None)
    record.finish(Outcome.OK)

    assert metrics.counted == [("generate", Outcome.ABORT)]
    assert not any(values_of(metrics).values())


def test_an_exception_counts_a_request_and_its_end_without_one_does_not(metrics):
    with RequestRecord(metrics, "tokenize") as record:
        pass
    assert (metrics.counted, record.outcome) == ([], None)
    with pytest.raises(OverloadedError), record:
        raise OverloadedError
    assert metrics.counted == [("tokenize", Outcome.OVERLOADED)]


@pytest.mark.parametrize(("longest", "expected"), [(1, []), (2, [1.5])])
def test_the_time_for_each_token_needs_two_tokens(metrics, longest, expected):
    succeed(RequestRecord(metrics, "generate"), longest=longest)

    assert metrics.time_per_token.values == expected


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.EOS, "eos_token"),
        (FinishReason.STOP, "stop_sequence"),
        (FinishReason.TIMEOUT, "timeout"),
    ],
)
def test_a_success_is_counted_by_the_reason_for_its_end(metrics, reason, outcome):
    succeed(RequestRecord(metrics, "generate"), reason)

    assert [(endpoint, counted.value) for endpoint, counted in metrics.counted] == [
        ("generate", outcome)
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClientDisconnectedError(), "abort"),
        (AbortedError(), "abort"),
        (DeadlineExceededError(), "timeout"),
        (ValidationError("wrong"), "validation"),
        (OverloadedError(), "overloaded"),
        (UnavailableError("starting"), "unavailable"),
        (ValueError("a mistake"), "error"),
        (KeyboardInterrupt(), "error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_each_error_has_an_outcome(error, outcome):
    assert outcome_of(error).value == outcome
