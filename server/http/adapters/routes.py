"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the bodies of vLLM."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from server.errors import ForbiddenError, UnknownModelError, ValidationError
from server.http.body.request_body import ClientDisconnectedError, read_json
from server.http.openapi import describe_error, describe_route
from server.http.request_id import current_request

if TYPE_CHECKING:
    from server.http.context import AppContext

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger("tessera")

_CLIENT_CLOSED = 499
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class LoadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to load: its name, and its folder on the machine of the service or a repository of the Hub."""

    lora_name: _Text
    lora_path: _Text
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to unload; the number that vLLM gives an adapter has no effect."""

    lora_name: _Text
    lora_int_id: int | None = None


RECORDS = (LoadAdapterBody, UnloadAdapterBody)


def install(app: FastAPI, context: AppContext, error_reply: type[msgspec.Struct]) -> None:
    """Add the routes."""

    async def load(request: Request) -> Response:
        """Load an adapter, which requests may choose by its name from then on."""
        _check_permission(context)
        body = await _read(request, context, LoadAdapterBody)
        if body is None:
            return Response(status_code=_CLIENT_CLOSED)
        await context.adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        log.info("loaded the adapter %s", body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text)

    async def unload(request: Request) -> Response:
        """Unload an adapter; requests that have it run to their end."""
        _check_permission(context)
        body = await _read(request, context, UnloadAdapterBody)
        if body is None:
            return Response(status_code=_CLIENT_CLOSED)
        await context.adapters.unload(body.lora_name)
        log.info("unloaded the adapter %s", body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text)

    for name, route, record in (
        ("load", load, LoadAdapterBody),
        ("unload", unload, UnloadAdapterBody),
    ):
        app.add_api_route(
            f"/v1/{name}_lora_adapter", route, methods=["POST"], **_described(record, error_reply)
        )


def _described(record: type[msgspec.Struct], error_reply: type[msgspec.Struct]) -> dict[str, Any]:
    described = describe_route(record, error_reply, generates=False)
    described["responses"][200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    for error in (ForbiddenError, UnknownModelError):
        described["responses"][error.status] = describe_error(error, error_reply)
    return described


def _check_permission(context: AppContext) -> None:
    """Check that the request's API key may change the adapters.

    Raises:
        ForbiddenError: it may not, or the service has no keys.
    """
    if current_request().limits.manages_adapters:
        return
    if context.config.api_key:
        raise ForbiddenError("the API key may not load adapters: it needs manages_adapters=1")
    raise ForbiddenError(
        "adapters are loaded with an API key that may do so: give the service --api-key-file with a key that has"
        " manages_adapters=1"
    )


async def _read(request: Request, context: AppContext, record: type[T]) -> T | None:
    """Read a body; None if the client has disconnected.

    Raises:
        ValidationError: it is not a `record`.
    """
    try:
        with context.admission.buffer() as buffer:
            body = await read_json(request.scope, request.receive, context.config, buffer)
        return msgspec.convert(body, record)
    except ClientDisconnectedError:
        return None
    except msgspec.ValidationError as error:
        raise ValidationError(f"the body is not valid: {error}") from None
