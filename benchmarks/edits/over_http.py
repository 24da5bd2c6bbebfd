"""Sends the same requests to a running service, with drafts and without, and compares the replies."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.edits.rounds import Run, row
from server.cli.bench.serve.apis import Event, OpenAI
from server.cli.bench.serve.load import Job, LoadGenerator
from server.cli.client.http_client import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.edits.cases import Case

_TIMEOUT: Final = 600.0
_COUNTERS: Final = {
    "steps": "tessera_engine_steps_total",
    "drafted": "tessera_draft_tokens_total",
    "accepted": "tessera_draft_accepted_tokens_total",
}


class _Events(OpenAI):
    """The API of one stream, which keeps the events of the reply that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[bytes] = []

    def read(self, data: bytes) -> Event:
        """Parse one event; see `API.read`."""
        event = super().read(data)
        if not event.last:
            self._events.append(data)
        return event

    def take(self) -> list[bytes]:
        """Return the events of a reply, and forget them."""
        events, self._events = self._events, []
        return events


def content(events: Sequence[bytes]) -> tuple[str, list[float], list[str]]:
    """Return a reply's text, log-probabilities and reasons of its end; events may have one token or several."""
    choices = [it for event in events for it in msgspec.json.decode(event).get("choices", ())]
    text = "".join(it.get("text") or "" for it in choices)
    scores = [
        it
        for choice in choices
        if (found := choice.get("logprobs"))
        for it in found["token_logprobs"]
    ]
    return text, scores, [it["finish_reason"] for it in choices if it.get("finish_reason")]


class Service:
    """A service with one model.

    Args:
        url: of the service.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        with urllib.request.urlopen(f"{url}/v1/models") as reply:  # noqa: S310 - of a service that we started
            self._model: str = msgspec.json.decode(reply.read())["data"][0]["id"]
        self._num_runs = 0

    def counters(self) -> dict[str, int]:
        """Return the counters of `_COUNTERS`."""
        with urllib.request.urlopen(f"{self._url}/metrics") as reply:  # noqa: S310 - as above
            samples = dict(
                line.rsplit(" ", 1)
                for line in reply.read().decode().splitlines()
                if not line.startswith("#")
            )
        return {key: int(float(samples[name])) for key, name in _COUNTERS.items()}

    def run(
        self, cases: Sequence[Case], streams: int, *, drafts: bool, logprobs: bool = False
    ) -> tuple[Run, list[Any]]:
        """Send all requests once, so many at the same time.

        Returns:
            The run, and the text, the log-probabilities and the end of each reply.

        Raises:
            SystemExit: a request failed.
        """
        self._num_runs += 1
        salt = f"run {self._num_runs}"
        bodies = []
        for i, case in enumerate(cases):
            body = case.body(self._model, salt=salt, logprobs=logprobs and bool(i % 2))
            body |= {} if drafts else {"speculation": {"enabled": False}}
            bodies.append(msgspec.json.encode(body))
        before = self.counters()
        seconds, tokens, replies = asyncio.run(self._send(bodies, cases, streams))
        after = self.counters()
        counts = {name: after[name] - before[name] for name in _COUNTERS}
        return Run(seconds=seconds, tokens=tokens, **counts), [*map(content, replies)]

    async def _send(
        self, bodies: list[bytes], cases: Sequence[Case], streams: int
    ) -> tuple[float, int, list[list[bytes]]]:
        """Return the seconds until all are answered, the number of tokens, and the events of each reply."""
        waiting = iter(enumerate(bodies))
        replies: list[list[bytes]] = [[] for _ in bodies]
        start = time.perf_counter()
        counts = await asyncio.gather(
            *(self._stream(waiting, cases, replies) for _ in range(streams))
        )
        return time.perf_counter() - start, sum(counts), replies

    async def _stream(
        self,
        waiting: Iterator[tuple[int, bytes]],
        cases: Sequence[Case],
        replies: list[list[bytes]],
    ) -> int:
        """Send one request after the other, and put their events into `replies`; return the number of tokens."""
        reply, tokens = _Events(), 0
        client = LoadGenerator(Target.from_url(self._url, ()), reply, _TIMEOUT)
        try:
            for i, body in waiting:
                record = await client.send(Job(body, cases[i].tokens, len(cases[i].prompt)))
                if record.error is not None:
                    raise SystemExit(f"request {i} failed: {record.error}: {record.detail}")
                replies[i] = reply.take()
                tokens += record.output_tokens
        finally:
            client.close()
        return tokens

    def compare(self, cases: Sequence[Case], streams: int, rounds: int) -> dict[str, Any]:
        """Measure A B B A, where B has drafts; see `Rounds.compare`."""
        expected = self.run(cases, streams, drafts=False, logprobs=True)[1]
        found = self.run(cases, streams, drafts=True, logprobs=True)[1]
        different = _differences(expected, found)
        runs: dict[bool, list[Run]] = {False: [], True: []}
        first: list[Any] = []
        for drafts in (False, True, True, False) * rounds:
            run, replies = self.run(cases, streams, drafts=drafts)
            runs[drafts].append(run)
            first = first or replies
            different |= _differences(first, replies)
        return {"requests": len(cases), "streams": streams} | row(
            runs[False], runs[True], different
        )


def _differences(expected: Sequence[Any], found: Sequence[Any]) -> dict[int, str]:
    pairs = enumerate(zip(expected, found, strict=True))
    return {i: f"request {i} has another reply" for i, (a, b) in pairs if a != b}
