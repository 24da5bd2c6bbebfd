"""The OpenAPI document: request models and reply records put under the routes that use them.

The routes read their bodies themselves, so FastAPI cannot see what they take and return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from server import errors
from server.engine.core.plan_report import PlanReport
from server.http.dialects.tgi import replies
from server.http.dialects.tgi.schema import GenerateBody

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pydantic import BaseModel

_REPLIES = (
    replies.ErrorReply,
    replies.GenerateReply,
    replies.HealthReply,
    replies.InfoReply,
    PlanReport,
    replies.PromptSpan,
    replies.StreamEvent,
)
_BODY_ERRORS: tuple[type[errors.TesseraError], ...] = (
    errors.MalformedBodyError,
    errors.BodyTimeoutError,
    errors.BodyTooLargeError,
    errors.MediaTypeError,
    errors.ValidationError,
    errors.UnavailableError,
)
_GENERATE_ERRORS: tuple[type[errors.TesseraError], ...] = (
    errors.GenerationError,
    errors.OverloadedError,
    errors.IncompleteGenerationError,
)


def describe_route(
    body: type[BaseModel] | None = None,
    reply: Any = None,  # noqa: ANN401 - a record or a list of records
    events: type[msgspec.Struct] | None = None,
    *,
    generates: bool = True,
) -> dict[str, Any]:
    """Arguments of a route decorator that put its body, replies and errors into the document.

    Args:
        body: of the request; None for routes without one.
        reply: JSON of status 200; None where there is none.
        events: of a stream of server-sent events; None where there is none.
        generates: whether the engine takes part.
    """
    content: dict[str, Any] = {}
    if reply is not None:
        content["application/json"] = {"schema": _schema_of(reply)}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(events)}
    failures = (_BODY_ERRORS if body else ()) + (_GENERATE_ERRORS if body and generates else ())
    described: dict[str, Any] = {
        "tags": ["Generate" if body else "Service"],
        "response_class": Response,
        "response_model": None,
        "responses": {200: {"content": content}} | {e.status: describe_error(e) for e in failures},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        described["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return described


def describe_error(error: type[errors.TesseraError]) -> dict[str, Any]:
    """One error response of the document."""
    return {
        "description": (error.__doc__ or "").partition("\n")[0],
        "content": {"application/json": {"schema": _schema_of(replies.ErrorReply)}},
    }


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi` complete: FastAPI's document and the schemas that it refers to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(_components())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema_of(reply: Any) -> dict[str, Any]:  # noqa: ANN401
    if hasattr(reply, "__args__"):
        return {"type": "array", "items": _schema_of(reply.__args__[0])}
    return {"$ref": f"#/components/schemas/{reply.__name__}"}


def _event_schema(events: type[msgspec.Struct]) -> dict[str, Any]:
    """A server-sent event as OpenAPI 3.2 describes it: its data is JSON in a string."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_schema_of(events), _schema_of(replies.ErrorReply)]},
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _components() -> dict[str, Any]:
    reference = "#/components/schemas/{model}"
    _, definitions = models_json_schema([(GenerateBody, "validation")], ref_template=reference)
    _, records = msgspec.json.schema_components(
        _REPLIES, ref_template="#/components/schemas/{name}"
    )
    return {**definitions["$defs"], **records}
