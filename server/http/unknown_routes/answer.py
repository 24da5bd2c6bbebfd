"""Writes the message for a path that is no route: the route that does the same, why none does, or all routes."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING

from starlette.routing import Route

from server.http.unknown_routes.table import DEEPER, SAME, SUBJECTS, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.routing import BaseRoute

_LONGEST_PATH = 200
"""Characters of a path that are compared. No route is longer."""
_FILES = ("/docs/", "/page/")
"""Paths below these are files of a page, which nobody types."""


class UnknownRoutes:
    """The routes of an application, and the messages for paths that are none of them.

    Args:
        routes: of the application. They are read for the first message, and must not change later.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = routes
        self._listed: dict[str, str] = {}

    def message(self, path: str) -> str:
        """Return the message for a path.

        The time and the length do not grow with the path: one of any length costs as much as one of 200 characters.
        Of the path, only what a table has is repeated: the rest may be a key that was put there by mistake.
        """
        plain = path[:_LONGEST_PATH].rstrip("/").lower() or "/"
        if plain in SAME:
            owner, route = SAME[plain]
            return f"there is no route {plain} as in {owner}; {self._named(route)} serves the same purpose"
        parts = plain.strip("/").split("/")
        if why := _out_of_scope(plain, parts):
            return f"there is no route {why}"
        if moved := self._elsewhere(parts):
            hint = ""
            if moved.startswith("/v1/"):
                hint = " The base URL of OpenAI's clients ends with /v1, once"
            return f"there is no such route; did you mean {self._named(moved)}?{hint}"
        return f"there is no such route; the routes, the nearest first: {', '.join(self._nearest_first(plain))}"

    def _elsewhere(self, parts: list[str]) -> str | None:
        """Return the route that a path is with too much or too little before it."""
        paths = self._paths()
        for start in range(len(parts)):
            rest = "/".join(parts[start:])
            if rest:
                for route in (f"/{rest}", f"/v1/{rest}"):
                    if route in paths:
                        return route
        return None

    def _named(self, route: str) -> str:
        """Return a route with its methods, as in `POST /generate`."""
        return f"{self._paths()[route]} {route}"

    def _nearest_first(self, path: str) -> list[str]:
        words = _words(path)

        def nearness(route: str) -> tuple[int, int]:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(path, route, strict=False))
            return -len(words & _words(route)), -sum(1 for _ in same)

        listed = sorted(self._paths(), key=nearness)
        return [self._named(route) for route in listed if not route.startswith(_FILES)]

    def _paths(self) -> dict[str, str]:
        """Return the methods of each path, as text."""
        if not self._listed:
            methods: dict[str, set[str]] = {}
            for route in self._routes:
                if isinstance(route, Route):
                    path = re.sub(r":\w+}", "}", route.path)
                    methods.setdefault(path, set()).update((route.methods or set()) - {"HEAD"})
            self._listed = {
                path: " or ".join(sorted(names)) for path, names in sorted(methods.items())
            }
        return self._listed


def _out_of_scope(path: str, parts: list[str]) -> str:
    """Return the part of a path that the table has and why it is out of scope; empty if it is not."""
    for number, part in enumerate(parts, 1):
        if part in SUBJECTS:
            return f"/{'/'.join(parts[:number])}, which is out of scope: {SUBJECTS[part]}"
        if part not in VERSIONS:
            break
    for start, why in DEEPER.items():
        if path.startswith(start):
            return f"{start}, which is out of scope: {why}"
    return ""


def _words(path: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]{2,}", path)) - VERSIONS
