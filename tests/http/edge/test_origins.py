"""Pages of other origins cannot make a browser use the service."""

import pytest

pytestmark = pytest.mark.anyio

ALLOWED = "https://app.example.com"
BODY = b'{"inputs": "x"}'
# As a page can send it without asking for permission.
SIMPLE_TYPES = [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}]


@pytest.fixture
async def client(open_client):
    return await open_client(cors_allow_origin=(ALLOWED,))


async def post(client, headers, path="/generate"):
    return await client.post(path, content=BODY, headers=headers)


@pytest.mark.parametrize("kind", SIMPLE_TYPES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://test:8001"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://test", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_pages_of_other_origins_are_refused(client, engine, headers, kind):
    response = await post(client, headers | kind)

    assert response.status_code == 403
    assert response.json()["error_type"] == "forbidden"
    assert "--cors-allow-origin" in response.json()["error"]
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/", "/tokenize", "/abort", "/v1/completions", "/nowhere"])
async def test_every_route_that_takes_a_body_refuses_them(client, path):
    response = await post(client, {"Origin": "https://evil.example"}, path)

    assert response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": ALLOWED},
        {"Origin": ALLOWED, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://test"},
        {"Origin": "https://test"},  # a proxy in front has the certificate
        {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
async def test_programs_allowed_origins_and_the_service_s_own_pages_pass(client, headers):
    assert (await post(client, headers)).status_code == 200


async def test_all_origins_can_be_allowed(open_client):
    client = await open_client(cors_allow_origin=("*",))

    assert (await post(client, {"Origin": "https://evil.example"})).status_code == 200


async def test_reading_is_left_to_cors(client):
    response = await client.get("/info", headers={"Origin": "https://evil.example"})

    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers
