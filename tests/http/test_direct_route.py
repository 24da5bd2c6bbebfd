"""Routes are called without FastAPI's handling of parameters."""

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from server.http.direct_route import DirectRoute

pytestmark = pytest.mark.anyio


@pytest.fixture
def app():
    app = FastAPI()
    app.router.route_class = DirectRoute
    return app


async def test_a_function_gets_the_request_or_nothing(app):
    @app.get("/with")
    async def with_request(request: Request) -> Response:
        return Response(request.query_params["q"])

    @app.get("/without")
    async def without() -> Response:
        return Response("nothing")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        assert (await client.get("/with?q=given")).text == "given"
        assert (await client.get("/without")).text == "nothing"


async def test_paths_and_methods_are_matched_as_by_fastapi(app):
    plain = FastAPI()

    async def endpoint() -> Response:
        return Response("yes")

    for one in (app, plain):
        one.add_api_route("/a", endpoint, methods=["GET"])
        one.add_api_route("/b", endpoint, methods=["POST", "PUT"])
        one.add_api_route("/a", endpoint, methods=["PUT"])
        one.add_api_route("/c/{name:path}", endpoint, methods=["GET"])
    replies = []
    for one, root in ((app, ""), (plain, ""), (app, "/r"), (plain, "/r")):
        transport = httpx.ASGITransport(one, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
                for path in ("/a", "/a/", "/A", "/b", "/c/", "/c/d/e", "/", "//a"):
                    reply = await client.request(method, root + path)
                    replies.append((method, path, reply.status_code, reply.headers.get("location")))

    count = len(replies) // 4
    assert replies[:count] == replies[count : 2 * count]
    assert replies[2 * count : 3 * count] == replies[3 * count :]


async def test_errors_are_handled_by_the_applications_handlers(app):
    @app.exception_handler(KeyError)
    async def respond(_request: Request, _error: KeyError) -> Response:
        return Response("handled", 418)

    @app.get("/x")
    async def wrong() -> Response:
        raise KeyError

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        reply = await client.get("/x")

    assert (reply.status_code, reply.text) == (418, "handled")


def test_a_function_with_parameters_for_fastapi_fails_at_once(app):
    with pytest.raises(AssertionError, match="/x has parameters"):

        @app.get("/x")
        async def wrong(count: int) -> Response:
            return Response(str(count))


def test_every_documented_route_of_the_service_is_direct(make_app):
    routes = [route for route in make_app().routes if getattr(route, "include_in_schema", False)]

    assert len(routes) > 8
    assert all(isinstance(route, DirectRoute) for route in routes)
