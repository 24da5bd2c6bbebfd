"""The routes of the page and its files. Swagger UI comes from the package `fastapi-offline`.

The files are in memory and sent in parts: a client that reads slowly holds neither a descriptor nor a copy of a file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from starlette.requests import Request

_OWN = Path(__file__).parent
_PART_BYTES = 1 << 16
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
# Swagger UI sets styles from scripts and has images in its style sheet.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def install(app: FastAPI) -> None:
    """Add the routes. They are not part of the OpenAPI document."""
    swagger = Path(str(importlib.resources.files("fastapi_offline"))) / "static"
    files = {
        "/docs": _OWN / "page.html",
        "/docs/page.css": _OWN / "page.css",
        "/docs/start.js": _OWN / "start.js",
        "/docs/swagger-ui-bundle.js": swagger / "swagger-ui-bundle.js",
        "/docs/swagger-ui.css": swagger / "swagger-ui.css",
    }
    for path, file in files.items():
        content = file.read_bytes()
        headers = {
            **_HEADERS,
            "content-length": str(len(content)),
            "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        send = functools.partial(_send, content, headers, _MEDIA_TYPES[file.suffix])
        app.add_route(path, send, ["GET"], include_in_schema=False)


async def _send(
    content: bytes, headers: dict[str, str], media_type: str, request: Request
) -> Response:
    body = _parts(b"" if request.method == "HEAD" else content)
    return StreamingResponse(body, headers=headers, media_type=media_type)


async def _parts(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PART_BYTES):
        yield content[start : start + _PART_BYTES]
