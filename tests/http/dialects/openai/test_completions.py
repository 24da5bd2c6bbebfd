"""POST /v1/completions: replies, log-probabilities, echo, and what reaches the engine."""

import json

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.openai.replies import CompletionReply
from tests.http.fakes import EOS_ID, IM_END_ID, say

pytestmark = pytest.mark.anyio


async def test_a_reply_has_the_text_and_the_usage(complete, engine, tokenizer):
    async def script(engine, request, stream):
        stream.num_cached_tokens = 4
        await say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)(engine, request, stream)

    engine.script = script

    reply = (await complete("hello")).json()

    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["created"] > 1.7e9
    assert reply["model"] == "fake/model"
    assert reply["choices"] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    accounting = reply["usage"].pop("tessera")
    assert accounting["cached_prompt_tokens"] == 2
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert "warnings" not in reply
    msgspec.convert(reply, CompletionReply)


async def test_defaults_sample_16_tokens_with_a_random_seed(complete, engine):
    await complete()
    await complete()

    first, second = (request.sampling for request in engine.requests)
    assert (first.max_new_tokens, first.temperature, first.top_p) == (16, 1.0, 1.0)
    assert first.eos_token_ids == (EOS_ID,)
    assert not first.logprobs
    assert first.seed != second.seed


async def test_sampling_fields_reach_the_engine(complete, engine):
    fields = {
        "temperature": 2, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.5,
        "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"5": -100}, "seed": -1, "stop_token_ids": [9],
        "ignore_eos": True, "min_tokens": 3, "max_tokens": 20, "bad_words": ["x"], "logprobs": 20,
    }  # fmt: skip
    await complete(**fields)

    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        2,
        0.5,
        7,
        0.1,
    )
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.9, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    assert sampling.logit_bias == {5: -100}
    assert sampling.seed == 2**64 - 1
    assert (sampling.stop_token_ids, sampling.eos_token_ids) == ((9,), ())
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (3, 20)
    assert len(sampling.bad_words) == 2
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 20)


@pytest.mark.parametrize("top_k", [0, -1, None])
async def test_no_top_k_keeps_all_tokens(complete, engine, top_k):
    await complete(top_k=top_k)

    assert engine.requests[0].sampling.top_k == 0


async def test_the_default_of_max_tokens_is_reduced_to_what_fits(complete, engine):
    await complete("x" * 120)

    assert engine.requests[0].sampling.max_new_tokens == 8


async def test_prompts_are_texts_or_token_ids(complete, engine, tokenizer):
    await complete("ab")
    await complete(["ab", "c"])
    await complete([5, 6])
    await complete([[5, 6], [7]])

    ab, c = tokenizer.encode("ab"), tokenizer.encode("c")
    assert [r.prompt_token_ids for r in engine.requests] == [ab, ab, c, [5, 6], [5, 6], [7]]


async def test_every_prompt_gets_n_completions_in_order(complete, engine, tokenizer):
    async def script(engine, request, stream):
        text = f"{request.prompt_token_ids[0]}/{request.sampling.seed}"
        await say(tokenizer.encode(text), FinishReason.LENGTH)(engine, request, stream)

    engine.script = script

    reply = (await complete([[5], [6]], n=2, seed=10)).json()

    assert [c["text"] for c in reply["choices"]] == ["5/10", "5/11", "6/10", "6/11"]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 2


async def test_prompts_without_a_seed_get_different_ones(complete, engine):
    await complete(["a", "a"])

    first, second = engine.requests
    assert first.sampling.seed != second.sampling.seed


async def test_best_of_returns_the_likeliest_and_counts_all(complete, engine, tokenizer):
    async def script(engine, request, stream):
        number = request.request_id
        tokens = tokenizer.encode(str(number))
        await say(tokens, FinishReason.LENGTH, logprob=-1.0 / number)(engine, request, stream)

    engine.script = script

    reply = (await complete(best_of=3, n=2)).json()

    assert [c["text"] for c in reply["choices"]] == ["3", "2"]
    assert [c["logprobs"] for c in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_is_cut_off_unless_it_is_to_be_included(
    complete, engine, tokenizer, included
):
    engine.script = say(tokenizer.encode("one two three"), FinishReason.LENGTH)

    reply = (await complete(stop="two", include_stop_str_in_output=included)).json()

    choice = reply["choices"][0]
    assert choice["text"] == ("one two" if included else "one ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")


async def test_a_stop_token_is_the_stop_reason(complete, engine, tokenizer):
    tokens = tokenizer.encode("one!")
    engine.script = say(tokens, FinishReason.STOP)

    choice = (await complete(stop_token_ids=[tokens[-1]])).json()["choices"][0]

    assert choice["text"] == "one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[-1])


async def test_special_tokens_are_kept_on_request(complete, engine, tokenizer):
    engine.script = say([*tokenizer.encode("a"), IM_END_ID, 5], FinishReason.LENGTH)

    kept = (await complete(skip_special_tokens=False)).json()
    skipped = (await complete()).json()

    assert kept["choices"][0]["text"].startswith("a<|im_end|>")
    assert "<|im_end|>" not in skipped["choices"][0]["text"]


async def test_logprobs_name_the_tokens_and_the_likeliest_at_each_position(
    complete, engine, tokenizer
):
    h, i = tokenizer.encode("Hi")
    engine.script = say([h, i], FinishReason.LENGTH, top=((h, -0.25), (EOS_ID, -2.0)))

    logprobs = (await complete(logprobs=2)).json()["choices"][0]["logprobs"]

    assert logprobs == {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.25, "</s>": -2.0}, {"H": -0.25, "</s>": -2.0, "i": -0.5}],
        "text_offset": [0, 1],
    }


