"""Sequences with a grammar, with a real, tiny model and a byte-level vocabulary."""

import json
import math
import random
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model
from benchmarks.json_schemas import SchemaMaker
from model.checkpoint.config import ModelConfig
from model.errors import GrammarError
from model.sampling.grammar import GrammarMatcher, serialize
from model.sampling.parameters import NOTHING_ALLOWED, SamplingParams
from model.text.lark import json_rule
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import AbortRequests
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.core.results.step_retry import STEP_FAILED
from server.engine.runner.step import grammars
from tests.engine.runner import drafts
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import assert_all_free, make_engine, random_prompt
from tests.faults.engine import inject
from tests.http.fakes import EOS_ID, IM_END_ID, save_tokenizer
from tests.tiny_checkpoint import write_tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "size": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size", "tags", "id"],
    "additionalProperties": False,
}
ENDS = {"eos_token_ids": (EOS_ID, IM_END_ID)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammars")
    save_tokenizer(folder)
    return write_tiny_checkpoint(folder, eos_token_id=[EOS_ID, IM_END_ID])


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_folder(checkpoint)


@pytest.fixture(params=["in order", "ahead", "ahead, recorded"])
def engine_of(request, checkpoint):
    """Return a function that makes engines that run a step at a time or one ahead."""

    def make(**changes):
        engine = make_engine(checkpoint, max_num_seqs=20, **changes)
        if request.param != "in order":
            engine.engine._runs_ahead = True
        if request.param == "ahead, recorded":
            runner = engine.engine._runner
            runner.record_steps(engine.engine._scheduler.config, Again())
            while runner.use_idle_time():
                pass
        return engine

    return make


def structured(request_id, kind="json_schema", value=SCHEMA, prompt=(1, 2, 3), **sampling):
    parameters = {"max_new_tokens": 200, "temperature": 0.0, **ENDS} | sampling
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(grammar=serialize(kind, value), **parameters),
    )


def text_of(tokenizer, events):
    return tokenizer.decode([event.token_id for event in events if event.token_id is not None])


def assert_valid(tokenizer, events, schema=SCHEMA):
    assert events[-1].finish_reason is FinishReason.EOS, events[-1]
    jsonschema.validate(json.loads(text_of(tokenizer, events)), schema)


def mixed(count, seed=1):
    """Return requests of which every other one has a grammar, with all kinds of sampling."""
    rng = random.Random(seed)
    kinds = [
        {},
        {"temperature": 1.3},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logprobs": True, "top_logprobs": 2},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {34: 3.0, 125: -100.0}},
        {"temperature": 1.0, "bad_words": ((104, 105),)},
    ]
    requests = []
    for i in range(count):
        sampling = kinds[i % len(kinds)] | {"seed": i}
        prompt = random_prompt(rng, 1, 40)
        if i % 2:
            request = structured(i, prompt=prompt, **sampling)
        else:
            parameters = {"temperature": 0.0, **ENDS} | sampling
            request = GenerateRequest(
                request_id=i,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_new_tokens=rng.randint(1, 60), **parameters),
            )
        requests.append(request)
    return requests


def outcome(events):
    return [(event.token_id, event.finish_reason) for event in events]


def test_every_completed_output_follows_its_schema(engine_of, tokenizer):
    requests = mixed(28)
    engine = engine_of()

    answers = engine.generate(requests)

    for request, events in zip(requests, answers, strict=True):
        if request.sampling.grammar is not None:
            assert_valid(tokenizer, events)
    assert_all_free(engine)


def test_drafts_change_no_output(engine_of):
    requests = [*mixed(14), structured(50, logprobs=True), structured(51, "regex", "(ab?){30}c")]

    steps = drafts.check(engine_of, requests, random.Random(4))

    proposed = [
        draft
        for step in steps
        for sequence, draft in zip(step.decode.batch.sequences, step.decode.drafts, strict=True)
        if sequence.matcher is not None
    ]
    assert max(map(len, proposed)) == drafts.MOST


