import json
import random

import pytest

from tests.reliability.exchange import Reply
from tests.reliability.load import (
    Faults,
    Request,
    final_status,
    overlap_seconds,
    overlaps,
    random_requests,
)

STREAM = Request("/x", {}, stream=True, seconds=1, leave_after=None)


def stream(*events):
    data = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
    return Reply(200, {}, data.encode())


@pytest.mark.parametrize(
    ("reply", "is_error"),
    [
        (stream({"index": 1}, {"index": 2, "generated_text": "x"}), False),
        (stream({"choices": [{"text": "x"}]}, "[DONE]"), False),
        (stream({"type": "response.created"}, {"type": "response.completed", "response": {}}), False),
        (stream({"index": 1}, {"error": "late", "error_type": "timeout"}), True),
        (stream({"error": {"message": "x", "type": "InternalServerError"}}, "[DONE]"), True),
        (stream({"type": "error", "code": "x"}), True),
        (Reply(503, {}, b""), True),
    ],
)  # fmt: skip
def test_a_reply_with_a_last_event_has_a_final_status(reply, is_error):
    outcome, error = final_status(STREAM, reply)

    assert error == is_error
    assert outcome != "stream without an end"


@pytest.mark.parametrize(
    "events", [(), ({"index": 1},), ({"type": "response.created"},), ("[DONE]",)]
)
def test_a_stream_that_just_stops_has_none(events):
    assert final_status(STREAM, stream(*events))[0] == "stream without an end"


def test_only_time_in_common_counts():
    spans = [(1.0, 2.0), (4.0, float("inf"))]

    assert overlaps(spans, 1.5, 1.6)
    assert not overlaps(spans, 2.5, 3)
    assert overlap_seconds(spans, 0, 5) == 2


def test_a_fault_explains_from_its_beginning_to_its_end():
    faults = Faults()

    with faults.during(faults.losses):
        (begin, end) = faults.losses[0]
        assert end == float("inf")

    assert faults.losses[0][0] == begin < faults.losses[0][1] < float("inf")
    assert faults.closures == []


def test_the_seed_decides_the_requests():
    def first(seed):
        made = random_requests(random.Random(seed), disconnects=0.5, max_tokens=50)
        return [next(made) for _ in range(50)]

    assert first(1) == first(1) != first(2)
    assert {request.path for request in first(1)} >= {"/generate", "/v1/responses"}
