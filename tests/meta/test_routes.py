"""All routes of the service and their methods."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from server.engine.link.front_end.client import EngineHandle
from server.http.app import create_app
from server.http.config import HTTPConfig

ROUTES = {
    "/": {"GET", "HEAD", "POST"},
    "/abort": {"POST"},
    "/chat_tokenize": {"POST"},
    "/detokenize": {"POST"},
    "/docs": {"GET", "HEAD"},
    "/docs/page.css": {"GET", "HEAD"},
    "/docs/start.js": {"GET", "HEAD"},
    "/docs/swagger-ui-bundle.js": {"GET", "HEAD"},
    "/docs/swagger-ui.css": {"GET", "HEAD"},
    "/generate": {"POST"},
    "/generate_stream": {"POST"},
    "/health": {"GET", "HEAD"},
    "/health/live": {"GET", "HEAD"},
    "/health/ready": {"GET", "HEAD"},
    "/healthz": {"GET", "HEAD"},
    "/info": {"GET"},
    "/invocations": {"POST"},
    "/livez": {"GET", "HEAD"},
    "/load": {"GET"},
    "/metrics": {"GET"},
    "/openapi.json": {"GET", "HEAD"},
    "/page/{name:path}": {"GET", "HEAD"},
    "/ping": {"GET", "HEAD"},
    "/plan": {"GET"},
    "/readyz": {"GET", "HEAD"},
    "/tokenize": {"POST"},
    "/v1/chat/completions": {"POST"},
    "/v1/completions": {"POST"},
    "/v1/load_lora_adapter": {"POST"},
    "/v1/messages": {"POST"},
    "/v1/messages/count_tokens": {"POST"},
    "/v1/models": {"GET"},
    "/v1/models/{name:path}": {"GET"},
    "/v1/responses": {"POST"},
    "/v1/responses/{name:path}": {"DELETE", "GET", "POST"},
    "/v1/unload_lora_adapter": {"POST"},
    "/version": {"GET"},
}


@pytest.fixture(scope="module")
def app():
    client = EngineHandle()
    tokenizer = SimpleNamespace(folder=None, library=Tokenizer(BPE()), is_linear=True, growth=1.0)
    return create_app(client, tokenizer, HTTPConfig(model_id="none"))


def test_every_route_and_method_is_listed_here(app):
    routes = {}
    for route in app.routes:
        routes.setdefault(route.path, set()).update(route.methods)

    assert routes == ROUTES


def test_the_openapi_document_describes_every_route_except_those_of_pages_and_its_own(app):
    paths = app.openapi()["paths"]

    undocumented = {path for path in ROUTES if path.startswith("/docs")} | {
        "/openapi.json",
        "/page/{name}",
    }
    described = {path.replace(":path}", "}"): methods for path, methods in ROUTES.items()}
    assert set(paths) == set(described) - undocumented
    for path, operations in paths.items():
        assert {method.upper() for method in operations} == described[path] - {"HEAD"}
        assert all(operation["summary"] for operation in operations.values())


def test_no_private_names_of_uvicorn_are_used():
    files = (Path(__file__).parents[2] / "server").rglob("*.py")

    assert not [f.name for f in files if "uvicorn.protocols" in f.read_text()]
