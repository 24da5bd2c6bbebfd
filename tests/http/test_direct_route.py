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


def test_a_function_with_parameters_for_fastapi_fails_at_once(app):
    with pytest.raises(AssertionError, match="/x has parameters"):

        @app.get("/x")
        async def wrong(count: int) -> Response:
            return Response(str(count))


def test_every_documented_route_of_the_service_is_direct(make_app):
    routes = [route for route in make_app().routes if getattr(route, "include_in_schema", False)]

    assert len(routes) > 8
    assert all(isinstance(route, DirectRoute) for route in routes)
