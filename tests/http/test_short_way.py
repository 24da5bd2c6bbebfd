"""What takes the short way past FastAPI's routing, and that it changes no answer."""

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse

from server.errors import ValidationError
from server.http.replying import install_error_handlers
from server.http.short_way import install_short_way

pytestmark = pytest.mark.anyio


class Told(PlainTextResponse):
    """Says which way a request came: FastAPI leaves its route in the scope."""

    async def __call__(self, scope, receive, send):
        way = "long" if "route" in scope else "short"
        await PlainTextResponse(way)(scope, receive, send)


class Refused(PlainTextResponse):
    async def __call__(self, scope, receive, send):
        raise ValidationError("too much of it")


class Broken(PlainTextResponse):
    async def __call__(self, scope, receive, send):
        raise RuntimeError("a bug")


@pytest.fixture
async def ask():
    app = FastAPI()

    @app.get("/plain")
    @app.post("/plain")
    async def plain():
        return Told()

    @app.get("/request")
    async def request(request: Request):
        return Told()

    @app.get("/item/{name}")
    async def item(name: str):
        return Told()

    @app.post("/refused")
    async def refused():
        return Refused()

    @app.post("/broken")
    async def broken():
        return Broken()

    install_error_handlers(app)
    install_short_way(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client.request


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_route_that_takes_nothing_is_found_in_the_table(ask, method):
    assert (await ask(method, "/plain")).text == "short"


async def test_a_query_does_not_matter(ask):
    assert (await ask("GET", "/plain?x=1")).text == "short"


@pytest.mark.parametrize("path", ["/request", "/item/x"])
async def test_a_route_that_takes_something_is_left_to_fastapi(ask, path):
    assert (await ask("GET", path)).text == "long"


@pytest.mark.parametrize(("path", "status"), [("/plain", 405), ("/none", 404)])
async def test_what_is_not_in_the_table_is_refused_as_ever(ask, path, status):
    response = await ask("DELETE", path)
    assert response.status_code == status
    assert "error" in response.json()


async def test_an_error_of_ours_is_answered_in_its_shape(ask):
    response = await ask("POST", "/refused")
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert response.json()["error"].endswith("too much of it")


async def test_a_bug_is_answered_without_its_text(ask):
    response = await ask("POST", "/broken")
    assert response.status_code == 500
    assert "bug" not in response.text


def test_the_generate_routes_take_it(make_app):
    (middleware,) = make_app().user_middleware
    table = middleware.kwargs["table"]
    assert {("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/")} <= set(table)
