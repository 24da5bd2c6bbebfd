"""With API keys, every route needs one, except the probes and the files of the documentation page."""

import pytest

from tests.meta.test_routes import ROUTES

pytestmark = pytest.mark.anyio

KEYS = ("first-key", "second/key==")
# What a GET or HEAD without a key may reach, and nothing else.
OPEN = {
    "/", "/docs", "/docs/page.css", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/health",
    "/health/live", "/health/ready", "/healthz", "/livez", "/page/{name:path}", "/ping", "/readyz",
}  # fmt: skip


@pytest.fixture
async def client(open_client):
    return await open_client(api_key=KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer  second/key== "},
        {"X-API-Key": "second/key=="},
        {"Authorization": "Basic dXNlcjpw", "X-API-Key": "first-key"},
    ],
)
async def test_each_key_opens_every_route_in_either_header(client, headers):
    response = await client.post("/generate", json={"inputs": "x"}, headers=headers)

    assert response.status_code == 200
    assert (await client.get("/metrics", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-API-Key": ""},
        {"X-API-Key": "Bearer first-key"},
        {"X-API-Key": b"\xff\xfe"},
        {"Cookie": "x-api-key=first-key"},
    ],
)
async def test_a_request_without_a_valid_key_is_refused_in_the_error_format(
    client, engine, headers
):
    response = await client.post("/generate", json={"inputs": "x"}, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json() == {
        "error": "an API key is required: send `Authorization: Bearer KEY` or `X-API-Key: KEY`",
        "error_type": "unauthorized",
    }
    assert engine.requests == []


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_only_probes_pages_and_their_files_are_open(client, path):
    url = path.replace("{name:path}", "style.css")
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        status = (await client.request(method, url)).status_code
        if path in OPEN and method in ("GET", "HEAD"):
            assert status == (200 if method in ROUTES[path] else 405), (method, path)
        else:
            assert status == 401, (method, path)


def test_every_path_that_needs_no_key_is_a_route():
    assert set(ROUTES) >= OPEN


@pytest.mark.parametrize(
    "path", ["/nowhere", "/health/", "/docsx", "http://test//health", "/health/../info"]
)
async def test_a_path_that_resembles_an_open_one_needs_a_key(client, path):
    assert (await client.get(path)).status_code == 401


async def test_without_keys_the_service_is_open(open_client):
    client = await open_client()

    assert (await client.get("/info")).status_code == 200
    document = (await client.get("/openapi.json")).json()
    assert "securitySchemes" not in document["components"]


async def test_the_openapi_document_says_which_routes_need_a_key(client):
    headers = {"X-API-Key": KEYS[0]}
    document = (await client.get("/openapi.json", headers=headers)).json()

    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    assert document["security"] == [{"bearer": []}, {"header": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_no_key = path in OPEN and method in ("get", "head")
            assert (operation.get("security") == []) is needs_no_key, (method, path)
            assert ("401" in operation["responses"]) is not needs_no_key, (method, path)


def test_the_keys_are_not_part_of_the_configuration_s_text(make_app):
    from tests.http.conftest import CONFIG

    assert "first-key" not in repr(CONFIG.__class__(model_id="m", api_key=KEYS))
