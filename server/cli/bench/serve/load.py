"""Sends the requests of a run, at a constant concurrency or at given arrival times, from one process or several."""

from __future__ import annotations

import asyncio
import gc
import importlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from server.cli.bench.serve.apis import API, APIS, Name, StreamError
from server.cli.bench.serve.metrics import RequestRecord
from server.cli.client.http_client import Client, RequestError, Target
from server.client.events import EventReader

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_OK = 200
_DETAIL_BYTES = 300
# Time for all processes to receive the begin of the run.
_HEAD_START_SECONDS = 0.1
_POLL_SECONDS = 0.5


class Job(msgspec.Struct):
    """One request to send.

    Attributes:
        body: JSON.
        asked_tokens: requested output tokens.
        prompt_tokens: the client's count.
        arrival: seconds after the begin of the run; None for as soon as a stream is free.
    """

    body: bytes
    asked_tokens: int
    prompt_tokens: int
    arrival: float | None = None


class Share(msgspec.Struct):
    """The part of a run that one process sends.

    Attributes:
        url: of the server.
        headers: sent with every request.
        api: of the server.
        jobs: all with an arrival, or all without.
        warm_up: sent and completed before the run begins.
        streams: most concurrent requests, of jobs without an arrival and of the warm-up.
        timeout: seconds for one request.
    """

    url: str
    headers: list[tuple[str, str]]
    api: Name
    jobs: list[Job]
    warm_up: list[Job]
    streams: int
    timeout: float


class Outcome(msgspec.Struct):
    """The result of one process.

    Attributes:
        records: one for each job.
        warm_up: one for each job of the warm-up.
        busy: share of a core that the process used during the run.
    """

    records: list[RequestRecord]
    warm_up: list[RequestRecord]
    busy: float


OnProgress: TypeAlias = Callable[[int], None]
"""Called from time to time with the number of requests of the warm-up, or of the run, that have ended."""
WhenWarm: TypeAlias = Callable[[list[RequestRecord]], float]
"""Called with the records of the warm-up; returns the `time.perf_counter()` at which the run begins, or raises."""


class _Count:
    """A number that one thread or process changes, and others may read.

    Attributes:
        value: see above.
    """

    value = 0


class LoadGenerator:
    """Sends jobs to one server from one event loop.

    Attributes:
        ended: counts the requests that have ended.
    """

    def __init__(self, target: Target, api: API, timeout: float) -> None:
        self._client = Client(target)
        self._api = api
        self._timeout = timeout
        self.ended = _Count()

    async def send(self, job: Job, planned: float | None = None) -> RequestRecord:
        """Send one request and read its stream to the end.

        Args:
            job: to send.
            planned: `time.perf_counter()` at which it should be sent.
        """
        answer = _Answer(self._api)
        retry_after = ""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.request("POST", self._api.path, job.body, answer.take)
            error, detail = answer.problem(response.status)
            retry_after = response.headers.get("retry-after", "")
        except TimeoutError:
            error, detail = "timeout", f"after {self._timeout:g} s"
        except RequestError as failure:
            error, detail = failure.kind, str(failure)
        counted = answer.output_tokens
        self.ended.value += 1
        return RequestRecord(
            started=started,
            asked_tokens=job.asked_tokens,
            prompt_tokens=answer.prompt_tokens or job.prompt_tokens,
            output_tokens=len(answer.times) if counted is None else counted,
            times=answer.times,
            reads=answer.reads,
            lag=0.0 if planned is None else started - planned,
            error=error,
            detail=detail,
            counted=counted is not None,
            ended=time.perf_counter(),
            retry_after=int(retry_after) if retry_after.isdigit() else None,
        )

    async def keep_streams(self, jobs: Iterable[Job], streams: int) -> list[RequestRecord]:
        """Keep `streams` requests running until all jobs are done.

        Args:
            jobs: each is taken when its request is sent, so that they may depend on the time.
            streams: how many requests run.
        """
        waiting = iter(jobs)

        async def work() -> list[RequestRecord]:
            return [await self.send(job) for job in waiting]

        shares = await asyncio.gather(*(work() for _ in range(streams)))
        return [record for share in shares for record in share]

    async def keep_times(self, jobs: list[Job], begin: float) -> list[RequestRecord]:
        """Send each job at its arrival time, without a limit of concurrent requests.

        Args:
            jobs: in order of their arrivals.
            begin: `time.perf_counter()` of arrival 0.
        """
        tasks = []
        for job in jobs:
            planned = begin + (job.arrival or 0.0)
            await asyncio.sleep(planned - time.perf_counter())
            tasks.append(asyncio.create_task(self.send(job, planned)))
        return list(await asyncio.gather(*tasks))

    def close(self) -> None:
        """Close the idle connections."""
        self._client.close()