@pytest.mark.parametrize("budget", [20, 64])
def test_the_output_does_not_depend_on_other_sequences_preemption_or_running_ahead(
    checkpoint, engine_of, tokenizer, budget
):
    requests = mixed(28, seed=2)
    alone = make_engine(checkpoint, max_num_seqs=1)
    expected = [alone.generate([request])[0] for request in requests]
    engine = engine_of(kv_cache_tokens=512, max_num_batched_tokens=budget)

    found = engine.generate(requests)

    assert engine.engine.stats().num_preemptions > 0
    assert [outcome(events) for events in found] == [outcome(events) for events in expected]
    assert_all_free(engine)


def test_forced_tokens_take_no_step_of_their_own(engine_of, tokenizer):
    schema = {"const": {"a constant": ["with", "many", "characters", 12345]}}
    engine = engine_of()

    [events] = engine.generate([structured(1, value=schema)])

    assert_valid(tokenizer, events, schema)
    assert len(events) > 40
    assert engine.engine.stats().num_steps < 10
    assert engine.engine.stats().generation_tokens == len(events)


def test_forced_tokens_are_sampled_if_log_probabilities_are_requested(engine_of, tokenizer):
    plain, scored = engine_of().generate(
        [
            structured(1, seed=5, temperature=1.0),
            structured(2, seed=5, temperature=1.0, logprobs=True),
        ]
    )

    assert_valid(tokenizer, scored)
    assert all(event.logprob is not None for event in scored)
    assert_valid(tokenizer, plain)


def test_forced_tokens_are_cut_to_a_budget_of_one_token_for_each_sequence(engine_of, tokenizer):
    requests = [structured(i, prompt=(i,), temperature=1.0, seed=i) for i in range(20)]
    expected = engine_of(max_num_batched_tokens=2000).generate(requests)
    engine = engine_of(max_num_batched_tokens=20)

    answers = engine.generate(requests)

    assert [*map(outcome, answers)] == [*map(outcome, expected)]
    assert_all_free(engine)


def test_forced_tokens_of_the_last_row_are_computed_in_their_order(engine_of, checkpoint):
    others = [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=[i],
            sampling=SamplingParams(max_new_tokens=200, temperature=0.0),
        )
        for i in range(19)
    ]
    pattern = "[a-c]{3,9}-(foo|foobar|barbaz)-[0-9]{2,5}"
    request = structured(19, "regex", pattern, prompt=(64, 12, 3), temperature=1.3, seed=1)
    [expected] = make_engine(checkpoint, max_num_seqs=1).generate([request])
    # One token for each sequence; that with the grammar has the last row in every step.
    engine = engine_of(max_num_batched_tokens=20)

    *_, found = engine.generate([*others, request])

    assert outcome(found) == outcome(expected)


def test_forced_tokens_stop_at_the_limit_of_tokens(engine_of, tokenizer):
    engine = engine_of()

    [events] = engine.generate(
        [structured(1, "choice", ["a long text, all forced"], max_new_tokens=7)]
    )

    assert text_of(tokenizer, events) == "a long "
    assert [event.finish_reason for event in events] == [None] * 6 + [FinishReason.LENGTH]
    assert_all_free(engine)


def test_a_stop_token_among_the_forced_tokens_ends_the_sequence(engine_of, tokenizer):
    comma = tokenizer.encode(",", add_special_tokens=False)
    engine = engine_of()

    [events] = engine.generate(
        [structured(1, "choice", ["a long text, all forced"], stop_token_ids=tuple(comma))]
    )

    assert text_of(tokenizer, events) == "a long text,"
    assert events[-1].finish_reason is FinishReason.STOP


def test_the_end_token_is_sampled_only_where_the_grammar_accepts(engine_of, tokenizer):
    biased = {"logit_bias": {EOS_ID: 100.0}}
    answers = engine_of().generate(
        [
            structured(1, "regex", "[a-f]{3,9}", **biased),
            structured(2, "regex", "([a-f]{4})+", temperature=1.0, **biased),
        ]
    )

    for length, events in zip((3, 4), answers, strict=True):
        assert len(text_of(tokenizer, events)) == length
        assert events[-1].token_id == EOS_ID
        assert events[-1].finish_reason is FinishReason.EOS


def test_min_new_tokens_keeps_the_output_going_while_the_grammar_allows_more(engine_of, tokenizer):
    biased = {"logit_bias": {EOS_ID: 100.0}, "min_new_tokens": 6}
    longer, complete = engine_of().generate(
        [
            structured(1, "regex", "[a-f]{1,9}", **biased),
            structured(2, "regex", "[a-f]{3}", **biased),
        ]
    )

    assert len(text_of(tokenizer, longer)) == 6
    assert len(text_of(tokenizer, complete)) == 3
    assert complete[-1].finish_reason is FinishReason.EOS


