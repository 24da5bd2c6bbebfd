"""Fields of older clients on TGI's routes: translated, accepted with a warning, or refused."""

import json

import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.tgi.legacy import BODY, PARAMETERS, Fixed, Ignored
from tests.http.conftest import frames
from tests.http.fakes import EOS_ID, say

pytestmark = pytest.mark.anyio

ROUTES = ("/generate", "/generate_stream", "/", "/tokenize")

# What the clients send, with their own defaults.
SEMANTIC_KERNEL = {
    "inputs": "hello",
    "stream": False,
    "parameters": {
        "top_k": None, "top_p": None, "temperature": 1, "repetition_penalty": None,
        "max_new_tokens": None, "max_time": None, "return_full_text": True,
        "num_return_sequences": 1, "do_sample": True, "Details": True,
    },
    "options": {"use_cache": True, "wait_for_model": False},
}  # fmt: skip
OLD_LLM_LS = {
    "inputs": "hello",
    "parameters": {
        "max_new_tokens": 60, "temperature": 0.2, "do_sample": True, "top_p": 0.95,
        "stop_tokens": None,
    },
}  # fmt: skip
NEW_LLM_LS = {"inputs": "hello", "parameters": {"parameters": {"return_full_text": False}}}
LANGCHAIN = {
    "inputs": "hello",
    "parameters": {
        "max_new_tokens": 12, "top_k": None, "top_p": 0.95, "typical_p": 0.95, "temperature": 0.8,
        "repetition_penalty": None, "return_full_text": False, "truncate": None,
        "stop_sequences": ["."], "seed": None, "do_sample": False, "watermark": False,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def answer(engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)


def warnings_of(response):
    return json.loads(response.headers.get("x-tessera-warnings", "[]"))


@pytest.mark.parametrize("path", ["/", "/generate"])
async def test_semantic_kernel_gets_its_details_and_a_warning(client, path):
    response = await client.post(path, json=SEMANTIC_KERNEL)

    reply = response.json()[0] if path == "/" else response.json()
    assert reply["details"]["generated_tokens"] == 2
    assert reply["warnings"] == warnings_of(response) == ["`options` has no effect"]


@pytest.mark.parametrize("body", [OLD_LLM_LS, NEW_LLM_LS, LANGCHAIN])
async def test_clients_that_send_only_what_has_an_effect_get_no_warning(client, body):
    response = await client.post("/generate", json=body)

    assert response.status_code == 200
    assert response.json() == {"generated_text": "Hi"}
    assert warnings_of(response) == []


async def test_llm_ls_is_understood_where_it_puts_its_parameters_too_deep(client):
    response = await client.post("/", json=NEW_LLM_LS)

    assert response.json() == [{"generated_text": "Hi"}]


@pytest.mark.parametrize("name", ["stop_sequences", "stop_tokens"])
async def test_other_names_of_stop_end_the_text(generate, engine, tokenizer, name):
    engine.script = say(tokenizer.encode("a.b.c"), FinishReason.LENGTH)

    response = await generate(**{name: ["b"]})

    assert response.json() == {"generated_text": "a.b"}


async def test_stop_strings_of_both_names_end_the_text(generate, engine, tokenizer):
    engine.script = say(tokenizer.encode("a.b.c"), FinishReason.LENGTH)

    response = await generate(stop=["c", "x"], stop_sequences=["b", "x"])

    assert response.json() == {"generated_text": "a.b"}


async def test_too_many_stop_strings_of_both_names_are_refused(generate):
    response = await generate(stop=["a", "b", "c"], stop_sequences=["d", "e"])

    assert "supports up to 4 stop sequences. Given: 5" in response.json()["error"]


@pytest.mark.parametrize("value", [7, [7]])
async def test_an_end_token_in_the_style_of_transformers_becomes_a_stop_token(
    generate, engine, value
):
    await generate(eos_token_id=value, stop_token_ids=[8])

    sampling = engine.requests[0].sampling
    assert set(sampling.stop_token_ids) == {7, 8}
    assert sampling.eos_token_ids == (EOS_ID,)


async def test_a_contradicting_name_has_no_effect_and_a_warning(generate):
    response = await generate(details=False, Details=True)

    assert response.json() == {
        "generated_text": "Hi",
        "warnings": ["`Details` has no effect beside `details`"],
    }


async def test_max_length_counts_the_prompt(generate, engine):
    await generate(inputs="hello", max_length=9)
    await generate(inputs="hello", max_length=9, max_new_tokens=2)
    await generate(inputs="hello", max_length=100_000)
    response = await generate(inputs="hello", max_length=5)

    assert [r.sampling.max_new_tokens for r in engine.requests] == [4, 2, 123]
    assert response.status_code == 422
    assert "`max_length` must be > 5, the number of `inputs` tokens. Given: 5" in response.text


async def test_several_sequences_are_refused(generate, engine):
    response = await generate(num_return_sequences=3)

    assert response.status_code == 422
    assert "`num_return_sequences` must be 1. Given: 3" in response.json()["error"]
    assert engine.requests == []


async def test_an_adapter_that_does_not_exist_is_refused_by_its_name(generate):
    response = await generate(adapter_id="a/b")

    assert response.status_code == 404
    assert "the adapter `a/b` does not exist" in response.json()["error"]


async def test_a_watermark_is_a_warning(generate):
    on, off = await generate(watermark=True), await generate(watermark=False)

    assert on.json()["warnings"] == warnings_of(on) == ["`watermark` has no effect"]
    assert "warnings" not in off.json()
    assert warnings_of(off) == []


async def test_only_the_last_event_of_a_stream_has_the_warnings(generate):
    response = await generate("/generate_stream", watermark=True, prefix="x")

    first, last = frames(response)
    assert "warnings" not in first
    assert last["generated_text"] == "Hi"
    assert last["warnings"] == warnings_of(response)
    assert last["warnings"] == ["`prefix` has no effect", "`watermark` has no effect"]


async def test_tokenize_reports_warnings_in_the_header(client):
    response = await client.post("/tokenize", json=SEMANTIC_KERNEL)

    assert [token["text"] for token in response.json()] == list("hello")
    assert warnings_of(response) == ["`options` has no effect"]


@pytest.mark.parametrize("path", ROUTES)
async def test_every_name_may_be_null(client, path):
    body = dict.fromkeys(BODY) | {"inputs": "hello", "parameters": dict.fromkeys(PARAMETERS)}

    response = await client.post(path, json=body)

    assert response.status_code == 200
    assert warnings_of(response) == []


@pytest.mark.parametrize("name", [n for n, row in PARAMETERS.items() if isinstance(row, Ignored)])
async def test_a_field_without_effect_warns_unless_it_asks_for_nothing(generate, name):
    row = PARAMETERS[name]
    for neutral in row.neutral:
        assert warnings_of(await generate(**{name: neutral})) == []

    (warning,) = warnings_of(await generate(**{name: {"anything": [1]}}))

    assert warning.startswith(f"`{name}` has no effect")
    assert row.instead in warning


async def test_true_is_not_the_number_one(generate):
    assert warnings_of(await generate(num_beams=True)) == ["`num_beams` has no effect"]
    assert (await generate(num_return_sequences=True)).status_code == 422


async def test_unknown_names_beside_known_ones_are_refused(client):
    body = {"inputs": "x", "option": {}, "parameters": {"stop_sequence": ["a"], "max_time": 1}}

    response = await client.post("/generate", json=body)

    assert response.status_code == 422
    assert "unknown field `option`" in response.json()["error"]
    assert "unknown field `parameters.stop_sequence`" in response.json()["error"]


def test_no_name_is_a_field_already():
    from server.http.dialects.tgi.schema import GenerateBody, GenerateParameters

    assert not BODY.keys() & GenerateBody.model_fields.keys()
    assert not PARAMETERS.keys() & GenerateParameters.model_fields.keys()
    assert [name for name, row in PARAMETERS.items() if isinstance(row, Fixed)]
