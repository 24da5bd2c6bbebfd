"""A slash at the end of a path changes nothing, the body of a POST included."""

import httpx
import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
async def test_a_post_with_a_slash_at_the_end_is_served(client, path):
    body = {"inputs": "hi"} if path == "/generate" else {"prompt": "hi"}

    plain, slashed = [await client.post(p, json=body) for p in (path, path + "/")]

    assert slashed.status_code == plain.status_code == 200
    assert slashed.json().keys() == plain.json().keys()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/fake/model", "/info"])
async def test_a_get_with_a_slash_at_the_end_is_served(client, path):
    plain, slashed = [await client.get(p) for p in (path, path + "/")]

    assert slashed.status_code == plain.status_code == 200


@pytest.mark.parametrize("path", ["/generate//", "/nothing/"])
async def test_other_paths_are_unknown(client, path):
    assert (await client.post(path, json={"inputs": "x"})).status_code == 404


async def test_the_root_of_a_mounted_service_stays(make_app):
    transport = httpx.ASGITransport(make_app(), root_path="/r")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/r/")).status_code == 200
        assert (await client.get("/r/info/")).status_code == 200


async def test_a_byte_order_mark_before_the_body_is_skipped(client):
    body = '\ufeff{"inputs": "hi"}'.encode()
    headers = {"content-type": "application/json"}

    assert (await client.post("/generate", content=body, headers=headers)).status_code == 200
