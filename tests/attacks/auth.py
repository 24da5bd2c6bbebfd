"""Attacks on the API keys, and on what answers, metrics and errors reveal."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.attacks.raw import check, exchange, head, post, statuses
from tests.attacks.record import Attack

if TYPE_CHECKING:
    from tests.attacks.record import Target

_BODY = b'{"inputs": "x", "parameters": {"max_new_tokens": 2}}'
_CANARY = "canary-4711"
_OPEN = {"/", "/health", "/health/ready", "/health/live", "/healthz", "/livez", "/ping", "/readyz"}
_FOLDERS = "|".join(
    re.escape(f"{folder}/") for folder in (Path.home(), Path(__file__).parents[2]) if folder.name
)
_INTERNALS = re.compile(
    rf"Traceback|File \"|\.py\b|0x[0-9a-f]{{6,}}|/site-packages/|/home/|{_FOLDERS}"
)


async def wrong_keys(target: Target) -> None:
    """Send no key, wrong keys, parts of the key, and keys that are no text."""
    key = target.api_key or ""
    given = [
        "", "Authorization:", "Authorization: Bearer", "Authorization: Bearer  ", "Authorization: Bearer x",
        f"Authorization: Bearer {key[:-1]}", f"Authorization: Bearer {key}x", f"Authorization: Bearer {key.upper()}",
        f"Authorization: Basic {key}", f"Authorization: {key}", "Authorization: Bearer \xff\xfe", "X-API-Key:",
        f"X-API-Key: {key[1:]}", "Authorization: Bearer " + "x" * 20_000, f"Cookie: key={key}",
    ]  # fmt: skip
    for fields in given:
        sent = [fields] if fields else []
        answer = await exchange(
            target, [post(target, _BODY, *sent, "Connection: close", key=False)]
        )
        check(statuses(answer), [401], fields[:60])
        check(b"www-authenticate: bearer" in answer.lower(), True, "WWW-Authenticate")
    long = post(target, _BODY, "Authorization: Bearer " + "x" * 1_000_000, key=False)
    check(statuses(await exchange(target, [long])) in ([431], []), True, "a key of 1 MB")
    query = post(target, _BODY, "Connection: close", path=f"/generate?key={key}", key=False)
    check(statuses(await exchange(target, [query])), [401], "a key in the URL")
    await _compare_times(target, key)


async def _compare_times(target: Target, key: str) -> None:
    """Check that a wrong key takes as long, whether its beginning is right or not. A coarse check."""
    times: dict[str, list[float]] = {"x" * len(key): [], key[:-1] + "\x21": []}
    async with httpx.AsyncClient(base_url=target.url, timeout=30.0) as client:
        for _ in range(100):
            for wrong, measured in times.items():
                start = time.perf_counter()
                await client.get("/info", headers={"X-API-Key": wrong})
                measured.append(time.perf_counter() - start)
    first, second = (statistics.median(measured) for measured in times.values())
    check(abs(first - second) < 0.0005, True, f"medians of {first:.6f} s and {second:.6f} s")


async def routes_without_key(target: Target) -> None:
    """Request every documented route without a key."""
    async with httpx.AsyncClient(base_url=target.url, timeout=30.0) as client:
        document = (await client.get("/openapi.json", headers=target.headers)).json()
        check(len(document["paths"]) > 10, True, "documented routes")
        for path, operations in document["paths"].items():
            for method in operations:
                if path in _OPEN and method == "get":
                    continue
                reply = await client.request(method, path.format(name="x"), content=_BODY)
                check(reply.status_code, 401, f"{method} {path}")
        for path in ("/openapi.json", "/metrics", "/nowhere", "/v1/nowhere"):
            check((await client.get(path)).status_code, 401, path)


async def secrets_in_answers(target: Target) -> None:
    """Look for the key and for a prompt in metrics, errors and other routes."""
    key = target.api_key or ""
    async with httpx.AsyncClient(
        base_url=target.url, headers=target.headers, timeout=30.0
    ) as client:
        texts = []
        for parameters in ({"max_new_tokens": 2}, {"top_k": -5}):
            reply = await client.post(
                "/generate", json={"inputs": _CANARY, "parameters": parameters}
            )
            if reply.status_code != 200:
                texts.append(reply.text)
        texts += [
            (await client.get(path)).text
            for path in ("/metrics", "/info", "/plan", "/health", "/openapi.json", f"/{key}x")
        ]
    for text in texts:
        check(_CANARY in text, False, f"the prompt in {text[:80]}")
        check(key in text, False, f"the key in {text[:80]}")


async def revealing_errors(target: Target) -> None:
    """Provoke errors and look for echoes of the input, paths, tracebacks and addresses."""
    bodies = [
        f'{{"inputs": "{_CANARY}", "parameters": {{"temperature": NaN}}}}', f'{{"inputs": "{_CANARY}"',
        f'{{"inputs": ["{_CANARY}"]}}', f'{{"inputs": "{_CANARY}\\ud800"}}', f'"{_CANARY}"', "[" * 100_000,
        f'{{"inputs": "{_CANARY}", "parameters": {{"seed": 1e400}}}}', f'{{"prompt": {{"{_CANARY}": 1}}}}', "\x00",
    ]  # fmt: skip
    async with httpx.AsyncClient(
        base_url=target.url, headers=target.headers, timeout=30.0
    ) as client:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            for body in bodies:
                reply = await client.post(
                    path, content=body.encode(), headers={"Content-Type": "application/json"}
                )
                check(400 <= reply.status_code < 500, True, f"{path}: {reply.status_code}")
                check(_CANARY in reply.text, False, f"{path} echoes {body[:60]}")
                found = _INTERNALS.search(reply.text)
                check(found and found[0], None, f"{path}: {body[:60]}")


async def files(target: Target) -> None:
    """Request files of the machine."""
    for path in (
        "/proc/self/environ", "/../../../../proc/self/environ", "/docs/../../../../../etc/passwd",
        "/docs/..%2f..%2f..%2fetc%2fpasswd", "/page/..%2f..%2fpyproject.toml", "/page/%2fetc%2fpasswd", "/.env",
        "/.git/config", "/docs/%00",
    ):  # fmt: skip
        answer = await exchange(target, [head(target, f"GET {path}", "Connection: close")])
        check(statuses(answer) in ([404], [400]), True, f"{path}: {statuses(answer)}")
        check(b"root:" in answer or b"PATH=" in answer, False, path)


ATTACKS: list[Attack] = [
    Attack("D1", "no key and wrong keys", wrong_keys),
    Attack("D2", "every route without a key", routes_without_key),
    Attack("D3", "the key and prompts in answers and metrics", secrets_in_answers),
    Attack("D5", "errors that reveal the input or the program", revealing_errors),
    Attack("D6", "files of the machine", files),
]
"""D4, no prompts in logs, is a test of its own: tests/http/edge/test_access_log.py."""
