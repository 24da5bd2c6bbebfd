"""POST /generate and POST /: replies, details, headers, and the parameters that the engine receives."""

import asyncio
import math
import threading

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http.dialects.tgi.replies import GenerateReply
from tests.http.fakes import EOS_ID, IM_END_ID, INFO, FakeEngine, event, put, say, silent
from tests.waiting import reached

pytestmark = pytest.mark.anyio

# The fake tokenizer has one token for each byte; these are "H" and "i" in its alphabet's order.
UPPER_H, LOWER_I = 39, 72


@pytest.fixture
def byte(tokenizer):
    def ids(text):
        return tokenizer.encode(text)

    return ids


async def test_the_reply_has_only_the_text_unless_details_are_requested(generate, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH)

    response = await generate()

    assert response.status_code == 200
    assert response.json() == {"generated_text": "Hi"}
    assert response.headers["content-type"] == "application/json"


async def test_details_report_every_token_and_the_finish_reason(generate, engine, byte):
    engine.script = say([*byte("Hi"), EOS_ID], FinishReason.EOS)

    response = await generate(details=True, do_sample=True, seed=7)

    h, i = byte("Hi")
    assert response.json() == {
        "generated_text": "Hi",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 3,
            "seed": 7,
            "prefill": [],
            "tokens": [
                {"id": h, "text": "H", "logprob": -0.5, "special": False},
                {"id": i, "text": "i", "logprob": -0.5, "special": False},
                {"id": EOS_ID, "text": "</s>", "logprob": -0.5, "special": True},
            ],
        },
    }


async def test_the_reply_matches_the_documented_schema(generate, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH, top=((UPPER_H, -0.1), (LOWER_I, -0.2)))

    response = await generate(best_of=2, do_sample=True, decoder_input_details=True, top_n_tokens=2)

    reply = msgspec.json.decode(response.content, type=GenerateReply)
    assert msgspec.json.decode(msgspec.json.encode(reply)) == response.json()


async def test_compat_route_answers_with_an_array_of_one_and_the_full_text(client, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH)

    response = await client.post("/", json={"inputs": "say: "})

    assert response.json() == [{"generated_text": "say: Hi"}]


async def test_full_text_puts_the_prompt_first(generate, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH)

    response = await generate(inputs="say: ", return_full_text=True)

    assert response.json() == {"generated_text": "say: Hi"}


async def test_compat_route_omits_the_prompt_on_request(generate, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH)

    response = await generate(path="/", inputs="say: ", return_full_text=False)

    assert response.json() == [{"generated_text": "Hi"}]


async def test_prompt_details_have_no_logprob_for_the_first_token(generate, byte):
    response = await generate(inputs="abc", decoder_input_details=True)

    a, b, c = byte("abc")
    assert response.json()["details"]["prefill"] == [
        {"id": a, "text": "a", "logprob": None},
        {"id": b, "text": "b", "logprob": -1.0},
        {"id": c, "text": "c", "logprob": -1.0},
    ]


async def test_top_tokens_are_reported_for_every_position(generate, engine, byte):
    engine.script = say(
        byte("Hi"), FinishReason.LENGTH, top=((IM_END_ID, -0.1), (byte("x")[0], -2))
    )

    response = await generate(details=True, top_n_tokens=2)

    expected = [
        {"id": IM_END_ID, "text": "<|im_end|>", "logprob": -0.1, "special": True},
        {"id": byte("x")[0], "text": "x", "logprob": -2.0, "special": False},
    ]
    assert response.json()["details"]["top_tokens"] == [expected, expected]


async def test_best_of_returns_the_sequence_with_the_highest_mean_logprob(generate, engine, byte):
    async def script(engine: FakeEngine, request, stream):
        text, logprob = [("worse and longer", -0.9), ("better", -0.1)][request.request_id - 1]
        await say(byte(text), FinishReason.LENGTH, logprob=logprob)(engine, request, stream)

    engine.script = script

    response = await generate(best_of=2, do_sample=True, details=True)

    reply = response.json()
    assert reply["generated_text"] == "better"
    (other,) = reply["details"]["best_of_sequences"]
    assert other["generated_text"] == "worse and longer"
    assert other["seed"] != reply["details"]["seed"]
    seeds = {request.sampling.seed for request in engine.requests}
    assert seeds == {other["seed"], reply["details"]["seed"]}


