"""The address of a running service."""

from __future__ import annotations

from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"


def read_url(text: str) -> str:
    """Return the URL of a server; the scheme may be absent, and a path `/v1` at its end is dropped.

    Raises:
        ValueError: it is not the address of an HTTP server.
    """
    text = f"127.0.0.1{text}" if text.startswith(":") else text
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    is_printable = url.isprintable() and " " not in url
    if (
        parts.scheme not in ("http", "https")
        or not (parts.hostname and is_printable)
        or parts.query
        or parts.fragment
    ):
        raise ValueError(f"{url!r} is not an address like {DEFAULT_URL}")
    _ = parts.port  # raises ValueError if it is none
    return url
