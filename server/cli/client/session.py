"""A running server as `tessera chat` and `tessera complete` use it: which model it has, and streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from model.errors import ModelFolderError
from model.hub.names import read_name
from server.cli.client.http_client import Client, RequestError, Target
from server.cli.client.streams import Piece, Route, ServerError
from server.client.errors import read_error
from server.client.events import EventReader

_OK, _UNAUTHORIZED, _NOT_FOUND, _METHOD_NOT_ALLOWED, _UNAVAILABLE = 200, 401, 404, 405, 503
_SAFE_CONTROLS = {ord("\n"), ord("\t")}
_CONTROLS = {
    code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in _SAFE_CONTROLS
}


class Session:
    """Requests to one server, from one event loop."""

    def __init__(self, target: Target, url: str) -> None:
        self._client = Client(target)
        self._url = url

    async def models(self) -> list[str] | None:
        """Return the names of the models that the server lists, or None if it has no `/v1/models`.

        Raises:
            ServerError: there is no server, or it refuses.
        """
        try:
            response = await self._client.request("GET", "/v1/models")
        except RequestError as error:
            raise self._lost(error) from error
        if response.status in (_NOT_FOUND, _METHOD_NOT_ALLOWED):
            return None
        if response.status != _OK:
            raise self._refused(response.status, response.body)
        try:
            listed = msgspec.json.decode(response.body, type=_Models).data
        except msgspec.DecodeError:
            return None
        return [model.id for model in listed]

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path, whatever the status; an empty one for anything else.

        Raises:
            ServerError: there is no server, or it wants another key.
        """
        try:
            response = await self._client.request("GET", path)
        except RequestError as error:
            raise self._lost(error) from error
        if response.status == _UNAUTHORIZED:
            raise self._refused(response.status, response.body)
        try:
            return msgspec.json.decode(response.body, type=dict[str, Any])
        except msgspec.DecodeError:
            return {}

    async def is_for_chat(self) -> bool:
        """Return whether the served model is made for conversations; also true for servers that do not say.

        Raises:
            ServerError: there is no server, or it wants another key.
        """
        return (await self.get("/info")).get("model_use") != "completion"

    async def stream(self, route: Route, body: bytes) -> AsyncGenerator[Piece, None]:
        """Send a request and yield the parts of its answer. Closing the generator aborts the request.

        Raises:
            ServerError: the server refuses, the stream ends with an error, or the connection is lost.
        """
        pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        request = asyncio.ensure_future(
            self._client.request(
                "POST", route.path, body, lambda status, data, _: pieces.put_nowait((status, data))
            )
        )
        request.add_done_callback(lambda _: pieces.put_nowait(None))
        events, refusal, finished = EventReader(), b"", False
        try:
            while (piece := await pieces.get()) is not None:
                status, data = piece
                if status != _OK:
                    refusal += data
                    continue
                for event in events.feed(data):
                    part = route.read(event)
                    finished |= part.finish is not None
                    yield part
            response = await request
        except RequestError as error:
            raise self._lost(error) from error
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)  # closes the connection
        if response.status != _OK:
            raise self._refused(response.status, refusal)
        if not finished:
            raise ServerError("the server ended the stream before the answer was complete")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _lost(self, error: RequestError) -> ServerError:
        if error.kind == "cannot connect":
            return ServerError(
                f"no server answers at {self._url} ({str(error).partition(': ')[2]}); "
                "start one with `tessera serve`, or give the URL of another"
            )
        return ServerError(f"{self._url}: {error}")

    def _refused(self, status: int, body: bytes) -> ServerError:
        if status == _UNAUTHORIZED:
            return ServerError(
                f"the server wants another key than --api-key or TESSERA_API_KEY gives: {read_error(body).message}"
            )
        if status == _UNAVAILABLE:
            return ServerError(f"the server is not ready: {read_error(body).message}")
        return ServerError(f"the server refuses the request ({status}): {read_error(body).message}")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def listed_name(model: str, listed: Sequence[str]) -> str | None:
    """Return the name under which a server lists a model; None if it does not.

    Args:
        model: as `model.hub.names` reads names, so `qwen3-0.6b` is Qwen/Qwen3-0.6B.
        listed: by the server.
    """
    names = [model]
    with contextlib.suppress(ModelFolderError):
        names.append(read_name(model).name)
    folded = {it.casefold(): it for it in listed}
    return next((folded[it.casefold()] for it in names if it.casefold() in folded), None)


async def write_answer(parts: AsyncGenerator[Piece, None], received: list[str]) -> None:
    """Write an answer to standard output as it arrives, and the server's remarks to standard error.

    On a terminal, control characters are replaced: a text must not be able to change the terminal.

    Args:
        parts: of the answer.
        received: gets the text, so that the caller has it when the answer is interrupted.

    Raises:
        ServerError: from the stream.
    """
    table: dict[int, Any] = _CONTROLS if sys.stdout.isatty() else {}
    remarks: list[str] = []
    async for part in parts:
        received.append(part.text)
        if part.text:
            sys.stdout.write(part.text.translate(table))
            sys.stdout.flush()
        remarks += part.warnings
        if part.finish == "length":
            remarks.append("the answer ended at the limit of tokens")
    if received and sys.stdout.isatty():
        sys.stdout.write("\n")
        sys.stdout.flush()
    for remark in remarks:
        print(f"[{remark}]", file=sys.stderr)
