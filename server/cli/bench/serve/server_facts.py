"""Asks a server for its name, model and machine, over the routes of its API that exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.cli.bench import result
from server.cli.bench.serve.apis import Name
from server.cli.client.http_client import Client, RequestError

_OK = 200
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The description of a server.

    Attributes:
        name: of the software, with its version; "unknown" where the server does not say.
        model: its id; empty where the server does not say.
        machine: that computes; the processor of this host where the server does not say.
        kind: "cpu", or the GPU's short name, for the result file.
        versions: of the server.
    """

    name: str
    model: str
    machine: str
    kind: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)


async def ask(client: Client, api: Name, model: str | None) -> ServerFacts:
    """Ask a server for its description.

    Args:
        client: of the server.
        api: of the server.
        model: that the operator named; None takes the server's.

    Raises:
        RequestError: there is no connection, or the server is starting.
    """
    if api == "openai":
        return await _ask_openai(client, model)
    info = await _get(client, "/info") or {}
    plan = await _get(client, "/plan") or {}
    name = str(info.get("router", "unknown"))
    # Tessera's `version` is that of TGI's API.
    version = str(info.get("tessera_version", info.get("version", "")))
    arch = str(plan.get("arch", "cpu"))
    return ServerFacts(
        name=f"{name} {version}".strip(),
        model=model or str(info.get("model_id", "unknown")),
        machine=result.processor_name() if arch == "cpu" else str(plan.get("arch_name", arch)),
        kind=arch,
        versions={name: version} if version else {},
    )


async def _ask_openai(client: Client, model: str | None) -> ServerFacts:
    models = await _get(client, "/v1/models") or {}
    listed = models.get("data") or [{}]
    if model is None and "id" not in listed[0]:
        raise RequestError("GET /v1/models names no model", "give --model")
    return ServerFacts(
        name=str(listed[0].get("owned_by", "unknown")),
        model=model or str(listed[0]["id"]),
        machine=result.processor_name(),
    )


async def _get(client: Client, path: str) -> dict[str, Any] | None:
    """Return a JSON object, or None where the server does not have the route."""
    response = await client.request("GET", path)
    if response.status == _UNAVAILABLE:
        raise RequestError("the server is not ready", f"GET {path} answered {_UNAVAILABLE}")
    if response.status != _OK:
        return None
    try:
        value = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