def test_a_request_that_ignores_end_tokens_ends_where_the_grammar_does(engine_of, tokenizer):
    [events] = engine_of().generate(
        [structured(1, "regex", "[a-f]{1,9}", eos_token_ids=(), logit_bias={EOS_ID: 100.0})]
    )

    assert len(text_of(tokenizer, events)) == 9
    assert events[-1].finish_reason is FinishReason.EOS


def test_a_text_that_must_be_empty_ends_with_the_end_token(engine_of):
    [events] = engine_of().generate([structured(1, "choice", [""], min_new_tokens=3)])

    assert outcome(events) == [(EOS_ID, FinishReason.EOS)]


@pytest.mark.parametrize("bias", [{}, {"logit_bias": {97: -100.0, 98: -100.0}}], ids=str)
def test_a_sequence_without_an_allowed_token_ends_with_an_error(engine_of, tokenizer, bias):
    banned = tuple(tuple(tokenizer.encode(c, add_special_tokens=False)) for c in "ab")
    engine = engine_of()

    failed, other = engine.generate(
        [structured(1, "regex", "[ab]{5}", bad_words=banned, **bias), structured(2)]
    )

    assert outcome(failed) == [(None, FinishReason.ERROR)]
    assert failed[-1].error == NOTHING_ALLOWED
    assert_valid(tokenizer, other)
    assert_all_free(engine)


def test_a_bias_against_everything_allowed_still_gives_an_output_of_the_grammar(
    engine_of, tokenizer
):
    bias = dict.fromkeys(range(260), -100.0)

    [events] = engine_of().generate([structured(1, logit_bias=bias)])

    assert_valid(tokenizer, events)


def test_a_grammar_that_cannot_be_compiled_ends_its_sequence_with_an_error(engine_of, tokenizer):
    engine = engine_of()

    failed, other = engine.generate([structured(1, value={"not": {}}), structured(2)])

    assert outcome(failed) == [(None, FinishReason.ERROR)]
    assert "schema is false" in failed[-1].error
    assert_valid(tokenizer, other)
    assert_all_free(engine)


def test_other_sequences_go_on_while_a_grammar_is_compiled(engine_of, tokenizer, monkeypatch):
    compile_matcher, other_has_ended = grammars.compile_matcher, threading.Event()

    def slow(*arguments):
        assert other_has_ended.wait(60)
        return compile_matcher(*arguments)

    monkeypatch.setattr(grammars, "compile_matcher", slow)
    engine = engine_of()
    plain = GenerateRequest(
        request_id=2,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_new_tokens=20, temperature=0.0),
    )
    engine.channel.inbox += [structured(1), plain]
    engine.engine.receive(wait=math.inf)
    assert engine.engine.stats().num_waiting == 2
    ids = []
    while engine.engine.has_work:
        engine.engine.step()
        ids = [request_id for step in engine.channel.steps for request_id in step.request_ids]
        if len(ids) == 20:
            other_has_ended.set()

    assert ids[:20] == [2] * 20
    assert set(ids[20:]) == {1}


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing(engine_of):
    engine = engine_of()
    engine.channel.inbox += [structured(1), AbortRequests([1])]
    engine.engine.receive(wait=math.inf)

    assert not engine.engine.has_work
    assert_all_free(engine)


def test_an_abort_between_steps_leaves_the_other_outputs_valid(engine_of, tokenizer):
    engine = engine_of()
    engine.channel.inbox += [structured(i, temperature=1.0, seed=i) for i in range(6)]
    engine.engine.receive(wait=math.inf)
    while engine.engine.stats().num_waiting:
        engine.engine.step()
    for i in (1, 4):
        for _ in range(4):
            engine.engine.step()
        engine.channel.inbox.append(AbortRequests([i]))
        engine.engine.receive(wait=math.inf)
    while engine.engine.has_work:
        engine.engine.step()

    events = {i: [] for i in range(6)}
    for step in engine.channel.steps:
        for k, request_id in enumerate(step.request_ids):
            events[request_id].append(step.event(k))
    for i in (0, 2, 3, 5):
        assert_valid(tokenizer, events[i])
    assert_all_free(engine)