class _Answer:
    """Parses the pieces of one response on arrival."""

    __slots__ = (
        "_api", "_error", "_last", "_reader", "_text", "output_tokens", "prompt_tokens", "reads", "times",
    )  # fmt: skip

    def __init__(self, api: API) -> None:
        self.times: list[float] = []
        self.reads = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self._api = api
        self._reader = EventReader()
        self._error: str | None = None
        self._last = False
        self._text = b""

    def take(self, status: int, piece: bytes, now: float) -> None:
        """Parse a piece of the body."""
        if status != _OK:
            self._text += piece[:_DETAIL_BYTES]
            return
        tokens = len(self.times)
        for data in self._reader.feed(piece):
            try:
                event = self._api.read(data)
            except StreamError as error:
                self._error = self._error or error.kind
                self._text = self._text or data[:_DETAIL_BYTES]
                continue
            if event.token:
                self.times.append(now)
            if event.output_tokens is not None:
                self.output_tokens = event.output_tokens
                self.prompt_tokens = event.prompt_tokens
            self._last |= event.last
        self.reads += len(self.times) > tokens

    def problem(self, status: int) -> tuple[str | None, str]:
        """Return the category and the text of what is wrong with the response; None for a complete one."""
        text = self._text[:_DETAIL_BYTES].decode(errors="replace")
        if status != _OK:
            return f"HTTP {status}", text
        if self._error is not None:
            return self._error, text
        if not self._last:
            return "stream ended early", ""
        return (None, "") if self.times else ("no tokens", "")


async def run_share(share: Share, when_warm: WhenWarm, ended: _Count) -> Outcome:
    """Warm up, wait for the begin of the run, and send the jobs; count in `ended` the requests that have ended."""
    target = Target.from_url(share.url, tuple(share.headers))
    generator = LoadGenerator(target, APIS[share.api](), share.timeout)
    generator.ended = ended
    try:
        warm_up = await generator.keep_streams(share.warm_up, share.streams)
        ended.value = 0
        begin = when_warm(warm_up)
        gc.collect()
        gc.freeze()  # a garbage collection would appear as a gap between tokens
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(begin - wall)
        if share.jobs and share.jobs[0].arrival is not None:
            records = await generator.keep_times(share.jobs, begin)
        else:
            records = await generator.keep_streams(share.jobs, share.streams)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - max(begin, wall)
    finally:
        generator.close()
        gc.unfreeze()
    return Outcome(records, warm_up, cpu / wall)


def run_loop(coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run on uvloop where it is installed."""
    try:
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)


def run_here(
    share: Share, when_warm: WhenWarm, progress: OnProgress = lambda _: None
) -> list[Outcome]:
    """Run one share in this process, and show the progress from another thread."""
    count, ended = _Count(), threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            progress(count.value)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        return [run_loop(run_share(share, when_warm, count))]
    finally:
        ended.set()
        thread.join()


def run_processes(
    shares: list[Share], when_warm: WhenWarm, progress: OnProgress = lambda _: None
) -> list[Outcome]:
    """Run each share in its own process; all begin at the same time.

    Raises:
        RuntimeError: a process ended without a result.
    """
    # Not "fork", which would copy the event loop of this process.
    context = multiprocessing.get_context("spawn")
    counts = [context.RawValue("q") for _ in shares]
    pipes: list[Connection] = []
    processes = []

    def receive(kind: Any) -> list[Any]:  # noqa: ANN401 - of msgspec
        while missing := [it for it in pipes if not it.poll()]:
            wait(missing, timeout=_POLL_SECONDS)
            progress(sum(it.value for it in counts))
        return [_receive(it, kind) for it in pipes]

    try:
        for share, count in zip(shares, counts, strict=True):
            ours, theirs = context.Pipe()
            arguments = (theirs, msgspec.msgpack.encode(share), count)
            process = context.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        warm_up = [record for records in receive(list[RequestRecord]) for record in records]
        begin = when_warm(warm_up) + _HEAD_START_SECONDS
        for pipe in pipes:
            pipe.send(begin)
        return receive(Outcome)
    finally:
        for process in processes:
            process.terminate()  # without effect on those that are done
            process.join()


def _receive(pipe: Connection, kind: Any) -> Any:  # noqa: ANN401
    try:
        return msgspec.msgpack.decode(pipe.recv_bytes(), type=kind)
    except EOFError:
        raise RuntimeError("a process of the client ended; its error is above") from None


def _work(pipe: Connection, encoded: bytes, count: _Count) -> None:
    """Run a client process, which counts in shared memory."""

    def when_warm(records: list[RequestRecord]) -> float:
        pipe.send_bytes(msgspec.msgpack.encode(records))
        begin: float = pipe.recv()
        return begin

    outcome = run_loop(run_share(msgspec.msgpack.decode(encoded, type=Share), when_warm, count))
    pipe.send_bytes(msgspec.msgpack.encode(outcome))
