"""Routes that tokenize without generating; /tokenize and /detokenize have a form for each dialect."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from server.errors import TesseraError
from server.http.body.request_body import ClientDisconnectedError, ClientWatch, read_json
from server.http.metrics.records import RequestRecord
from server.http.metrics.specs import Outcome
from server.http.openapi import describe_error, describe_route
from server.http.request_id import current_request
from server.http.responses import ErrorBody, error_response, warnings_header
from server.http.token_replies import TokenReply, send_pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from server.http.context import AppContext

ENDPOINTS = ("tokenize", "detokenize")
"""Metric labels of the routes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """One form of the body of a route, and its reply.

    Attributes:
        endpoint: one of `ENDPOINTS`, or a route of its dialect.
        keys: a body with any of these fields has this form.
        body: type of the body.
        reply: type of the reply: a record or a list of records.
        error_reply: type of the body of every error.
        answer: makes the reply from the decoded body.
        render_error: returns the status and body of the response to an error.
        status_of: returns the status alone, for the OpenAPI document.
        errors: errors that only this form has, for the OpenAPI document.
    """

    endpoint: str
    keys: tuple[str, ...]
    body: type[BaseModel]
    reply: Any
    error_reply: Any
    answer: Callable[[AppContext, object], Awaitable[TokenReply]]
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


class TokenExchange(Response):
    """Reads a request, tokenizes, and sends the reply; does nothing more when the client has disconnected.

    Args:
        context: the application's context.
        forms: of the route; the last one is for bodies that have no form's fields.
    """

    def __init__(self, context: AppContext, forms: Sequence[TokenForm]) -> None:
        self.background = None
        self._context = context
        self._forms = forms
        self._form = forms[-1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        try:
            with RequestRecord(self._context.metrics, self._form.endpoint) as record:
                await self._serve(scope, receive, send, record)
        except ClientDisconnectedError:
            current_request().disconnected = True
        except TesseraError as error:
            await error_response(error, self._form.render_error(error))(scope, receive, send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        context = self._context
        admission = context.admission
        with admission.buffer() as buffer:
            body = await read_json(scope, receive, context.config, buffer)
            if isinstance(body, dict):
                self._form = next(
                    (form for form in self._forms if not body.keys().isdisjoint(form.keys)),
                    self._form,
                )
            with ClientWatch(receive):
                await context.adapters.look(body)
                with admission.admit_tokenizing(context.client.info):
                    reply = await self._form.answer(context, body)
                buffer.add(reply.held)
                await send_pieces(send, reply.pieces, warnings_header(reply.warnings))
        record.finish(Outcome.OK)


def _add_route(app: FastAPI, context: AppContext, forms: list[TokenForm]) -> None:
    async def respond() -> Response:
        return TokenExchange(context, forms)

    path = f"/{forms[-1].endpoint}"
    app.add_api_route(path, respond, methods=["POST"], **describe_forms(forms))


def describe_forms(forms: Sequence[TokenForm]) -> dict[str, Any]:
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