def test_a_grammar_that_becomes_too_costly_ends_its_sequence_with_an_error(engine_of, tokenizer):
    engine = engine_of()
    costly = structured(1, "regex", "(.{1,1000}){1,1000}", logit_bias={97: 100.0})

    failed, other = engine.generate([costly, structured(2, "choice", ["x"])])

    assert failed[-1].finish_reason is FinishReason.ERROR
    assert "the grammar cannot be followed further" in failed[-1].error
    assert text_of(tokenizer, other) == "x"
    assert_all_free(engine)


def enforceable(maker):
    """Return a random schema all keywords of which a grammar enforces."""
    while True:
        schema = maker.make()
        try:
            serialize("json_schema", schema)
        except GrammarError:
            continue
        return schema


@settings(max_examples=12)
@given(data=st.data())
def test_random_schemas_sampling_preemption_and_aborts_leave_only_valid_outputs(
    crowded, tokenizer, data
):
    """The cache holds a few sequences only, and aborts come between any two steps."""
    maker = SchemaMaker(data.draw(st.integers(0, 10_000), label="schemas"))
    requests, schemas = [], {}
    for i in range(8):
        schemas[i] = enforceable(maker)
        requests.append(
            structured(
                i,
                value=schemas[i],
                prompt=range(1, data.draw(st.integers(2, 30))),
                max_new_tokens=data.draw(st.integers(1, 120)),
                temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
                logprobs=data.draw(st.booleans()),
                seed=data.draw(st.integers(0, 2**64 - 1)),
            )
        )
    # The last draw: one that ends the example must not leave requests in the engine.
    aborts = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 7)), max_size=4))
    crowded.channel.steps.clear()
    crowded.channel.inbox += requests
    crowded.engine.receive(wait=math.inf)
    step = 0
    while crowded.engine.has_work:
        crowded.engine.step()
        step += 1
        ids = [request_id for when, request_id in aborts if when == step]
        if ids:
            crowded.channel.inbox.append(AbortRequests(ids))
            crowded.engine.receive(wait=math.inf)
        crowded.engine._scheduler.check_invariants()

    events = {i: [] for i in schemas}
    for message in crowded.channel.steps:
        for k, request_id in enumerate(message.request_ids):
            events[request_id].append(message.event(k))
    aborted = {request_id for _, request_id in aborts}
    for i, found in events.items():
        if not found or found[-1].finish_reason is None:
            assert i in aborted
        elif found[-1].finish_reason is FinishReason.EOS:
            text = text_of(tokenizer, found)
            if '"0000-' not in text:  # a date by RFC 3339, but not for Python
                jsonschema.Draft202012Validator(
                    schemas[i], format_checker=jsonschema.FormatChecker()
                ).validate(json.loads(text))
        elif found[-1].finish_reason is FinishReason.LENGTH:
            assert len(found) == requests[i].sampling.max_new_tokens
        else:
            assert found[-1].error, found[-1]
    assert_all_free(crowded)


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "ahead"])
def crowded(request, checkpoint):
    engine = make_engine(checkpoint, max_num_seqs=6, max_num_batched_tokens=24, kv_cache_tokens=256)
    engine.engine._runs_ahead = request.param
    return engine


def test_a_grammar_with_which_the_library_failed_is_compiled_again():
    folder = Path(model.__file__).parent / "bundled"
    compiled = grammars.Grammars(str(folder), ModelConfig.from_folder(folder), torch.device("cpu"))
    # The byte that ends the number is a trigger, which the library does not expect.
    number = json_rule({"type": "number"})
    lark = f"""
        start: (trigger {number})* TAIL
        TEXT: /(?s:.*)/
        TAIL: TEXT & ~(TEXT "0" TEXT)
        trigger[lazy]: TEXT "0"
    """
    sampling = SamplingParams(max_new_tokens=16, grammar=serialize("lark", lark))
    zeros = Tokenizer.from_folder(folder).encode("000", add_special_tokens=False)
    first = compiled.compile(sampling).result()
    sibling = compiled.compile(sampling).result()
    for token_id in zeros * 3:
        compiled.compute_masks([first])
        first.accept(token_id)
    assert "cannot be followed" in first.error
    assert "<backtrace>" not in first.error
    again = compiled.compile(sampling).result()

    compiled.compute_masks([again, sibling])
    assert not again.has_stopped
    assert sibling.has_stopped
    assert sibling.error


