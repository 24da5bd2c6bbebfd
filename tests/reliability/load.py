"""A mixed load whose every request must get a final status, and the record of what each one got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.reliability.exchange import HOST, Reply, Truncated, encode_post, read_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A request without a deadline must still end: its output is short.
_PATIENCE_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.05
_WORDS = (
    "import os\n",
    "def read(path):\n",
    "class Node:\n    ",
    "for i in range(10):\n",
    "x = [1, 2, 3]\n",
)
# Statuses that a correct request may get while the service is overloaded, late or broken by a fault.
_EXPECTED_ERRORS = (408, 429, 499, 503, 504)
_LOST_ENGINE = (424, 500)
# Types of errors that a stream may end with at any time, in the names of the dialects.
_EXPECTED_TYPES = (
    "timeout",
    "DeadlineExceededError",
    "overloaded",
    "unavailable",
    "RateLimitError",
)
_LONGEST_RETRY_SECONDS = 0.5


class Request(NamedTuple):
    """One request.

    Attributes:
        path: of the route.
        body: correct JSON.
        stream: whether the reply is a stream.
        seconds: within which it must have a final status, by its own deadline or the load's patience.
        leave_after: seconds after which the client disconnects; None if it waits for the reply.
    """

    path: str
    body: dict[str, Any]
    stream: bool
    seconds: float
    leave_after: float | None


def random_requests(
    rng: random.Random, *, disconnects: float, max_tokens: int
) -> Iterator[Request]:
    """Yield requests of every dialect, plain and streaming, without end.

    Args:
        rng: decides everything.
        disconnects: share of the requests whose client leaves early.
        max_tokens: longest output.
    """
    while True:
        path = rng.choice(
            ["/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/"]
        )  # fmt: skip
        stream = path == "/generate_stream" or (path != "/generate" and rng.random() < 0.5)
        tokens = rng.choice([1, 4, 16, rng.randint(1, max_tokens)])
        text = "".join(rng.choices(_WORDS, k=rng.choice([1, 3, 10, 60])))
        timeout = rng.choice([None, None, 500, 3000, 10_000])
        options: dict[str, Any] = {"timeout_ms": timeout, "priority": rng.choice([None, -1, 5])}
        if rng.random() < 0.3:
            options |= {"temperature": 0.8, "seed": rng.randrange(1 << 32)}
        if path in ("/", "/generate", "/generate_stream"):
            parameters = options | {"max_new_tokens": tokens, "details": rng.random() < 0.5}
            body: dict[str, Any] = {"inputs": text, "parameters": parameters}
        elif path == "/v1/completions":
            body = options | {"prompt": text, "max_tokens": tokens}
        elif path == "/v1/chat/completions":
            body = options | {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        else:
            body = options | {"input": text, "max_output_tokens": max(tokens, 16)}
        if path not in ("/generate", "/generate_stream"):
            body["stream"] = stream
        leaves = rng.random() < disconnects
        seconds = _PATIENCE_SECONDS if timeout is None else timeout / 1000
        yield Request(path, body, stream, seconds, rng.random() ** 2 if leaves else None)


@dataclass
class Faults:
    """Times during which faults keep the service from answering. The load consults it to judge outcomes.

    Attributes:
        closures: (begin, end) in which connections may close: a process that owned them was killed.
        losses: (begin, end) in which requests may end with an error of the engine.
        delays: (begin, end) in which the service may be unable to answer.
        goodbyes: (begin, end) in which the service may refuse connections, and close those that it has answered on
            before: a request that is sent at the same moment gets no reply, as HTTP/1.1 allows.
    """

    closures: list[tuple[float, float]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    delays: list[tuple[float, float]] = field(default_factory=list)
    goodbyes: list[tuple[float, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def during(self, *kinds: list[tuple[float, float]]) -> Iterator[None]:
        """Note the time until the block ends as one of each of the kinds."""
        begin = time.monotonic()
        indices = [len(kind) for kind in kinds]
        for kind in kinds:
            kind.append((begin, float("inf")))
        try:
            yield
        finally:
            for kind, index in zip(kinds, indices, strict=True):
                kind[index] = (begin, time.monotonic())


def overlaps(spans: list[tuple[float, float]], begin: float, end: float) -> bool:
    """Whether one of the spans has a moment in common with the time from `begin` to `end`."""
    return any(a <= end and begin <= b for a, b in spans)


def overlap_seconds(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """The time that the spans, added up, have in common with the time from `begin` to `end`."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


class Violation(NamedTuple):
    """A request that got no final status, not in time, or one that nothing explains."""

    what: str
    path: str
    began: float
    seconds: float


