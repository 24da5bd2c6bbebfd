"""The OpenAPI document: adds request models and reply records to the routes that use them.

The routes read their bodies themselves, so FastAPI cannot infer the schemas of requests and replies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from server import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.requests import Request

ChoiceT = TypeVar("ChoiceT")
Choice: TypeAlias = ChoiceT | tuple[ChoiceT, ...]

_SCHEMAS = "#/components/schemas/"
_BODY_ERRORS: tuple[type[errors.TesseraError], ...] = (
    errors.MalformedBodyError, errors.BodyTimeoutError, errors.BodyTooLargeError, errors.MediaTypeError,
    errors.ValidationError, errors.OverloadedError, errors.UnavailableError,
)  # fmt: skip
_GENERATE_ERRORS: tuple[type[errors.TesseraError], ...] = (
    errors.AbortedError,
    errors.DeadlineExceededError,
    errors.GenerationError,
    errors.IncompleteGenerationError,
)


def describe_service_route(reply: type[msgspec.Struct], *, tag: str = "Service") -> dict[str, Any]:
    """Return the decorator arguments that document a route without a body and its reply with status 200."""
    return _describe(tag, {"application/json": {"schema": _schema_of(reply)}})


def describe_route(
    body: Choice[type[BaseModel] | type[msgspec.Struct]],
    error_reply: Choice[type[msgspec.Struct]],
    reply: Any = None,  # noqa: ANN401 - a record, a list of records, or a choice of these
    events: Choice[type[msgspec.Struct]] | None = None,
    *,
    end_mark: str | None = None,
    generates: bool = True,
    status_of: Callable[[type[errors.TesseraError]], int] = lambda error: error.status,
    tag: str = "Generate",
) -> dict[str, Any]:
    """Return the decorator arguments that document a route's body, replies and errors.

    A tuple of types means any of them.

    Args:
        body: type of the request body.
        error_reply: type of the body of every error.
        reply: type of the JSON reply with status 200; None if there is none.
        events: type of a stream's events; None if there is no stream.
        end_mark: data of the event that ends a stream; None if there is none.
        generates: whether the route generates tokens, and so can fail with the errors of generation.
        status_of: the status of the response to an error. Of errors with the same status, the last is described.
        tag: group of the route.
    """
    content: dict[str, Any] = {}
    if reply is not None:
        content["application/json"] = {"schema": _schema_of(reply)}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(events, error_reply, end_mark)}
    described = _describe(tag, content)
    for error in _BODY_ERRORS + (_GENERATE_ERRORS if generates else ()):
        described["responses"][status_of(error)] = describe_error(error, error_reply)
    described["openapi_extra"] = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _schema_of(body)}},
        }
    }
    return described


def describe_error(
    error: type[errors.TesseraError], error_reply: Choice[type[msgspec.Struct]]
) -> dict[str, Any]:
    """Describe one error response."""
    return {
        "description": (error.__doc__ or "").partition("\n")[0],
        "content": {"application/json": {"schema": _schema_of(error_reply)}},
    }


def install_openapi(
    app: FastAPI, bodies: Iterable[type[BaseModel]], replies: Iterable[type[msgspec.Struct]]
) -> None:
    """Serve the document, and replace `app.openapi` by a function that adds the missing schemas to FastAPI's."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, models = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}"
            )
            _, records = msgspec.json.schema_components(replies, ref_template=_SCHEMAS + "{name}")
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(models["$defs"] | records)
            app.openapi_schema = document
        return app.openapi_schema

    async def serve(_request: Request) -> Response:
        # Made in a thread: the first time takes 0.1 s.
        try:
            document = await asyncio.to_thread(app.openapi)
        except RuntimeError:
            raise errors.UnavailableError("the system refuses a thread at the moment") from None
        return Response(msgspec.json.encode(document), media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _describe(tag: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": [tag],
        "response_class": Response,
        "response_model": None,
        "responses": {200: {"content": content}},
    }


def _schema_of(record: Any) -> dict[str, Any]:  # noqa: ANN401
    if isinstance(record, tuple):
        return {"anyOf": [_schema_of(choice) for choice in record]}
    if hasattr(record, "__args__"):
        return {"type": "array", "items": _schema_of(record.__args__[0])}
    return {"$ref": _SCHEMAS + record.__name__}


def _event_schema(
    events: Choice[type[msgspec.Struct]],
    error_reply: Choice[type[msgspec.Struct]],
    end_mark: str | None,
) -> dict[str, Any]:
    """Describe a server-sent event as OpenAPI 3.2 does: its data is JSON in a string."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_schema_of(events), _schema_of(error_reply)]},
    }
    if end_mark is not None:
        data = {"anyOf": [{"const": end_mark}, data]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
