"""Streams completions from a server, and reads the memory of its processes."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

    Body = Callable[[list[int], int], dict[str, Any]]


MODEL_NAME: Final = "peer"
"""Name under which Tessera serves the model."""


class StreamError(Exception):
    """A server refused a request or sent another number of tokens; the text says what it sent."""


def tessera_body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return a request to Tessera's /v1/completions."""
    return {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "repetition_penalty": 1, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def llama_body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return a request to llama-server's /completion."""
    return {
        "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_prompt": False,
    }  # fmt: skip


PATHS: dict[Body, str] = {tessera_body: "/v1/completions", llama_body: "/completion"}


def tokens_of(event: dict[str, Any]) -> int:
    """Return the number of tokens that the last event of a stream reports."""
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens", event.get("tokens_predicted", 0)))


def complete(url: str, body: Body, prompt: list[int], tokens: int) -> None:
    """Stream one completion to its end.

    Raises:
        StreamError: the completion has not exactly `tokens` tokens.
    """
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=600)
    data = json.dumps(body(prompt, tokens))
    connection.request("POST", PATHS[body], data, {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise StreamError(f"status {reply.status}: {reply.read(500)!r}")
    last = b""
    for line in reply:
        if line.startswith(b"data: {"):
            last = line
    connection.close()
    count = tokens_of(json.loads(last[6:])) if last else 0
    if count != tokens:
        raise StreamError(f"{count} tokens instead of {tokens}; the last event is {last[:500]!r}")


def tokens_per_second(url: str, body: Body, prompts: list[list[int]], tokens: int) -> float:
    """Return the rate of concurrent completions, from sending all of them to the last token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda prompt: complete(url, body, prompt, tokens), prompts))
        return len(prompts) * tokens / (time.perf_counter() - start)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, unread = [], [pid]
    while unread:
        children = parents.get(unread.pop(), [])
        found += children
        unread += children
    return found


def memory_mib(pid: int) -> dict[str, float]:
    """Return the resident (`rss`) and proportional (`pss`) set size of all descendants of a process, MiB."""
    sums = {"rss": 0, "pss": 0}
    for child in descendants(pid):
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in sums:
                sums[name.lower()] += int(value.split()[0])
    return {name: kib / 1024 for name, kib in sums.items()}
