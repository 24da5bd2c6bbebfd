"""Health, info, tokenize and the OpenAPI document."""

import json

import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from server.engine.core.messages import EngineStats
from server.engine.core.plan_report import PlanReport
from server.engine.link.protocol import EngineState
from server.http.dialects.tgi.replies import InfoReply
from server.http.dialects.tgi.schema import GenerateBody, GenerateParameters
from server.version import version
from tests.http.fakes import EOS_ID
from tests.plans import PLAN

pytestmark = pytest.mark.anyio

ALIVE = ("/health/live", "/livez")
HEALTH = ("/", "/health", "/ping", "/healthz", "/readyz", *ALIVE)


@pytest.mark.parametrize("path", HEALTH)
async def test_a_ready_engine_is_healthy(client, path):
    response = await client.get(path)

    assert response.status_code == 200
    assert response.json() == {"state": "ready", "phase": "ready"}
    assert (await client.head(path)).status_code == 200


@pytest.mark.parametrize("path", HEALTH)
@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING])
async def test_a_starting_engine_is_alive_but_not_ready(client, engine, path, state):
    engine.state, engine.phase = state, "loading weights"

    response = await client.get(path)

    if path in ALIVE:
        assert response.status_code == 200
        assert response.json() == {"state": state.value, "phase": "loading weights"}
        return
    assert response.status_code == 503
    assert response.json() == {
        "state": state.value,
        "phase": "loading weights",
        "error": f"the model is not ready: {state.value}, loading weights",
        "error_type": "healthcheck",
    }
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("path", HEALTH)
async def test_a_stopped_engine_is_neither_ready_nor_alive(client, engine, path):
    engine.state, engine.phase = EngineState.STOPPED, "shutting down"

    assert (await client.get(path)).status_code == 503


async def test_info_names_the_model_and_every_limit(client):
    response = await client.get("/info")

    info = msgspec.json.decode(response.content, type=InfoReply)
    assert info.model_id == "fake/model"
    assert info.model_dtype == "float32"
    assert info.quantization == "none"
    assert (info.max_input_tokens, info.max_total_tokens) == (127, 128)
    assert (info.max_concurrent_requests, info.max_best_of, info.max_stop_sequences) == (128, 2, 4)
    assert info.router == "tessera"
    assert set(response.json()) == set(InfoReply.__struct_fields__)


@pytest.mark.parametrize(
    ("template", "continues_text", "use"),
    [
        (None, False, "completion"),
        ("{{ messages }}", False, "chat"),
        ("{{ messages }}", True, "completion"),
    ],
)
async def test_info_tells_what_the_model_is_made_for(
    open_client, tokenizer, template, continues_text, use
):
    chat_template = template and ChatTemplate({"default": template}, tokenizer)
    client = await open_client(chat_template=chat_template, continues_text=continues_text)

    info = (await client.get("/info")).json()

    assert (info["model_use"], info["chat_template"]) == (use, template is not None)


async def test_the_plan_route_returns_the_plan_of_the_engine(client):
    response = await client.get("/plan")

    assert response.status_code == 200
    assert msgspec.json.decode(response.content, type=PlanReport) == PLAN
    assert response.json()["phases"][0]["refused"] == [
        {"kernel": "portable_prefill", "reasons": ["no head_dim 7"]}
    ]


async def test_the_plan_is_unavailable_while_the_engine_starts(client, engine):
    engine.state, engine.info = EngineState.STARTING, None

    response = await client.get("/plan")

    assert response.status_code == 503
    assert response.json()["error_type"] == "unavailable"


async def test_tokenize_reports_the_characters_of_each_token(client, tokenizer):
    response = await client.post("/tokenize", json={"inputs": "aé</s>"})

    tokens = response.json()
    assert [t["id"] for t in tokens] == tokenizer.encode("aé</s>")
    assert tokens[0] == {"id": tokenizer.encode("a")[0], "text": "a", "start": 0, "stop": 1}
    assert tokens[-1] == {"id": EOS_ID, "text": "</s>", "start": 2, "stop": 6}


async def test_tokenize_works_while_the_engine_starts(client, engine):
    engine.state, engine.info = EngineState.STARTING, None

    assert (await client.post("/tokenize", json={"inputs": "a"})).status_code == 200


async def test_tokenize_truncates_like_generate(client):
    response = await client.post(
        "/tokenize", json={"inputs": "abcdef", "parameters": {"truncate": 2}}
    )

    assert [t["text"] for t in response.json()] == ["e", "f"]


async def test_the_document_is_openapi_with_every_reference_resolved(client):
    document = (await client.get("/openapi.json")).json()

    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    assert set(schemas["GenerateParameters"]["properties"]) == set(GenerateParameters.model_fields)
    assert schemas["GenerateBody"]["required"] == ["inputs"]
    assert set(schemas["GenerateBody"]["properties"]) == set(GenerateBody.model_fields)
    assert "HTTPValidationError" not in schemas


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_the_document_declares_body_replies_and_errors(client, path):
    document = (await client.get("/openapi.json")).json()

    route = document["paths"][path]["post"]
    assert route["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/GenerateBody"
    }
    assert set(route["responses"]) == {
        "200", "400", "408", "413", "415", "422", "424", "429", "499", "500", "503", "504",
    }  # fmt: skip
    content = set(route["responses"]["200"]["content"])
    assert (
        content
        == {
            "/generate": {"application/json"},
            "/generate_stream": {"text/event-stream"},
            "/": {"application/json", "text/event-stream"},
        }[path]
    )


async def test_the_document_declares_the_mark_that_ends_a_stream(client):
    document = (await client.get("/openapi.json")).json()

    def data(path):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        return content["text/event-stream"]["itemSchema"]["properties"]["data"]

    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        assert data(path)["anyOf"][0] == {"const": "[DONE]"}
    for path in ("/generate_stream", "/v1/responses", "/v1/messages"):
        assert data(path)["contentMediaType"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/invocations",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ],
)
async def test_the_document_declares_that_a_model_may_be_unknown(client, path):
    document = (await client.get("/openapi.json")).json()

    assert "404" in document["paths"][path]["post"]["responses"]


async def test_the_interactive_page_is_served(client):
    assert (await client.get("/docs")).status_code == 200


async def test_the_version_is_told_in_vllms_form(client):
    assert (await client.get("/version")).json() == {"version": version()}


async def test_the_load_is_what_runs_and_waits_and_how_full_the_cache_is(client, engine):
    engine.stats = EngineStats(num_running=2, num_waiting=3, kv_usage=0.25)

    assert (await client.get("/load")).json() == {
        "server_load": 0,
        "requests_running": 2,
        "requests_waiting": 3,
        "kv_cache_usage_ratio": 0.25,
    }
