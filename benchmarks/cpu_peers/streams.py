"""Streams completions from a server, and reads the memory of its processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from server.cli.bench.serve.apis import Event, OpenAI, Options
from server.cli.bench.serve.load import Job, LoadGenerator
from server.cli.client.http_client import Target
from tests.reliability.processes import process_tree

if TYPE_CHECKING:
    from server.cli.bench.serve.metrics import RequestRecord

MODEL_NAME: Final = "peer"
"""Name under which Tessera serves the model."""
_TIMEOUT_SECONDS: Final = 600.0


class StreamError(Exception):
    """A server refused a request or sent another number of tokens; the text says what it sent."""


class _LlamaEvent(msgspec.Struct):
    stop: bool = False
    tokens_predicted: int = 0
    tokens_evaluated: int = 0


class Llama:
    """llama-server's /completion."""

    path = "/completion"

    def body(self, prompt: str | list[int], max_tokens: int, options: Options) -> bytes:
        """Render a request for a stream."""
        body = {
            "prompt": prompt, "n_predict": max_tokens, "temperature": options.temperature,
            "ignore_eos": options.ignore_eos, "stream": True, "cache_prompt": False,
        }  # fmt: skip
        return msgspec.json.encode(body)

    def read(self, data: bytes) -> Event:
        """Parse one event; the last one has the counts."""
        event = msgspec.json.decode(data, type=_LlamaEvent)
        if event.stop:
            return Event(True, event.tokens_evaluated, event.tokens_predicted, last=True)
        return Event(token=True)


def tokens_per_second(
    url: str, api: OpenAI | Llama, prompts: list[list[int]], tokens: int
) -> float:
    """Return the rate of concurrent completions, from sending all of them to the last token.

    Raises:
        StreamError: a completion has not exactly `tokens` tokens.
    """
    options = Options(MODEL_NAME)
    jobs = [Job(api.body(it, tokens, options), tokens, len(it)) for it in prompts]

    async def send() -> list[RequestRecord]:
        generator = LoadGenerator(Target.from_url(url), api, _TIMEOUT_SECONDS)
        try:
            return await generator.keep_streams(jobs, len(jobs))
        finally:
            generator.close()

    start = time.perf_counter()
    records = asyncio.run(send())
    seconds = time.perf_counter() - start
    for record in records:
        if record.error is not None or record.output_tokens != tokens:
            counts = f"{record.output_tokens} tokens instead of {tokens}"
            raise StreamError(f"{record.error or counts}; {record.detail}")
    return len(prompts) * tokens / seconds


def memory_mib(pid: int) -> dict[str, float]:
    """Return the resident (`rss`) and proportional (`pss`) set size of all descendants of a process, MiB."""
    sums = {"rss": 0, "pss": 0}
    for child in process_tree(pid)[1:]:
        try:
            lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in sums:
                sums[name.lower()] += int(value.split()[0])
    return {name: kib / 1024 for name, kib in sums.items()}
