"""`tessera ps`: which model a running server has, its state, and what it has to do."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import Any

from server.cli.client.options import target
from server.cli.client.session import Session
from server.cli.client.streams import ServerError
from server.cli.output import fail, printable, write_result
from server.client.address import DEFAULT_URL, read_url

_COLUMNS = ("model", "url", "state", "running", "waiting", "KV cache")


def main(options: argparse.Namespace) -> None:
    """Print one line about the server; exits with status 1 if there is none."""
    try:
        if options.target is not None:
            options.url = read_url(options.target)
    except ValueError as error:
        fail(f"{options.target!r}: {error}", "ps", status=2)
    try:
        found = asyncio.run(_ask(options))
    except ServerError as error:
        fail(str(error), "ps")
    if options.json:
        write_result(json.dumps(found, indent=2))
        return
    usage = found["kv_cache_usage_ratio"]
    row = (
        printable(", ".join(found["models"])) or "-",
        found["url"],
        printable(str(found["state"] or "-")),
        *(printable(str("-" if it is None else it)) for it in (found["running"], found["waiting"])),
        f"{usage:.0%}" if isinstance(usage, float | int) else "-",
    )
    widths = [max(len(name), len(cell)) for name, cell in zip(_COLUMNS, row, strict=True)]
    lines = ("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (_COLUMNS, row))
    write_result("\n".join(lines))


async def _ask(options: argparse.Namespace) -> dict[str, Any]:
    url = options.url or DEFAULT_URL
    with contextlib.closing(Session(target(options), url)) as session:
        health, load = await session.get("/health"), await session.get("/load")
        models: list[str] = []
        with contextlib.suppress(ServerError):  # while the model is loaded
            models = await session.models() or []
    return {
        "models": models,
        "url": url,
        "state": health.get("state"),
        "running": load.get("requests_running"),
        "waiting": load.get("requests_waiting"),
        "kv_cache_usage_ratio": load.get("kv_cache_usage_ratio"),
    }