@pytest.mark.parametrize(
    ("reason", "wire"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.EOS, "eos_token"),
        (FinishReason.STOP, "stop_sequence"),
    ],
)
async def test_finish_reasons_have_tgis_names(generate, engine, byte, reason, wire):
    engine.script = say(byte("Hi"), reason)

    response = await generate(details=True)

    assert response.json()["details"]["finish_reason"] == wire


async def test_a_stop_string_stays_at_the_end_of_the_text(generate, engine, byte):
    engine.script = say(byte("one two three"), FinishReason.LENGTH)

    response = await generate(stop=["two"], details=True)

    assert response.json()["generated_text"] == "one two"
    assert response.json()["details"]["finish_reason"] == "stop_sequence"
    assert response.json()["details"]["generated_tokens"] == 7
    assert engine.aborted == [1]


async def test_text_after_a_stop_string_within_one_token_is_cut_off(
    generate, engine, byte, tokenizer
):
    engine.script = say([*byte("x "), *tokenizer.encode("END.more"), UPPER_H], FinishReason.LENGTH)

    response = await generate(stop=["END."], details=True)

    reply = response.json()
    assert reply["generated_text"] == "x END."
    assert reply["details"]["tokens"][-1]["text"] == "END."


async def test_a_stop_string_may_be_the_name_of_a_special_token(generate, engine, byte):
    engine.script = say([*byte("Hi"), IM_END_ID, *byte("there")], FinishReason.LENGTH)

    response = await generate(stop=["<|im_end|>"], details=True)

    assert response.json()["generated_text"] == "Hi"
    assert response.json()["details"]["finish_reason"] == "stop_sequence"
    assert response.json()["details"]["generated_tokens"] == 3


async def test_stop_strings_are_ignored_before_min_new_tokens(generate, engine, byte):
    engine.script = say(byte("a.b.c.d"), FinishReason.LENGTH)

    response = await generate(stop=["."], min_new_tokens=3)

    assert response.json()["generated_text"] == "a.b."


async def test_a_character_of_several_tokens_is_never_split(generate, engine, byte):
    engine.script = say(byte("né€🙂!"), FinishReason.LENGTH)

    response = await generate(details=True)

    assert response.json()["generated_text"] == "né€🙂!"
    texts = [t["text"] for t in response.json()["details"]["tokens"]]
    assert [t for t in texts if t] == ["n", "é", "€", "🙂", "!"]


async def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(
    generate, engine, byte
):
    engine.script = say([*byte("a"), *byte("🙂")[:2]], FinishReason.LENGTH)

    response = await generate()

    assert response.json()["generated_text"].startswith("a\ufffd")


async def test_headers_report_how_the_time_was_spent(generate, engine, byte):
    engine.script = say(byte("Hi"), FinishReason.LENGTH, wait=0.01)

    headers = (await generate(inputs="hello")).headers

    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "5"
    assert headers["x-prompt-tokens"] == "5"
    assert headers["x-generated-tokens"] == "2"
    assert headers["x-queue-time"] == "2"
    assert 0.01 <= float(headers["x-compute-time"]) < 5
    for name in ("total", "validation", "inference"):
        assert headers[f"x-{name}-time"].isdigit()
    assert headers["x-time-per-token"].isdigit()
    assert int(headers["x-total-time"]) >= 10


