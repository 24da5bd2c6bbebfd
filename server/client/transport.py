"""What both clients tell httpx2, and what they make of its errors."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2

from server.client.address import read_url
from server.client.errors import ServiceConnectionError, ServiceTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from server.client.calls import Call

_CONNECT_SECONDS = 10.0
_NO_PROXY = {"all://": None, "http://": None, "https://": None}
_is_token = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch


def options(
    base_url: str, api_key: str | None, timeout: float | None, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the arguments of httpx2's clients.

    Raises:
        ValueError: a value is not valid.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; it must be above 0 seconds, or None for no limit")
    sent = {"Accept-Encoding": "identity", **(headers or {})}
    for name, value in (headers or {}).items():
        if not _is_token(name):
            raise ValueError(f"{name!r} is not the name of a header")
        _check_text(f"header {name}", value)
    if api_key is not None:
        _check_text("api_key", api_key)
        sent["Authorization"] = f"Bearer {api_key}"
    url = read_url(base_url)
    connect = _CONNECT_SECONDS if timeout is None else min(timeout, _CONNECT_SECONDS)
    return {
        "base_url": url,
        # A proxy of the environment cannot reach a service of this machine, and would get its key.
        "mounts": _NO_PROXY if _is_loopback(urlsplit(url).hostname or "") else None,
        "headers": sent,
        "timeout": httpx2.Timeout(timeout, connect=connect),
        # No limit of concurrent requests: the service has its own.
        "limits": httpx2.Limits(max_connections=None),
    }


@contextlib.contextmanager
def reading_environment() -> Iterator[None]:
    """Name the variables that httpx2 reads when a client is made, in the error for one that is wrong.

    Raises:
        ValueError: the address of a proxy or the file of certificates cannot be used.
    """
    try:
        yield
    except (httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
        raise ValueError(
            "a variable of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE or SSL_CERT_DIR)"
            f" cannot be used: {error}"
        ) from error


def request(call: Call[Any], request_id: str | None) -> dict[str, Any]:
    """Return the arguments of `build_request` of httpx2's clients.

    Raises:
        ValueError: the id is not valid.
    """
    headers = {}
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    if request_id is not None:
        _check_text("request_id", request_id)
        headers["X-Request-Id"] = request_id
    return {"method": call.method, "url": call.path, "content": call.body, "headers": headers}


def connection_error(
    error: httpx2.RequestError, url: httpx2.URL, request_id: str | None = None
) -> ServiceConnectionError:
    """Return the client's error for one of httpx2.

    Args:
        error: of a request.
        url: of the request.
        request_id: of the request, if it is known.
    """
    place = str(url.copy_with(userinfo=b""))  # without a password
    if isinstance(error, httpx2.ConnectTimeout):
        return ServiceTimeoutError(f"{place}: no connection within the timeout")
    if isinstance(error, httpx2.TimeoutException):
        return ServiceTimeoutError(
            f"{place}: nothing arrived within the timeout", request_id=request_id
        )
    if isinstance(error, httpx2.ConnectError):
        return ServiceConnectionError(f"{place}: no service answers ({error})")
    text = str(error) or type(error).__name__
    if isinstance(error, httpx2.DecodingError):
        return ServiceConnectionError(
            f"{place}: the answer cannot be read ({text})", request_id=request_id
        )
    return ServiceConnectionError(
        f"{place}: the connection was lost ({text})", request_id=request_id
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check_text(name: str, text: str) -> None:
    """Check what becomes a header; the message does not show it, since it may be a secret."""
    if not (text.isascii() and text.isprintable() and text.strip()):
        raise ValueError(f"{name} is empty or has characters other than printable ASCII")