class Load:
    """Keeps a number of clients busy and judges every reply.

    Attributes:
        outcomes: number of requests by outcome.
        violations: the requests that broke the contract.
        max_overrun: longest time that a request took beyond its deadline, without the delays that faults explain.

    Args:
        port: of the service.
        requests: what to send.
        clients: number of requests in flight.
        faults: what explains outcomes.
        margin: seconds that a status may be late.
        rng: decides which clients keep their connection.
    """

    def __init__(
        self,
        port: int,
        requests: Iterator[Request],
        clients: int,
        faults: Faults,
        margin: float,
        rng: random.Random,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.max_overrun = 0.0
        self._port = port
        self._requests = requests
        self._num_clients = clients
        self._faults = faults
        self._margin = margin
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Start the clients."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]

    async def stop(self) -> None:
        """Let every client finish its request."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        reused = False
        for request in self._requests:
            if self._stopping:
                break
            try:
                connection = connection or await self._connect()
            except OSError:
                self.outcomes["no connection"] += 1
                now = time.monotonic()
                if not overlaps(self._faults.closures + self._faults.goodbyes, now, now):
                    self._note("no connection", request, time.monotonic())
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            usable = await self._serve(request, *connection, reused=reused)
            reused = True
            if not usable or self._rng.random() < 0.3:
                connection[1].transport.abort()
                connection, reused = None, False
        if connection is not None:
            connection[1].transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; while the service cannot accept, longer than usual."""
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await asyncio.open_connection(HOST, self._port)
            except TimeoutError:
                if not overlaps(self._faults.delays, began, time.monotonic()):
                    raise OSError("the connection was not accepted") from None

    async def _serve(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        reused: bool,
    ) -> bool:
        """Send one request and judge the reply; return whether the connection can carry another one."""
        began = time.monotonic()
        writer.write(encode_post(request.path, request.body))
        reading = asyncio.ensure_future(read_reply(reader))
        limit = (
            self._patience(request, began) if request.leave_after is None else request.leave_after
        )
        while True:
            done, _ = await asyncio.wait([reading], timeout=limit)
            if done or request.leave_after is not None:
                break
            if (limit := self._patience(request, began)) <= 0:
                break
        ended = time.monotonic()
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if request.leave_after is not None:
                self.outcomes["client left"] += 1
            else:
                self.outcomes["NO STATUS IN TIME"] += 1
                self._note("no status in time", request, began)
            return False
        try:
            reply = reading.result()
        except Truncated as error:
            late = reused and not error.received
            self._judge_truncated(request, error, began, ended, may_be_late=late)
            await asyncio.sleep(_RETRY_SECONDS * self._rng.random())
            return False
        self._judge(request, reply, began, ended)
        if (retry := reply.headers.get("retry-after", "")).isdigit():
            await asyncio.sleep(min(int(retry), _LONGEST_RETRY_SECONDS) * self._rng.random())
        return reply.headers.get("connection") != "close"

    def _patience(self, request: Request, began: float) -> float:
        """Return the seconds that are left for the reply."""
        now = time.monotonic()
        excused = overlap_seconds(self._faults.delays, began, now)
        return began + request.seconds + self._margin + excused - now

    def _judge_truncated(
        self,
        request: Request,
        error: Truncated,
        began: float,
        ended: float,
        *,
        may_be_late: bool,
    ) -> None:
        # If it may be late, the service may have closed the connection before it read the request.
        if may_be_late and overlaps(self._faults.goodbyes, began, ended):
            self.outcomes["closed between requests"] += 1
        elif overlaps(self._faults.closures, began, ended):
            self.outcomes["closed by a kill"] += 1
        else:
            self.outcomes["CLOSED WITHOUT A STATUS"] += 1
            self._note(f"closed after {len(error.received)} bytes", request, began)

    def _judge(self, request: Request, reply: Reply, began: float, ended: float) -> None:
        excused = overlap_seconds(self._faults.delays, began, ended)
        self.max_overrun = max(self.max_overrun, ended - began - request.seconds - excused)
        outcome, is_error = final_status(request, reply)
        self.outcomes[outcome] += 1
        status = reply.status
        if outcome == "stream without an end":
            self._note(outcome, request, began)
        elif status in _LOST_ENGINE or (is_error and status == 200):
            known = outcome.endswith(_EXPECTED_TYPES)
            if not known and not overlaps(self._faults.losses, began, ended):
                self._note(f"unexplained: {outcome}", request, began)
        elif status != 200 and status not in _EXPECTED_ERRORS:
            self._note(f"unexpected: {outcome}", request, began)
        elif status in (429, 503) and not reply.headers.get("retry-after", "").isdigit():
            self._note(f"{status} without Retry-After", request, began)

    def _note(self, what: str, request: Request, began: float) -> None:
        now = time.monotonic()
        self.violations.append(Violation(what, request.path, began, round(now - began, 2)))


def final_status(request: Request, reply: Reply) -> tuple[str, bool]:
    """Name the final status of a complete reply, and say whether it is an error.

    A stream that begins with status 200 must end with its last event or with an error event.
    """
    if reply.status != 200:
        return f"{reply.status}", True
    if not request.stream:
        return "200", False
    events = [line[5:].strip() for line in reply.body.split(b"\n") if line.startswith(b"data:")]
    last = events[-1] if events else b""
    if last == b"[DONE]" and len(events) > 1:
        last = events[-2]
        ended = True
    else:
        ended = False
    event: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        event = json.loads(last)
    response = event.get("response") or {}
    error = event.get("error") or response.get("error")
    if error or event.get("type") == "error":
        return f"200, stream ended by an error: {_error_type(event, error)}", True
    ended |= event.get("generated_text") is not None or event.get("type") in (
        "response.completed", "response.incomplete", "response.failed",
    )  # fmt: skip
    return ("200, stream complete", False) if ended else ("stream without an end", True)


def _error_type(event: dict[str, Any], error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("type") or error.get("code"))
    return str(event.get("error_type") or event.get("code") or event.get("type"))


async def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Poll a blocking condition in a thread; return the seconds until it held, or None if it did not in time."""
    began = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(condition):
                return time.monotonic() - began
        await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - now)))
    return None
