"""Who sent a request, for equal shares and for the engine: the API key, or without keys the address."""

from __future__ import annotations

import functools
import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import Scope

_PREFIX: Final = 64
"""Bits of an IPv6 address that are one client's: a provider gives each customer at least that network."""


def client_of_address(scope: Scope) -> str:
    """Return the client of a connection by its address.

    An IPv4 address is a client, also one that is written as IPv6; of IPv6 a network of 64 bits is. All connections of
    a proxy come from one address: headers that name another one are not read, since anybody can send them.
    """
    address = scope.get("client")
    if not address:
        return ""
    host: str = address[0]
    return host if ":" not in host else _network(host)


@functools.lru_cache(maxsize=4096)
def _network(host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _PREFIX), strict=False))
