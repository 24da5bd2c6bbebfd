"""POST /tokenize and /detokenize: one route each for the forms of all dialects, chosen by the fields of the body."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from server.errors import TesseraError
from server.http.metrics.records import RequestRecord
from server.http.metrics.specs import Outcome
from server.http.openapi import describe_error, describe_route
from server.http.request_body import ClientDisconnectedError, read_json
from server.http.responses import error_response, json_response, warnings_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from fastapi import FastAPI
    from pydantic import BaseModel

    from server.http.context import AppContext
    from server.http.responses import ErrorBody

_CLIENT_CLOSED = 499
ENDPOINTS = ("tokenize", "detokenize")
"""Metric labels of the routes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """One form of the body of /tokenize or /detokenize, and its reply.

    Attributes:
        endpoint: one of `ENDPOINTS`.
        keys: a body with any of these fields has this form.
        body: type of the body.
        reply: type of the reply: a record or a list of records.
        error_reply: type of the body of every error.
        answer: makes the reply from the decoded body, and a warning for each accepted field without effect.
        render_error: returns the status and body of the response to an error.
        status_of: returns the status alone, for the OpenAPI document.
        errors: errors that only this form has, for the OpenAPI document.
    """

    endpoint: str
    keys: tuple[str, ...]
    body: type[BaseModel]
    reply: Any
    error_reply: Any
    answer: Callable[[AppContext, object], Awaitable[tuple[object, tuple[str, ...]]]]
    render_error: Callable[[TesseraError], ErrorBody]
    status_of: Callable[[type[TesseraError]], int] = lambda error: error.status
    errors: tuple[type[TesseraError], ...] = ()


def install(app: FastAPI, context: AppContext, forms: Iterable[TokenForm]) -> None:
    """Add the routes.

    Args:
        app: the application.
        context: the application's context.
        forms: of all dialects; the last one of a route is for bodies that have no form's fields.
    """
    for endpoint in ENDPOINTS:
        own = [form for form in forms if form.endpoint == endpoint]
        if own:
            _add_route(app, context, own)


def _add_route(app: FastAPI, context: AppContext, forms: list[TokenForm]) -> None:
    endpoint = forms[-1].endpoint

    async def respond(request: Request) -> Response:
        form = forms[-1]
        try:
            with RequestRecord(context.metrics, endpoint) as record:
                body = await read_json(request.scope, request.receive, context.config)
                if isinstance(body, dict):
                    form = next((f for f in forms if not body.keys().isdisjoint(f.keys)), form)
                reply, warnings = await form.answer(context, body)
                record.finish(Outcome.OK)
        except ClientDisconnectedError:
            return Response(status_code=_CLIENT_CLOSED)
        except TesseraError as error:
            return error_response(error, form.render_error(error))
        response = json_response(reply)
        response.raw_headers += warnings_header(warnings)
        return response

    app.add_api_route(f"/{endpoint}", respond, methods=["POST"], **_describe(forms))


def _describe(forms: list[TokenForm]) -> dict[str, Any]:
    """Document a route: what its forms' documents say, together."""
    merged: dict[str, Any] = {}
    for form in forms:
        described = describe_route(
            form.body, form.error_reply, form.reply, generates=False, status_of=form.status_of
        )
        for error in form.errors:
            described["responses"][form.status_of(error)] = describe_error(error, form.error_reply)
        if not merged:
            merged = described
            continue
        _merge(merged["openapi_extra"]["requestBody"], described["openapi_extra"]["requestBody"])
        for status, response in described["responses"].items():
            if status in merged["responses"]:
                _merge(merged["responses"][status], response)
            else:
                merged["responses"][status] = response
    return merged


def _merge(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the schema of another form to a body or a response."""
    content, added = one["content"]["application/json"], other["content"]["application/json"]
    schemas = [*content["schema"].get("anyOf", [content["schema"]]), added["schema"]]
    content["schema"] = {"anyOf": schemas}
