"""Events by column."""

from server.engine.core.request import FinishReason, SequenceUsage, TokenEvent
from server.engine.core.results.step_events import StepEvents

EVENTS = [
    (4, TokenEvent(token_id=7)),
    (2, TokenEvent(token_id=8, logprob=-0.5, top_tokens=((8, -0.5), (9, -1.0)))),
    (3, TokenEvent(token_id=0, finish_reason=FinishReason.EOS, usage=SequenceUsage(num_steps=3))),
    (9, TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error="broken")),
]


def test_events_are_read_as_they_were_added():
    events = StepEvents(EVENTS)

    assert list(events) == EVENTS
    assert len(events) == 4
    assert events.ended == [3, 9]


def test_tokens_of_some_rows_are_added_with_their_log_probabilities():
    events = StepEvents(EVENTS[:1])
    events.add_tokens([10, 11, 12, 13], [20, 21, 22, 23], {0: -0.1, 2: -0.2, 3: -0.3}, 1, 3)

    assert list(events)[1:] == [
        (11, TokenEvent(token_id=21)),
        (12, TokenEvent(token_id=22, logprob=-0.2)),
    ]


def test_all_rows_have_log_probabilities():
    events = StepEvents()
    events.add_tokens([10, 11], [20, 21], {0: -0.1, 1: -0.2}, 0, 2)
    events.add_tokens([10, 11, 12], [20, 21, 22], {0: -0.1, 2: -0.2, 1: -0.3}, 1, 3)

    assert events.logprobs == {0: -0.1, 1: -0.2, 2: -0.3, 3: -0.2}
