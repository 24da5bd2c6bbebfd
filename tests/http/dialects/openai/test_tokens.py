"""POST /tokenize and /detokenize: vLLM's forms beside TGI's on one route."""

import pytest

from server.engine.link.protocol import EngineState
from tests.http.fakes import EOS_ID

pytestmark = pytest.mark.anyio


@pytest.fixture
def tokenize(client):
    async def post(path="/tokenize", **body):
        return await client.post(path, json=body)

    return post


async def test_a_prompt_gives_its_tokens(tokenize, tokenizer):
    reply = (await tokenize(prompt="a b")).json()

    assert reply == {
        "count": 3,
        "max_model_len": 128,
        "tokens": tokenizer.encode("a b"),
        "token_strs": None,
    }


async def test_names_of_tokens_are_reported_on_request(tokenize):
    reply = (await tokenize(prompt="a b</s>", return_token_strs=True)).json()

    assert reply["token_strs"] == ["a", "Ġ", "b", "</s>"]


async def test_messages_give_the_tokens_of_the_conversation(tokenize, templates, tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]

    reply = (await tokenize(messages=messages, add_generation_prompt=False)).json()

    assert reply["tokens"] == tokenizer.encode("<user>a")
    assert templates[0][1]["add_generation_prompt"] is False


async def test_inputs_give_tgis_list(tokenize):
    assert (await tokenize(inputs="a")).json() == [{"id": 64, "text": "a", "start": 0, "stop": 1}]


async def test_tokens_give_their_text(tokenize, tokenizer):
    ids = [*tokenizer.encode("é!"), EOS_ID]

    reply = (await tokenize("/detokenize", tokens=ids)).json()

    assert reply == {"prompt": "é!</s>"}
    assert (await tokenize("/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**80]}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_errors_of_vllms_forms_are_openais(tokenize, path, body, status, param):
    response = await tokenize(path, **body)

    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_a_body_without_a_forms_fields_gets_tgis_error(tokenize):
    response = await tokenize(text="a")

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


async def test_the_limit_of_the_model_is_not_known_before_the_engine_is_ready(tokenize, engine):
    engine.state = EngineState.STARTING

    assert (await tokenize(prompt="a")).status_code == 503
    assert (await tokenize(inputs="a")).status_code == 200


async def test_requests_are_counted_under_their_route(tokenize, client):
    await tokenize(prompt="a")
    await tokenize(inputs="a")
    await tokenize("/detokenize", tokens=[1])

    text = (await client.get("/metrics")).text
    assert 'tessera_requests_total{endpoint="tokenize",outcome="ok"} 2.0' in text
    assert 'tessera_requests_total{endpoint="detokenize",outcome="ok"} 1.0' in text


async def test_all_forms_are_in_the_openapi_document(client):
    document = (await client.get("/openapi.json")).json()

    operation = document["paths"]["/tokenize"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    names = {option["$ref"].rsplit("/")[-1] for option in schema["anyOf"]}
    assert names == {"GenerateBody", "TokenizePromptBody", "TokenizeMessagesBody"}
    assert {"200", "400", "422"} <= set(operation["responses"])