async def test_logprobs_of_zero_report_the_sampled_token_only(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("H"), FinishReason.LENGTH, logprob=-float("inf"))

    logprobs = (await complete(logprobs=0)).json()["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{"H": -9999.0}]
    assert logprobs["token_logprobs"] == [-9999.0]


async def test_tokens_are_named_by_their_ids_on_request(complete, engine):
    engine.script = say([7], FinishReason.LENGTH)

    logprobs = (await complete(logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]

    assert logprobs["logprobs"]["tokens"] == ["token_id:7"]


async def test_echo_puts_the_prompt_and_its_logprobs_first(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("!"), FinishReason.LENGTH)

    choice = (await complete("ab", echo=True, logprobs=1, max_tokens=1)).json()["choices"][0]

    assert choice["text"] == "ab!"
    assert choice["logprobs"]["tokens"] == ["a", "b", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    likeliest = {tokenizer.token_text(7): -0.75, "b": -1.0}
    assert choice["logprobs"]["top_logprobs"][:2] == [None, likeliest]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert engine.requests[0].sampling.prompt_logprobs


async def test_echo_of_token_ids_is_their_text(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("!"), FinishReason.LENGTH)

    reply = (await complete([tokenizer.encode("ab"), tokenizer.encode("c")], echo=True)).json()

    assert [c["text"] for c in reply["choices"]] == ["ab!", "c!"]
    assert not engine.requests[0].sampling.prompt_logprobs


async def test_max_tokens_of_zero_scores_the_prompt_only(complete, engine):
    reply = (await complete("ab", echo=True, logprobs=0, max_tokens=0)).json()

    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert reply["usage"]["completion_tokens"] == 0
    assert engine.requests[0].sampling.max_new_tokens == 1


async def test_token_ids_are_reported_on_request(complete, engine):
    engine.script = say([7, 8], FinishReason.LENGTH)

    choice = (await complete([5, 6], return_token_ids=True)).json()["choices"][0]

    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [7, 8])


@pytest.mark.parametrize(("keep", "expected"), [(2, "cd"), (-1, "abcd")])
async def test_the_prompt_is_truncated_on_request(complete, engine, tokenizer, keep, expected):
    choice = (await complete("abcd", truncate_prompt_tokens=keep, echo=True)).json()["choices"][0]

    assert engine.requests[0].prompt_token_ids == tokenizer.encode(expected)
    assert choice["text"].startswith(expected)


async def test_a_prompt_is_truncated_to_what_fits_beside_the_output(complete, engine):
    await complete("x" * 500, truncate_prompt_tokens=-1, max_tokens=28)

    assert len(engine.requests[0].prompt_token_ids) == 100


async def test_fields_without_effect_are_warnings(complete):
    response = await complete(
        user="me",
        store=False,
        metadata=None,
        colour="red",
        stream_options=None,
        service_tier="auto",
    )

    expected = ["`user` has no effect", "`colour` is unknown and has no effect"]
    assert response.json()["warnings"] == expected
    assert json.loads(response.headers["x-tessera-warnings"]) == expected


async def test_many_unknown_fields_are_counted(complete):
    response = await complete(**{f"é{i}\n": i for i in range(1000)})

    warnings = response.json()["warnings"]
    assert warnings[0] == r"`\xe90\n` is unknown and has no effect"
    assert warnings[8:] == ["992 more fields have no effect"]


@pytest.mark.parametrize("model", [None, "fake/model", "tgi", "dummy", "http://127.0.0.1:8000"])
async def test_a_missing_name_and_those_of_tgis_clients_mean_the_served_model(complete, model):
    assert (await complete(model=model)).json()["model"] == "fake/model"


async def test_a_reply_names_the_model_as_the_request_does(open_client):
    client = await open_client(served_model_name=("small", "large"))

    async def model(**fields):
        response = await client.post("/v1/completions", json={"prompt": "a", **fields})
        return response.json().get("model", response.status_code)

    assert await model() == "small"
    assert await model(model="large") == "large"
    assert await model(model="fake/model") == 404
