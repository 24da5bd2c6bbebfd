"""GET /v1/models and /v1/models/{id}."""

import datetime

import pytest

from server.engine.link.protocol import EngineState

pytestmark = pytest.mark.anyio


async def test_every_name_of_the_model_is_listed(open_client):
    client = await open_client(served_model_name=("a", "org/b"))

    models = (await client.get("/v1/models")).json()

    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["a", "org/b"]
    first = models["data"][0]
    assert (first["object"], first["root"], first["max_model_len"]) == ("model", "fake/model", 128)
    assert (await client.get("/v1/models/org/b")).json() == models["data"][1]


async def test_the_list_has_the_fields_of_anthropic_s_too(open_client):
    client = await open_client(served_model_name=("a", "org/b"))

    models = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()

    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "a", "org/b")
    first = models["data"][0]
    assert (first["type"], first["display_name"], first["lifecycle"]) == ("model", "a", "active")
    created = datetime.datetime.fromisoformat(first["created_at"])
    assert created.timestamp() == first["created"]
    assert first["max_input_tokens"] == first["max_tokens"] == 127


async def test_an_unknown_model_is_not_found(client):
    response = await client.get("/v1/models/other")

    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_models_are_not_listed_before_the_engine_is_ready(client, engine):
    engine.state = EngineState.STARTING

    assert (await client.get("/v1/models")).status_code == 503