async def test_tokens_are_sampled_if_parameters_is_omitted(client, engine):
    await client.post("/generate", json={"inputs": "x"})
    await client.post("/generate", json={"inputs": "x", "parameters": None})
    await client.post("/generate", json={"inputs": "x", "parameters": {}})

    assert [r.sampling.temperature for r in engine.requests] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": False}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 1}, 0.0),
        ({"temperature": 0}, 0.0),
        ({"temperature": -0.0, "do_sample": True, "top_k": 3}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 1.0}, 0.0),
        ({"typical_p": 0.9}, 1.0),
        ({"typical_p": 1}, 0.0),
        ({"min_p": 0.1}, 1.0),
        ({"min_p": 0}, 0.0),
    ],
)
async def test_sampling_is_implied_by_its_parameters(generate, engine, parameters, temperature):
    response = await generate(**parameters, details=True)

    assert response.status_code == 200, response.text
    assert engine.requests[0].sampling.temperature == temperature
    assert (response.json()["details"]["seed"] is None) == (temperature == 0)


async def test_every_sampling_parameter_reaches_the_engine(generate, engine):
    await generate(
        temperature=0.5, top_k=7, top_p=0.8, min_p=0.05, typical_p=0.9, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=-0.4, seed=2**64 - 1, max_new_tokens=9,
        logit_bias={"7": 1.5, "0": -100}, min_new_tokens=2, stop_token_ids=[3, 4], top_n_tokens=5, details=True,
    )  # fmt: skip

    s = engine.requests[0].sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (0.5, 7, 0.8, 0.05, 0.9)
    assert (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) == (1.2, 0.3, -0.4)
    assert (s.seed, s.max_new_tokens, s.min_new_tokens) == (2**64 - 1, 9, 2)
    assert s.logit_bias == {7: 1.5, 0: -100.0}
    assert (s.stop_token_ids, s.eos_token_ids, s.top_logprobs) == ((3, 4), (EOS_ID,), 5)
    assert s.logprobs
    assert not s.prompt_logprobs


async def test_bad_words_reach_the_engine_as_tokens_with_and_without_a_space(
    generate, engine, byte
):
    await generate(bad_words=["i", " world!", "i", " "])

    (space,) = byte(" ")
    assert engine.requests[0].sampling.bad_words == (
        tuple(byte("i")),
        (space, *byte("i")),
        tuple(byte("world!")),
        tuple(byte(" world!")),
        (space,),
    )
    assert len(byte(" world!")) == 1


async def test_end_tokens_are_ignored_on_request(generate, engine):
    await generate(ignore_eos=True)

    assert engine.requests[0].sampling.eos_token_ids == ()


async def test_null_means_default_for_every_parameter(client, engine):
    from server.http.dialects.tgi.schema import GenerateParameters

    parameters = dict.fromkeys(GenerateParameters.model_fields)

    response = await client.post("/generate", json={"inputs": "x", "parameters": parameters})

    assert response.status_code == 200
    assert engine.requests[0].sampling.max_new_tokens == INFO.max_total_tokens - 1


async def test_without_a_limit_the_context_is_filled(generate, engine):
    await generate(inputs="x" * 100)

    assert engine.requests[0].sampling.max_new_tokens == 28


async def test_truncate_keeps_the_last_tokens(generate, engine, byte):
    response = await generate(inputs="x" * 500 + "abc", truncate=3)

    assert response.headers["x-prompt-tokens"] == "3"
    assert engine.requests[0].prompt_token_ids == byte("abc")


async def test_top_k_is_limited_to_the_size_of_the_vocabulary(generate, engine):
    await generate(top_k=2**31 - 1)

    assert engine.requests[0].sampling.top_k == INFO.vocab_size


async def test_logprobs_are_computed_only_if_they_are_reported(generate, engine):
    await generate()
    await generate(details=True)

    assert [r.sampling.logprobs for r in engine.requests] == [False, True]


async def test_logprobs_that_json_cannot_represent_are_null(generate, engine):
    async def script(_engine, _request, stream):
        put(stream, event(1, logprob=-math.inf), event(2, FinishReason.LENGTH, logprob=math.nan))

    engine.script = script

    response = await generate(details=True)

    assert [t["logprob"] for t in response.json()["details"]["tokens"]] == [None, None]