def test_steps_that_are_computed_again_follow_the_grammars(tokenizer, engine_of):
    requests = mixed(16, seed=3)
    expected = engine_of().generate(requests)
    engine = engine_of()
    inject(engine.engine, *(f"raise@step={step}" for step in range(1, 200, 4)))

    found = engine.generate(requests)

    assert engine.engine.stats().num_failed_steps > 10
    assert [[event.token_id for event in events] for events in found] == [
        [event.token_id for event in events] for events in expected
    ]
    assert_all_free(engine)


@pytest.fixture
def followed_elsewhere(engine_of):
    """Return an engine whose grammars are followed in other processes, as for a GPU."""
    engine = engine_of()
    runner = engine.engine._runner
    own = runner._grammars
    runner._grammars = grammars.Grammars(own._folder, own._config, torch.device("cpu"), 40, 2)
    yield engine
    runner._grammars._follower.close()


def test_grammars_in_other_processes_change_no_output(engine_of, followed_elsewhere):
    requests = mixed(16, seed=3)
    expected = engine_of().generate(requests)

    found = followed_elsewhere.generate(requests)

    assert [[event.token_id for event in events] for events in found] == [
        [event.token_id for event in events] for events in expected
    ]
    assert_all_free(followed_elsewhere)


@pytest.mark.parametrize("killed", [1, 2])
def test_processes_that_end_change_no_output(engine_of, followed_elsewhere, tokenizer, killed):
    requests = [structured(i, temperature=1.0, seed=i) for i in range(16)]
    expected = engine_of().generate(requests)
    engine = followed_elsewhere
    engine.channel.inbox += requests
    engine.engine.receive(wait=math.inf)
    follower = None
    for step in range(2000):
        engine.engine.step()
        follower = engine.engine._runner._grammars._follower
        if step > 3 and follower is not None and engine.channel.steps:
            break
    for worker in follower._workers[:killed]:
        worker._process.kill()
    while engine.engine.has_work:
        engine.engine.step()
    events = {i: [] for i in range(16)}
    for message in engine.channel.steps:
        for k, request_id in enumerate(message.request_ids):
            events[request_id].append(message.event(k))

    assert [[event.token_id for event in its] for its in events.values()] == [
        [event.token_id for event in its] for its in expected
    ]
    for its in events.values():
        assert_valid(tokenizer, its)
    assert_all_free(engine)


@pytest.mark.parametrize("method", ["follow", "write_mask"])
def test_an_exception_in_a_grammar_ends_only_its_sequence(
    tokenizer, engine_of, monkeypatch, method
):
    engine = engine_of()
    original = getattr(GrammarMatcher, method)
    calls = []

    def fail(matcher, *arguments):
        first = calls[0] if calls else matcher
        calls.append(matcher)
        if matcher is first and len(calls) > 6:
            raise RuntimeError("a defect of the library")
        return original(matcher, *arguments)

    monkeypatch.setattr(GrammarMatcher, method, fail)
    found = engine.generate([structured(1), structured(2), structured(3)])

    failed = [events for events in found if events[-1].finish_reason is FinishReason.ERROR]
    (events,) = failed
    assert "internal error" in events[-1].error
    for events in found:
        if events not in failed:
            assert_valid(tokenizer, events)
    assert_all_free(engine)


def test_an_exception_while_masks_are_computed_ends_only_its_sequence(
    tokenizer, engine_of, monkeypatch
):
    engine = engine_of()
    compute = grammars.TokenMasker.compute
    bad = []

    def fail(masker, matchers):
        if not bad and len(matchers) > 1:
            bad.append(matchers[1])
        if any(matcher in bad for matcher in matchers):
            raise RuntimeError("a defect of the library")
        return compute(masker, matchers)

    monkeypatch.setattr(grammars.TokenMasker, "compute", fail)
    found = engine.generate([structured(i) for i in range(4)])

    assert [events[-1].error for events in found if events[-1].error] == [STEP_FAILED]
    assert sum(events[-1].finish_reason is FinishReason.EOS for events in found) == 3
    assert_all_free(engine)
