"""`POST /abort`: ends running requests by the ids that their clients gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from server.engine.link.protocol import AbortTarget
from server.errors import ValidationError
from server.http.body.request_body import ClientDisconnectedError, read_json
from server.http.openapi import describe_route
from server.http.request_id import MAX_ID_CHARACTERS, current_request
from server.http.responses import json_response

if TYPE_CHECKING:
    from server.http.context import AppContext

_CLIENT_CLOSED = 499
_MAX_IDS = 1024

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]


class AbortBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests to abort: exactly one of the fields. Ids are those of the header `X-Request-Id`."""

    request_id: RequestId | None = None
    request_ids: (
        Annotated[list[RequestId], msgspec.Meta(min_length=1, max_length=_MAX_IDS)] | None
    ) = None
    all: bool | None = None


class AbortReply(msgspec.Struct, frozen=True):
    """The ids of the requests that were aborted, and those of which no request was running."""

    aborted: list[str]
    not_found: list[str]


RECORDS = (AbortBody, AbortReply)


def install(app: FastAPI, context: AppContext, error_reply: type[msgspec.Struct]) -> None:
    """Add the route."""

    @app.post("/abort", **describe_route(AbortBody, error_reply, AbortReply, generates=False))
    async def abort(request: Request) -> Response:
        """End running requests by the ids that their clients gave them."""
        try:
            with context.admission.buffer() as buffer:
                body = await read_json(request.scope, request.receive, context.config, buffer)
        except ClientDisconnectedError:
            return Response(status_code=_CLIENT_CLOSED)
        wanted = _wanted(body)
        client = current_request().client if context.config.api_key else None
        aborted = await context.client.abort_external(AbortTarget(wanted, client))
        not_found = sorted(wanted - aborted) if wanted is not None else []
        return json_response(AbortReply(sorted(aborted), not_found))


def _wanted(body: object) -> frozenset[str] | None:
    """Return the ids of the requests to abort; None for all requests.

    Raises:
        ValidationError: the body is not an `AbortBody`.
    """
    try:
        parsed = msgspec.convert(body, AbortBody)
    except msgspec.ValidationError as error:
        raise ValidationError(f"the body of /abort is not valid: {error}") from None
    chosen = [value for value in (parsed.request_id, parsed.request_ids, parsed.all) if value]
    if len(chosen) != 1:
        raise ValidationError(
            "exactly one of `request_id`, `request_ids` and `all` (true) must be given. "
            f"Given: {len(chosen)} of them"
        )
    if parsed.all:
        return None
    return frozenset([parsed.request_id] if parsed.request_id else parsed.request_ids or ())