async def test_an_engine_error_is_a_failed_generation(generate, engine):
    async def script(_engine, _request, stream):
        put(stream, event(1), event(None, FinishReason.ERROR, error="engine restarted"))

    engine.script = script

    response = await generate()

    assert response.status_code == 424
    assert response.json() == {
        "error": "Request failed during generation: engine restarted",
        "error_type": "generation",
    }


async def test_a_generation_that_ends_without_a_finish_reason_is_incomplete(generate, engine):
    async def script(_engine, _request, stream):
        put(stream, event(1), event(None))

    engine.script = script

    response = await generate()

    assert response.status_code == 500
    assert response.json() == {
        "error": "Incomplete generation",
        "error_type": "incomplete_generation",
    }


async def test_one_failed_sequence_of_best_of_ends_the_other(generate, engine):
    async def script(engine, request, stream):
        if request.request_id == 1:
            put(stream, event(None, FinishReason.ERROR, error="no memory"))

    engine.script = script

    response = await generate(best_of=2, do_sample=True)

    assert response.status_code == 424
    assert engine.aborted == [2]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_requests_beyond_the_limit_are_refused(open_client, engine, path):
    engine.script = silent
    client = await open_client(max_concurrent_requests=1)
    first = asyncio.ensure_future(client.post("/generate", json={"inputs": "x"}))
    await reached(lambda: engine.running)

    response = await client.post(path, json={"inputs": "x"})

    assert response.status_code == 429
    assert response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    assert response.headers["retry-after"] == "1"
    first.cancel()


@pytest.mark.parametrize("path", ["/generate", "/"])
async def test_more_sequences_than_there_are_places_are_refused_for_good(open_client, path):
    client = await open_client(max_concurrent_requests=1)

    response = await client.post(
        path, json={"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}
    )

    assert response.status_code == 422
    assert "`best_of` must ask for at most 1 completions in all. Given: 2" in response.text


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/info"])
async def test_requests_are_unavailable_while_the_engine_starts(client, engine, path):
    engine.state, engine.phase, engine.info = EngineState.STARTING, "loading\nweights", None

    response = await client.request(
        "GET" if path == "/info" else "POST", path, json={"inputs": "x"}
    )

    assert response.status_code == 503
    assert response.json() == {
        "error": "the model is not ready: starting, loading weights",
        "error_type": "unavailable",
    }
    assert int(response.headers["retry-after"]) >= 1


async def test_a_request_is_unavailable_if_the_engine_crashes_before_it_is_submitted(
    generate, engine, monkeypatch
):
    submit = FakeEngine.submit

    def dies(self, request):
        self.state, self.phase = EngineState.RESTARTING, "loading weights"
        return submit(self, request)

    monkeypatch.setattr(FakeEngine, "submit", dies)

    response = await generate()

    assert response.status_code == 503


async def test_an_exception_is_an_internal_error_without_a_traceback(generate, monkeypatch):
    def breaks(self, request):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(FakeEngine, "submit", breaks)

    response = await generate()

    assert response.status_code == 500
    assert response.json() == {"error": "Internal server error", "error_type": "internal"}


async def test_ended_requests_no_longer_count_as_in_flight(open_client, engine):
    client = await open_client(max_concurrent_requests=1)
    body = {"inputs": "x"}

    for path in ("/generate", "/generate_stream", "/generate", "/"):
        assert (await client.post(path, json=body)).status_code == 200
    assert (await client.post("/generate", json={"inputs": ""})).status_code == 422
    assert (await client.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
async def test_a_long_prompt_is_tokenized_in_a_thread(client, tokenizer, monkeypatch, path):
    threads = []
    for name in ("encode", "encode_with_offsets"):
        work = getattr(type(tokenizer), name)

        def spy(self, text, work=work):
            threads.append(threading.current_thread() is threading.main_thread())
            return work(self, text)

        monkeypatch.setattr(type(tokenizer), name, spy)

    await client.post(path, json={"inputs": "x" * 100})
    await client.post(path, json={"inputs": "x" * 5000, "parameters": {"truncate": 100}})

    assert threads == [True, False]
