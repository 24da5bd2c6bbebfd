"""The tables of docs/http.md that say which parameters of other servers' APIs are supported.

Each parameter is sent to the application, with a scripted engine behind it, and its cell is what the reply says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from unittest import mock

import httpx
import msgspec
from fastapi import FastAPI

from docs.request_parameters import CHAT, COMPLETIONS, GENERATE, RESPONSES, Parameter
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import NUMBERS
from model.text.tokenizer import Tokenizer
from server.http.app import create_app
from server.http.config import HTTPConfig
from server.http.context import AppContext
from server.http.dialects.tgi.legacy import BODY, PARAMETERS, Fixed, Ignored, Legacy, Renamed
from server.http.dialects.tgi.schema import GenerateParameters
from tests.http.fakes import INFO, FakeEngine

_SUPPORTED = "yes"
_PREFIX = "Input validation error: "
_TEXT = "def add(a, b):"
_MESSAGES = [{"role": "user", "content": _TEXT}]
_OPENAI_ROUTES: tuple[tuple[str, Mapping[str, object], Mapping[str, Parameter]], ...] = (
    ("/v1/completions", {"prompt": _TEXT}, COMPLETIONS),
    ("/v1/chat/completions", {"messages": _MESSAGES}, CHAT),
    ("/v1/responses", {"input": _TEXT}, RESPONSES),
)


def parameter_tables() -> dict[str, str]:
    """Return tables by their marker: of sampling, of TGI's parameters, of other names there, and of OpenAI's routes."""
    return asyncio.run(_tables())


def application() -> FastAPI:
    """Return the HTTP application with a scripted engine behind it."""
    tokenizer = Tokenizer.from_folder(resolve(BUNDLED))
    engine = FakeEngine()
    # As on a CPU, where the weights are in int8.
    equal_bits = msgspec.structs.replace(INFO.plan.deterministic, requests="all")
    plan = msgspec.structs.replace(INFO.plan, deterministic=equal_bits)
    engine.info = msgspec.structs.replace(INFO, vocab_size=tokenizer.vocab_size, plan=plan)
    return create_app(engine, tokenizer, HTTPConfig(model_id="tessera"))


async def _tables() -> dict[str, str]:
    app = application()

    async def encode_chat(context: AppContext, *_: object, **__: object) -> list[int]:
        return await context.encode(_TEXT, "messages")

    transport = httpx.ASGITransport(app)
    with mock.patch.object(AppContext, "encode_chat", encode_chat):  # the template is not examined
        async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:
            rows = {
                "sampling-parameters": _sampling_rows(),
                "tgi-parameters": await _generate_rows(client),
                "tgi-other-names": _legacy_rows(),
                "openai-parameters": await _openai_rows(client),
            }
    return {marker: "\n".join(lines) for marker, lines in rows.items()}


async def _generate_rows(client: httpx.AsyncClient) -> list[str]:
    rows = ["| parameter of TGI | supported |", "|---|---|"]
    for name, parameter in sorted(GENERATE.items()):
        fields = {**parameter.beside, name: parameter.value}
        cell = await _outcome(client, "/", name, {"inputs": _TEXT, "parameters": fields})
        rows.append(f"| `{name}` | {cell} |")
    return rows


def _sampling_rows() -> list[str]:
    properties = GenerateParameters.model_json_schema()["properties"]
    rows = ["| parameter | type and range | default | meaning |", "|---|---|---|---|"]
    for name, number in NUMBERS.items():
        field = properties[name]
        schema = field["anyOf"][0]
        limits = [
            f"{sign} {schema[key]:,}"
            for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("maximum", "<="))
            if key in schema
        ]
        default = f"{number.neutral:g}" if number.neutral >= schema.get("minimum", 0) else "off"
        meaning = field["description"].removesuffix(".")
        cells = (
            f"`{name}`",
            f"{schema['type']}, {', '.join(limits)}",
            default,
            meaning[0].lower() + meaning[1:],
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _legacy_rows() -> list[str]:
    fields: list[tuple[str, str, Legacy]] = [("", name, BODY[name]) for name in sorted(BODY)]
    fields += [("parameters.", name, PARAMETERS[name]) for name in sorted(PARAMETERS)]
    rows = ["| other name | meaning |", "|---|---|"]
    for prefix, name, row in fields:
        match row:
            case Renamed(field):
                meaning = f"`{prefix}{field}`"
            case Fixed(value):
                meaning = f"only {json.dumps(value)}"
            case Ignored(neutral, instead):
                meaning = "warning" + (f": use `{instead}`" if instead else "")
                if neutral:
                    values = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
                    meaning += f"; none for {values}"
        rows.append(f"| `{prefix}{name}` | {meaning} |")
    return rows


async def _openai_rows(client: httpx.AsyncClient) -> list[str]:
    rows = [
        f"| parameter | API | {' | '.join(f'`{path}`' for path, _, _ in _OPENAI_ROUTES)} |",
        "|---|---|" + "---|" * len(_OPENAI_ROUTES),
    ]
    for name in sorted({name for _, _, table in _OPENAI_ROUTES for name in table}):
        apis = [
            api for api in ("OpenAI", "vLLM", "others") if any(api in p.api for p in _named(name))
        ]
        cells = [await _cell(client, *route, name) for route in _OPENAI_ROUTES]
        rows.append(f"| `{name}` | {', '.join(apis)} | {' | '.join(cells)} |")
    return rows


def _named(name: str) -> list[Parameter]:
    return [table[name] for _, _, table in _OPENAI_ROUTES if name in table]


async def _cell(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, object],
    table: Mapping[str, Parameter],
    name: str,
) -> str:
    if name not in table:
        return ""
    fields = {**table[name].beside, name: table[name].value}
    return await _outcome(client, path, name, {**body, **fields})


async def _outcome(client: httpx.AsyncClient, path: str, name: str, body: object) -> str:
    """Send a body and say what became of a field: supported, accepted with a warning, or the message of the refusal."""
    response = await client.post(path, json=body)
    if not response.is_success:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        return f"refused: {message.removeprefix(_PREFIX)}".replace("|", "\\|")
    warnings = json.loads(response.headers.get("x-tessera-warnings", "[]"))
    about = [warning for warning in warnings if f"`{name}" in warning]
    return "warning" if about else _SUPPORTED
