"""Serves the page for browsers: index.html at `/` and its assets at `/page/`.

The assets are the files of the folder `assets`, served as they are, but for index.html, whose head gets a link for each
module that its script imports: a browser then asks for all of them at once. They load nothing from another host, and
the content security policy makes browsers refuse to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Self

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.errors import NotFoundError

INDEX = "index.html"
_SCRIPT = "page.js"
_HEAD_END = b"</head>"
_imported = re.compile(rb'^(?:import|export)\b[^;"]*"(\.{1,2}/[^"]+)"', re.MULTILINE).findall
PREFIX = "/page/"

# The types are fixed here because `mimetypes` also reads the host's own table.
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HTML = frozenset(("text/html", "application/xhtml+xml"))
_HEADERS = {
    # Revalidated by ETag each time, so that the page always fits the service that it talks to.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page: its content and what identifies this content."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, name: str) -> Self:
        """Return the file of a name with its content."""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, _MEDIA_TYPES["." + name.rpartition(".")[2]], etag)


def install(app: FastAPI, assets: Mapping[str, Asset]) -> None:
    """Add the routes of the page's assets; they are not part of the OpenAPI document."""

    @app.api_route(PREFIX + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def read_asset(request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_params["name"]
        if name not in assets:
            raise NotFoundError("there is no such route")
        return respond(assets[name], request)


def load_assets() -> dict[str, Asset]:
    """Read all files of the page, by path within the folder `assets`."""
    assets = dict(_read(resources.files("server.http.page") / "assets", ""))
    links = (
        f'  <link rel="modulepreload" href="{PREFIX[1:]}{it}">\n' for it in imported_modules(assets)
    )
    before, end, after = assets[INDEX].content.partition(_HEAD_END)
    content = before + "".join(links).encode() + end + after
    return assets | {INDEX: Asset.of(content, INDEX)}


def imported_modules(assets: Mapping[str, Asset]) -> list[str]:
    """Return the paths of all modules that the page's script imports before it runs, without the script itself."""
    found = [_SCRIPT]
    for name in found:
        for path in _imported(assets[name].content):
            module = posixpath.normpath(posixpath.join(posixpath.dirname(name), path.decode()))
            if module not in found:
                found.append(module)
    return found[1:]


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for file in folder.iterdir():
        name = prefix + file.name
        if file.is_dir():
            yield from _read(file, name + "/")
        else:
            yield name, Asset.of(file.read_bytes(), name)


def respond(asset: Asset, request: Request, vary: str | None = None) -> Response:
    """Make the response with a file, or 304 if the client has this content already.

    Args:
        asset: the file.
        request: a request with the method GET or HEAD.
        vary: header on which the choice of the file depended.
    """
    headers = {**_HEADERS, "etag": asset.etag}
    if vary is not None:
        headers["vary"] = vary
    known = request.headers.get("if-none-match", "")
    if asset.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


def prefers_html(accept: str) -> bool:
    """Return whether an `Accept` header asks for HTML by name, and not for JSON with a higher weight.

    Browsers name HTML. Programs and probes, which send `*/*`, `application/json` or nothing, do not.
    """
    html = json = 0.0
    for part in accept.lower().split(","):
        media_type, *parameters = (text.strip() for text in part.split(";"))
        weight = _weight(parameters)
        if media_type in _HTML:
            html = max(html, weight)
        elif media_type == "application/json":
            json = max(json, weight)
    return html > 0 and html >= json


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
