"""Requests for a host that the service does not have are refused."""

import pytest

from server.http.edge.hosts import without_port

pytestmark = pytest.mark.anyio

HOSTS = ("localhost", "127.0.0.1", "[::1]", "*.example.com", "Named.test.", "*.suffix.test.")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "a.b.example.com:1",
        # The same names in absolute form, as a URL may have them.
        "localhost.",
        "LOCALHOST.:8000",
        "127.0.0.1.",
        "a.example.com.",
        "A.Example.COM.:8000",
        "named.test",
        "named.test.",
        "b.suffix.test",
    ],
)
async def test_allowed_hosts_are_served_on_any_port(open_client, host):
    client = await open_client(allowed_hosts=HOSTS)

    assert (await client.get("/info", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "example.com",
        "127.0.0.1.evil",
        "[::2]",
        "evil:x",
        "",
        ".",
        "localhost..",
        ".localhost",
        "localhost.:x",
        "localhost:",
        "localhost:80a",
        "localhost:8000.",
        "localhost .",
        "localhost.evil.",
        "localhost.evil.example.:8000",
        "local.host",
        "evil.localhost",
        "evil.example.",
        "example.com.",
        ".example.com.evil",
        "a.example.com.evil",
        "xexample.com",
    ],
)
async def test_other_hosts_are_refused_on_every_route_but_health_checks(open_client, host):
    client = await open_client(allowed_hosts=HOSTS)

    for path in ("/", "/info", "/metrics", "/v1/models"):
        response = await client.get(path, headers={"Host": host})

        assert response.status_code == 403, path
        assert "--allowed-hosts" in response.text
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
async def test_health_checks_may_be_sent_to_an_address(open_client, path):
    client = await open_client(allowed_hosts=HOSTS)

    assert (await client.get(path, headers={"Host": "10.0.0.7:8000"})).status_code == 200
    assert (await client.post(path, headers={"Host": "10.0.0.7:8000"})).status_code == 403


async def test_a_refusal_has_the_body_of_the_path_s_api(open_client):
    client = await open_client(allowed_hosts=HOSTS)

    ours = (await client.get("/info")).json()
    openai = (await client.get("/v1/models")).json()

    assert ours["error_type"] == "forbidden"
    assert openai["error"]["type"] == "PermissionDeniedError"


async def test_any_host_is_served_by_default(client):
    assert (await client.get("/info", headers={"Host": "anything"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [(b"a:80", b"a"), (b"a", b"a"), (b"[::1]:80", b"[::1]"), (b"[::1]", b"[::1]"), (b"a:", b"a:")],
)
def test_only_a_number_after_the_last_colon_is_a_port(host, name):
    assert without_port(host) == name
