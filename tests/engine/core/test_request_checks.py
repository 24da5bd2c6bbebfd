"""Requests that the engine refuses: each ends with an error of its own, and no other request is affected."""

import math

import msgspec
import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.messages import AbortRequests
from server.engine.core.request import FinishReason
from server.engine.core.schedule.scheduler import Scheduler
from tests.engine.core.bookkeeping import make_request
from tests.engine.core.results.test_step_retry import Harness, expected_tokens, tokens_of
from tests.engine.link.fake_engine import MAX_TOKEN_ID

BAD = {
    "a negative token": ({"prompt": [5, -1]}, "prompt_token_ids: -1"),
    "a token above the vocabulary": (
        {"prompt": [MAX_TOKEN_ID, MAX_TOKEN_ID + 1]},
        f"0 to {MAX_TOKEN_ID}",
    ),
    "a huge token": ({"prompt": [2**63 - 1]}, "prompt_token_ids"),
    "no prompt": ({"prompt": []}, "at least 1 prompt token"),
    "no new token": ({"max_new_tokens": 0}, "at least 1 prompt token"),
    "too many new tokens": ({"max_new_tokens": 2**62}, "at most"),
    "a bias below the vocabulary": ({"logit_bias": {-1: 1.0}}, "logit_bias: -1"),
    "a bias above the vocabulary": ({"logit_bias": {10**9: 1.0}}, "logit_bias: 1000000000"),
    "a banned word above the vocabulary": ({"bad_words": ((1, 10**9),)}, "bad_words: 1000000000"),
    "an empty banned word": ({"bad_words": ((),)}, "bad_words"),
    "more likely tokens than the vocabulary has": ({"top_logprobs": 10**9}, "top_logprobs"),
    "fewer likely tokens than none": ({"top_logprobs": -1}, "top_logprobs -1"),
    "prompt tokens alike": (
        {"prompt_logprobs": True, "prompt_top_logprobs": 10**9},
        "prompt_top_logprobs",
    ),
    "a negative temperature": ({"temperature": -1.0}, "temperature -1.0"),
    "a temperature that is no number": ({"temperature": math.nan}, "temperature nan"),
    "an infinite temperature": ({"temperature": math.inf}, "temperature inf"),
    "a top_p above 1": ({"top_p": 1.5}, "top_p 1.5"),
    "a negative top_k": ({"top_k": -3}, "top_k -3"),
    "an infinite penalty": ({"presence_penalty": math.inf}, "presence_penalty inf"),
    "a grammar that cannot be compiled": ({"grammar": "{}"}, "cannot be compiled"),
}


@pytest.mark.parametrize(("values", "message"), BAD.values(), ids=BAD)
def test_a_request_with_invalid_values_ends_alone(values, message):
    harness = Harness()
    healthy = make_request(1, 5, 6)
    bad = make_request(2, **({"prompt": 4} | values))
    harness.submit(healthy, bad)

    events = harness.run()

    (end,) = events[2]
    assert end.finish_reason is FinishReason.ERROR
    assert message in end.error
    assert tokens_of(events[1]) == expected_tokens(healthy)
    assert harness.engine.stats().num_failed_steps == 0
    harness.assert_idle()


def test_a_deadline_that_is_no_number_is_refused():
    harness = Harness()
    harness.submit(msgspec.structs.replace(make_request(1, 5), deadline=math.nan))

    assert "deadline" in harness.run()[1][0].error


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_a_prediction_of_unknown_tokens_is_refused(token_id):
    harness = Harness()
    harness.submit(msgspec.structs.replace(make_request(1, 5), prediction=[1, token_id]))

    assert f"prediction: {token_id} is not a token id" in harness.run()[1][0].error


def test_a_second_request_with_an_id_in_use_ends_and_the_first_continues():
    harness = Harness()
    first = make_request(1, 5, 6)
    harness.submit(first, make_request(1, 3, 6))

    events = harness.run()[1]

    assert events[0].error == "request id 1 is in use"
    assert tokens_of(events) == expected_tokens(first)
    harness.assert_idle()


def test_unknown_ids_and_repeated_ids_in_an_abort_are_ignored():
    harness = Harness()
    kept = make_request(2, 5, 6)
    harness.submit(make_request(1, 5, 6), kept)
    harness.engine.step()
    harness.submit(AbortRequests([1, 1, 77, -5, 2**62]), AbortRequests([1], FinishReason.STOP))

    assert tokens_of(harness.run()[2]) == expected_tokens(kept)
    harness.assert_idle()


@pytest.mark.parametrize("salt", ["", "\0", "\ud800", "ü" * 5000, "1", None])
def test_any_cache_salt_is_accepted(salt):
    harness = Harness()
    request = make_request(1, 40, 6, salt=salt)
    for _ in range(2):
        harness.submit(request)
        assert tokens_of(harness.run()[1]) == expected_tokens(request)
        harness.channel.messages.clear()
    assert harness.engine.stats().prefix_cache_hit_tokens > 0


def test_an_error_while_a_request_is_admitted_ends_only_that_request(monkeypatch):
    add = Scheduler.add

    def fail(scheduler, sequence):
        add(scheduler, sequence)
        if sequence.request_id == 2:
            raise KeyError("a defect")

    monkeypatch.setattr(Scheduler, "add", fail)
    harness = Harness()
    healthy = make_request(1, 5, 6)
    harness.submit(make_request(2, 5, 6), healthy)

    events = harness.run()

    assert "internal error" in events[2][-1].error
    assert tokens_of(events[1]) == expected_tokens(healthy)
    harness.assert_idle()


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40, 63])
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_a_request_that_just_fits_the_pool_finishes_and_one_more_token_is_refused(
    prompt, difference
):
    harness = Harness(num_blocks=4)  # of 16 tokens
    length = 64 - prompt + difference
    request = make_request(1, prompt, length)
    harness.submit(request)

    events = harness.run(most_steps=100)[1]

    if difference > 0:
        assert "65 tokens; at most 64 fit" in events[-1].error
    elif length == 0:
        assert "1 new token" in events[-1].error
    else:
        assert tokens_of(events) == expected_tokens(request)
    harness.assert_idle()


@pytest.mark.parametrize("num_blocks", [2, 3, 5, 8])
def test_more_requests_than_the_pool_holds_all_finish_within_their_tokens(num_blocks):
    harness = Harness(num_blocks=num_blocks)
    most = 16 * num_blocks
    made = [make_request(i, 1 + 7 * i % (most - 1), 1) for i in range(20)]
    made = [
        make_request(i, len(r.prompt_token_ids), most - len(r.prompt_token_ids))
        for i, r in enumerate(made)
    ]
    harness.submit(*made)

    events = harness.run(most_steps=2 * 20 * most)

    for request in made:
        assert tokens_of(events[request.request_id]) == expected_tokens(request)
    assert harness.engine.stats().num_preemptions > 0 or num_blocks == 2
    harness.assert_idle()


def test_an_idle_engine_logs_and_counts_what_is_wrong_in_its_bookkeeping(caplog):
    harness = Harness()
    harness.submit(make_request(1, 40, 6))
    harness.run()
    harness.assert_idle()
    sent = len(harness.channel.messages)

    blocks = harness.engine._scheduler.block_manager
    blocks._references[3] += 1
    blocks._empty.num_free -= 1
    harness.engine._arrivals[7] = 0.0
    harness.engine.check_idle()

    assert harness.channel.messages[sent].stats.num_invariant_violations == 2
    assert "1 blocks are used" in caplog.text
    assert "1 open requests" in caplog.text


def test_blocks_that_are_lost_are_a_violation():
    manager = BlockManager(8, 4)
    manager._empty.num_free -= 1

    assert manager.idle_violations() == ["7 empty, 0 cached and 0 used blocks are not 8"]
    assert Scheduler(SchedulerConfig(1, 1, 8), BlockManager(8, 4)).idle_violations() == []
