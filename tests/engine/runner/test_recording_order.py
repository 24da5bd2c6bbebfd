"""Which recordings are made and when, and which one a step uses."""

from types import SimpleNamespace

import pytest
import torch

from model.executors.columns import Bucket
from server.engine.core.limits import SchedulerConfig
from server.engine.core.step import DecodeRows, ScheduledSequence
from server.engine.runner.step.recordings import RecordedSteps
from server.engine.runner.step.sampled_tokens import SampledTokens
from tests.engine.core.bookkeeping import make_sequence

CPU = torch.device("cpu")
EXECUTORS = SimpleNamespace(replaces_single_launch=lambda _error: False)
MODEL = SimpleNamespace(network=SimpleNamespace(vocab=5), dtype=torch.float32, executors=EXECUTORS)
CACHE = SimpleNamespace(device=CPU, block_size=8, spec=SimpleNamespace(slot_bytes=0))
LIMITS = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=16, max_model_len=64)
BROKEN = 13


def bucket(rows):
    return Bucket(rows=rows, columns=8, num_logits=rows)


class Steps(RecordedSteps):
    """Recordings of buckets that are identified by their rows."""

    def __init__(self, first=()):
        super().__init__(MODEL, CACHE, self, SampledTokens(17, CPU), LIMITS)
        self._waiting = [bucket(rows) for rows in first]

    @property
    def made(self):
        return [it.rows for it in self.recorded]

    def record(self, _compute):
        return lambda: None

    def _make(self, it, out):
        if it.rows == BROKEN:
            raise RuntimeError("out of memory")
        return super()._make(it, out)

    def find(self, *rows, waits=True):
        found = self._first(map(bucket, rows), waits=waits)
        return None if found is None else found.step.input.bucket.rows


def test_recordings_are_made_in_order_and_missed_ones_first():
    steps = Steps([1, 2, 3])
    assert steps.record_next()

    assert steps.find(3) is None
    while steps.record_next():
        pass

    assert steps.made == [1, 3, 2]
    assert steps.find(3) == 3
    assert not steps.record_next()


def test_the_third_step_without_any_recording_makes_its_own():
    steps = Steps([1])

    assert [steps.find(5) for _ in range(3)] == [None] * 3

    assert steps.made == [5]
    assert steps.find(5) == 5


def test_a_step_uses_a_larger_recording_until_its_own_is_made():
    steps = Steps([8])
    steps.record_next()

    found = [steps.find(5, 6, 8, 9) for _ in range(64)]

    assert found == [8] * 64
    assert steps.made == [8, 5]
    assert steps.find(5, 6, 8, 9) == 5


def test_recordings_for_steps_that_never_wait_are_made_next_in_idle_time():
    steps = Steps([1, 2])

    assert [steps.find(5, 8, waits=False) for _ in range(100)] == [None] * 100
    assert steps.made == []
    steps.record_next()

    assert steps.made == [5]


def test_the_recording_of_a_step_that_used_a_larger_one_is_made_next_in_idle_time():
    steps = Steps([8, 1, 2])
    steps.record_next()

    steps.find(5, 8)
    steps.record_next()

    assert steps.made == [8, 5]


def test_after_a_failed_recording_no_more_are_made_and_existing_ones_stay():
    steps = Steps([1, BROKEN, 2])

    while steps.record_next():
        pass

    assert steps.made == [1]
    assert [steps.find(4) for _ in range(5)] == [None] * 5
    assert steps.find(4, 1) == 1
    assert steps.made == [1]


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_fits_in_no_bucket_requests_no_recording(waits):
    steps = Steps([1])

    assert steps.find(waits=waits) is None
    assert steps.record_next()
    assert steps.made == [1]


def test_a_step_whose_best_recording_exists_finds_it_again_until_a_better_one_is_needed():
    steps = Steps()
    both = [ScheduledSequence(make_sequence(i, 3), 2, 1, 1) for i in range(2)]
    rows, one = DecodeRows.of(both), DecodeRows.of(both[:1])
    for _ in range(3):
        steps._find(rows, (), waits=True)
    found = steps._find(rows, (), waits=True)

    assert found is not None
    assert steps._find(rows, (), waits=True) is found
    assert steps._find(one, (), waits=True) is found
    for _ in range(100):
        alone = steps._find(one, (), waits=True)
    assert alone is not found
    assert alone.step.input.bucket.rows == 1
    assert steps._find(rows, (), waits=True) is found
