"""The routes of the page and its files. Swagger UI comes from the package `fastapi-offline`."""

from __future__ import annotations

import functools
import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import FileResponse, Response

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

_OWN = Path(__file__).parent
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
        app.add_route(path, functools.partial(_send, file), ["GET"], include_in_schema=False)


async def _send(file: Path, _request: Request) -> Response:
    return FileResponse(file, headers=_HEADERS)
