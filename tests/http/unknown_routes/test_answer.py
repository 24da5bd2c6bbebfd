"""What is said about a path that is no route."""

import itertools

import pytest

from server.http.unknown_routes.answer import UnknownRoutes
from server.http.unknown_routes.table import DEEPER, SAME, SUBJECTS

pytestmark = pytest.mark.anyio


@pytest.fixture
def message(make_app):
    app = make_app()
    unknown = UnknownRoutes(app.routes)
    return unknown.message


def test_every_route_in_the_table_exists_and_no_path_in_it_does(make_app):
    paths = {route.path for route in make_app().routes}

    assert {route for _, route in SAME.values()} <= paths
    assert not {*SAME, *DEEPER, *(f"/{name}" for name in SUBJECTS)} & paths


def test_a_route_of_another_server_is_answered_with_the_one_for_the_same_purpose(message):
    for path, (owner, route) in SAME.items():
        for typed in (path, path.upper(), f"{path}/"):
            text = message(typed)

            assert f"as in {owner}" in text
            assert f" {route} serves the same purpose" in text


def test_what_the_service_does_not_do_is_out_of_scope_under_every_prefix(message):
    for start, name, end in itertools.product(
        ["", "/v1", "/api", "/openai/v1", "/v2"], SUBJECTS, ["", "/x/y"]
    ):
        path = f"{start}/{name}{end}"
        assert path in SAME or message(path).endswith(f"is out of scope: {SUBJECTS[name]}")


def test_the_batches_of_messages_are_out_of_scope(message):
    assert "out of scope" in message("/v1/messages/batches/x/results")


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/openai/v1/responses", "POST /v1/responses"),
        ("/some/proxy/v1/models", "GET /v1/models"),
        ("/v1/generate", "POST /generate"),
        ("/v1/health", "GET /health"),
        ("/v2/health/ready", "GET /health/ready"),
        ("/Generate_Stream", "POST /generate_stream"),
    ],
)
def test_a_route_with_too_much_or_too_little_before_it_is_recognized(message, path, route):
    assert f"did you mean {route}?" in message(path)


def test_another_path_lists_all_routes_the_nearest_first(message, make_app):
    text = message("/v1/chat/complete")

    first, *others = text.partition("first: ")[2].split(", ")
    assert first == "POST /v1/chat/completions"
    shown = {it.rpartition(" ")[2] for it in [first, *others]}
    for route in make_app().routes:
        path = route.path.replace(":path}", "}")
        assert path in shown or path.startswith(("/docs/", "/page/"))
    assert "DELETE or GET or POST /v1/responses/{name}" in others


@pytest.mark.parametrize(
    "path",
    ["/" + "x" * 8000, "/a" * 4000, "/" * 8000, "/%s\n\x1b[31m<script>\u202e" % ("v1/" * 99)],
)
def test_a_message_has_a_bounded_length_and_no_control_characters(message, path):
    text = message(path)

    assert len(text) < 2000
    assert text.isprintable()


@pytest.mark.parametrize(
    "path",
    ["/k3y", "/embed/k3y", "/v1/messages/batches/k3y", "/k3y/generate", "/v1/models/load/k3y"],
)
def test_a_key_in_a_path_is_not_repeated(message, path):
    assert "k3y" not in message(path)


@pytest.mark.parametrize(
    ("path", "where"),
    [("/embed", ("error",)), ("/v1/embeddings", ("error", "message"))],
)
async def test_the_answer_has_status_404_in_the_form_of_the_dialect(client, path, where):
    for method in ("GET", "POST"):
        response = await client.request(method, path)

        text = response.json()
        for name in where:
            text = text[name]
        assert response.status_code == 404
        assert "embeddings" in text


async def test_anthropics_form_is_used_below_its_prefix(client):
    response = await client.post("/v1/messages/batches", json={})

    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


async def test_without_a_key_nothing_is_said_about_routes(open_client):
    client = await open_client(api_key=("secret",))

    for path in ("/v1/embeddings", "/nothing", "/load", "/version"):
        response = await client.get(path)

        assert response.status_code == 401
        assert "route" not in response.text
