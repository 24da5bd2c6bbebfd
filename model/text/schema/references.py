"""Finds what the references of a JSON schema refer to, within the document."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from model.errors import GrammarError

_VALUES: Final = frozenset({"enum", "const", "default", "examples", "example"})
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")


class References:
    """The identifiers and anchors of a document.

    Args:
        root: the document.
    """

    def __init__(self, root: Any) -> None:  # noqa: ANN401 - a JSON value
        self._root = root
        self._ids: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        level: list[tuple[Any, str]] = [(root, "")]
        while level:
            node, base = level.pop()
            if isinstance(node, list):
                level += [(item, base) for item in node]
            elif isinstance(node, dict):
                base = self.base_of(node, base)
                self._ids.setdefault(base, node)
                for key in _ANCHORS:
                    if isinstance(name := node.get(key), str):
                        self._anchors.setdefault((base, name), node)
                level += [(value, base) for key, value in node.items() if key not in _VALUES]

    def base_of(self, node: Any, base: str) -> str:  # noqa: ANN401 - a JSON value
        """Return the base of the references in a schema within one whose base is given."""
        for key in ("$id", "id") if isinstance(node, dict) else ():
            name = node.get(key)
            if not isinstance(name, str):
                continue
            if name.startswith("#"):
                self._anchors.setdefault((base, name[1:]), node)
            else:
                try:
                    return urldefrag(urljoin(base, name)).url
                except ValueError:
                    return base
        return base

    def find(self, reference: str, base: str) -> tuple[Any, str]:
        """Return what a reference refers to, and the base there.

        Raises:
            GrammarError: nothing in the document.
        """
        uri, fragment = reference, ""
        try:
            uri, fragment = urldefrag(reference)
            target = urldefrag(urljoin(base, uri)).url if uri else base
        except ValueError:
            target = reference
        for document, start in ((self._ids.get(target), target), (self._root, "")):
            if document is None or (start != target and uri):
                continue
            if not fragment:
                return document, start
            if fragment.startswith("/"):
                found = self._follow(document, start, fragment[1:])
            else:
                found = self._anchor(start, unquote(fragment))
            if found is not None:
                return found
        for key in ("$defs", "definitions"):
            named = self._root.get(key) if isinstance(self._root, dict) else None
            if isinstance(named, dict) and isinstance(named.get(reference), dict | bool):
                return named[reference], ""
        shown = reference[:100].encode("unicode_escape").decode()
        raise GrammarError(f"the reference `{shown}` leads nowhere in the schema")

    def _anchor(self, base: str, name: str) -> tuple[Any, str] | None:
        node = self._anchors.get((base, name))
        return None if node is None else (node, self.base_of(node, base))

    def _follow(self, node: Any, base: str, pointer: str) -> tuple[Any, str] | None:  # noqa: ANN401 - a JSON value
        tokens = pointer.split("/")
        for i, token in enumerate(tokens):
            if isinstance(node, list):
                if not token.isdecimal() or int(token) >= len(node):
                    return None
                node = node[int(token)]
            elif isinstance(node, dict):
                # Generators escape names in several ways, or not at all.
                plain = token.replace("~1", "/").replace("~0", "~")
                decoded = unquote(token).replace("~1", "/").replace("~0", "~")
                key = next((k for k in (decoded, plain, token) if k in node), None)
                if key is None:
                    rest = "/".join(tokens[i:])
                    return (node[rest], base) if rest in node else None
                node = node[key]
            else:
                return None
            base = self.base_of(node, base)
        return node, base
