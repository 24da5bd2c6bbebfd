"""Replies over HTTP are the same with drafts and without, and the instrument that says so notices differences."""

import json
from collections import Counter

import pytest

from tests.reliability.draft_requests import PATHS, RequestMaker, content, differing_places
from tests.reliability.exchange import Reply
from tests.reliability.same_bytes import run


def stream(*events):
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return Reply(200, {"content-type": "text/event-stream"}, f"{data}data: [DONE]\n\n".encode())


def chunk(text, *logprobs, end=None, index=0):
    scores = {"token_logprobs": [*logprobs]} if logprobs else None
    return {
        "id": f"cmpl-{text}",
        "object": "text_completion",
        "choices": [{"index": index, "text": text, "logprobs": scores, "finish_reason": end}],
    }


def test_events_with_several_tokens_say_what_those_with_one_say():
    one_each = stream(chunk("a", -1.0), chunk("b", -2.0), chunk("", end="stop"))
    together = stream(chunk("ab", -1.0, -2.0, end="stop"))

    assert content(one_each) == content(together)


@pytest.mark.parametrize(
    "other",
    [
        [chunk("ac", -1.0, -2.0, end="stop")],
        [chunk("ab", -1.0, -2.0000000000000004, end="stop")],
        [chunk("ab", -1.0, -2.0, end="length")],
        [chunk("ab", -1.0, -2.0, end="stop", index=1)],
        [chunk("ab", -1.0, end="stop")],
    ],
)
def test_another_text_score_end_or_choice_is_a_difference(other):
    assert differing_places(stream(chunk("ab", -1.0, -2.0, end="stop")), stream(*other))


def test_another_status_is_a_difference():
    assert differing_places(Reply(200, {}, b"{}"), Reply(500, {}, b"{}")) == ["status"]


def test_times_and_drafts_that_a_reply_reports_are_none():
    spent = [{"queue_ms": time, "draft_tokens": time} for time in (0, 1)]
    replies = [
        Reply(
            200,
            {},
            json.dumps({"details": {"seed": 1, "usage": it}, "usage": {"tessera": it}}).encode(),
        )
        for it in spent
    ]

    assert differing_places(*replies) == []
    assert content(replies[0]) == {"status": 200, ".details.seed": [1]}


def test_requests_are_of_every_path_and_kind():
    maker = RequestMaker(0)
    made = [maker.make() for _ in range(500)]
    fields = Counter()
    for request in made:
        fields.update([*request.body.get("parameters", request.body)])

    assert {it.path for it in made} == {*PATHS}
    assert {
        "stop", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words",
        "min_tokens", "min_new_tokens", "logprobs", "top_logprobs", "top_n_tokens", "n", "grammar",
        "structured_outputs", "return_token_ids", "ignore_eos", "stream",
    } <= {name for name, count in fields.items() if count > 5}  # fmt: skip
    again = RequestMaker(0)
    assert made == [again.make() for _ in made]


def test_drafts_are_asked_for_where_each_api_has_the_field():
    maker = RequestMaker(1)
    for request in (maker.make() for _ in range(40)):
        for most, wanted in ((0, {"enabled": False}), (None, {"enabled": True})):
            body = request.with_drafts(most).body
            assert body.get("parameters", body)["speculation"] == wanted
        assert "speculation" not in json.dumps(request.body)


@pytest.mark.slow
@pytest.mark.e2e
def test_replies_are_the_same_with_drafts_and_without():
    rows = run(120, 7, ["--device=cpu", "--quantization=int8", "--cpu-threads=1"])

    assert [row["different"] for row in rows] == [[]] * len(rows)
    assert {status for row in rows for status in row["statuses"]} == {"200"}
    # Times decide about the service's own drafts, and about preemptions.
    assert all(row["accepted"] for row in rows if row["company"].startswith("random"))
    assert sum(row["cached"] for row in rows) > 0
