"""Checks constraints and keeps the verdicts.

Constraints are checked in processes of their own (`server.http.text.grammar_worker`). The engine compiles the same
grammar again, for which it has the same limits.

A verdict is about the constraint. Whatever else goes wrong is none: a process that was killed or stopped, one that
cannot start, a service that is overloaded. The check is then made again, and refused as unavailable in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from server.engine.link.spawn import module_command
from server.errors import OverloadedError, StoppingError, UnavailableError
from server.http.load.fair_queue import FairPlaces
from server.http.text.fair_cache import FairCache
from server.http.text.helper_process import (
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
    Running,
    end_processes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

ResultT = TypeVar("ResultT")

log = logging.getLogger("tessera")

SECONDS: Final = 2.0
"""Processor time for compiling and checking a constraint."""

# Of what is sent to a worker, which counts what it compiles. Descriptions in schemas may be much longer than that.
_MAX_BYTES: Final = 8 << 20
_WORKERS: Final = 3
_OF_A_CLIENT: Final = _WORKERS - 1
"""Workers that one client may use, so that another one finds a free worker."""
_QUEUE_SECONDS: Final = 5 * SECONDS
_CHECK_SECONDS: Final = 60.0
"""Time for a check with all its attempts, once a worker is free."""
_PAUSES: Final = (0.0, 0.05, 0.2, 0.8)
"""Seconds before further attempts: what the system lacks for a process may be there a moment later."""
_CRASHES: Final = 2
"""Fresh processes that a task ends before that is its fault."""
_KEPT: Final = 256
_COMMAND: Final = module_command("server.http.text.grammar_worker")
_UNAVAILABLE: Final = "the processes that compile grammars fail at the moment"


class WorkerConfig(msgspec.Struct, frozen=True):
    """The model whose vocabulary constraints are compiled for.

    Attributes:
        folder: the checkpoint, with its tokenizer.
        vocab_size: number of the model's logits.
        eos_token_ids: the model's end tokens.
        seconds: processor time for a task.
    """

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seconds: float


class Constraint(msgspec.Struct, frozen=True):
    """A constraint to check; see `server.http.text.structured_output.StructuredOutput`."""

    kind: str
    value: Any
    strict: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """The result of a check.

    Attributes:
        grammar: the serialized grammar; empty if the constraint is refused.
        error: why it is refused.
        unenforced: phrases that name what the grammar does not enforce; empty if it enforces the whole constraint.
    """

    grammar: str = ""
    error: str = ""
    unenforced: tuple[str, ...] = ()


class Task(msgspec.Struct, frozen=True):
    """What a worker does: compiles a constraint, or checks texts that were generated with it.

    Attributes:
        constraint: see above.
        texts: those to check; None to compile the constraint.
    """

    constraint: Constraint
    texts: tuple[str, ...] | None = None


class Findings(msgspec.Struct, frozen=True):
    """How texts violate a constraint.

    Attributes:
        violations: phrases, none if they do not.
        checked: whether that could be told.
    """

    violations: tuple[str, ...] = ()
    checked: bool = True


class _Check:
    """A task for a worker, and the callers that wait for its result."""

    def __init__(self) -> None:
        self.num_callers = 0
        self.has_begun = False
        self.future: asyncio.Future[Any] | None = None


class _Client:
    """The places of one client."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(_OF_A_CLIENT)
        self.num_callers = 0


class GrammarCompiler:
    """Owns the worker processes, which start when they are needed, and the cache of their verdicts.

    Used only on the event loop.
    """

    def __init__(self, folder: str, eos_token_ids: tuple[int, ...]) -> None:
        self._folder, self._eos_token_ids = folder, eos_token_ids
        self._cache: FairCache[Verdict] = FairCache(_KEPT)
        self._checks: dict[tuple[str, bytes], _Check] = {}
        self._places = FairPlaces(_WORKERS)
        self._clients: dict[str, _Client] = {}
        self._idle: list[HelperProcess] = []
        self._is_closed = False
        self._running: Running = {}
        self._finalizer = weakref.finalize(self, end_processes, self._running)

    async def check(self, constraint: Constraint, vocab_size: int, client: str = "") -> Verdict:
        """Check a constraint, or return the verdict of an equal one.

        Args:
            constraint: see above.
            vocab_size: number of the model's logits.
            client: who asks, as `server.http.request_id.CurrentRequest.client`. Clients take turns.

        Raises:
            OverloadedError: no worker becomes free in time.
            UnavailableError: the constraint cannot be checked at the moment.
        """
        line = msgspec.json.encode(Task(constraint))
        if len(line) > _MAX_BYTES:
            return Verdict(error=f"must have at most {_MAX_BYTES} bytes")
        key = hashlib.sha256(line).digest()
        if (known := self._cache.get(key)) is not None:
            return known

        async def find() -> Verdict:
            try:
                answer = await self._run(check, line, vocab_size, client)
            except ProcessorTimeError:
                verdict = Verdict(error=f"takes longer than {SECONDS:g} seconds to compile")
            except CrashError:
                verdict = Verdict(error="is too complex to compile")
            else:
                verdict = msgspec.json.decode(answer, type=Verdict)
            self._cache.put(key, verdict, client)
            return verdict

        check = self._checks.setdefault((client, key), _Check())
        return await self._wait(check, (client, key), find)

    async def find_violations(
        self, constraint: Constraint, texts: Sequence[str], vocab_size: int, client: str = ""
    ) -> tuple[str, ...] | None:
        """Check finished texts; return how they violate the constraint, or None if that cannot be told in time.

        Args:
            constraint: that the texts were generated with.
            texts: complete ones.
            vocab_size: see `check`.
            client: likewise.

        Raises:
            OverloadedError: no worker becomes free in time.
            UnavailableError: the texts cannot be checked at the moment.
        """
        line = msgspec.json.encode(Task(constraint, tuple(texts)))

        async def find() -> tuple[str, ...] | None:
            try:
                answer = await self._run(check, line, vocab_size, client)
            except (ProcessorTimeError, CrashError):
                return None
            found = msgspec.json.decode(answer, type=Findings)
            return found.violations if found.checked else None

        check, key = _Check(), (client, hashlib.sha256(line).digest())
        check = self._checks.setdefault(key, check)
        return await self._wait(check, key, find)

    def close(self) -> None:
        """End the worker processes; checks that are being made fail."""
        self._is_closed = True
        for check in self._checks.values():
            if check.future is not None:
                check.future.cancel()
        while self._idle:
            self._idle.pop().kill()
        # The connections are closed by their checks, since the event loop may still use them.
        for process in self._running:
            process.kill()

    async def _wait(
        self,
        check: _Check,
        key: tuple[str, bytes],
        find: Callable[[], Coroutine[Any, Any, ResultT]],
    ) -> ResultT:
        """Return the result of a check, which is made once for all callers and goes on without them once it has begun.

        A worker that is busy cannot be used for anything else; one that is ended has to be started again.
        """
        if self._is_closed:
            raise StoppingError
        if check.future is None:
            check.future = asyncio.ensure_future(find())
            check.future.add_done_callback(functools.partial(self._forget, key, check))
        check.num_callers += 1
        try:
            return await asyncio.shield(check.future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if check.future.cancelled() and task is not None and not task.cancelling():
                raise StoppingError from None  # by `close`
            raise
        finally:
            check.num_callers -= 1
            if not check.num_callers and not check.has_begun:
                self._forget(key, check)
                check.future.cancel()

    def _forget(
        self, key: tuple[str, bytes], check: _Check, future: asyncio.Future[Any] | None = None
    ) -> None:
        if self._checks.get(key) is check:
            del self._checks[key]
        if future is not None and not future.cancelled():
            future.exception()  # nobody may wait for it any more

    async def _run(self, check: _Check, line: bytes, vocab_size: int, client: str) -> msgspec.Raw:
        """Return a worker's answer.

        Raises:
            OverloadedError: no worker becomes free in time.
            UnavailableError: the workers fail, for reasons that say nothing about the task.
            ProcessorTimeError: the task takes too long.
            CrashError: the task ends fresh workers.
        """
        config = WorkerConfig(self._folder, vocab_size, self._eos_token_ids, SECONDS)
        async with self._place(client):
            check.has_begun = True
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    return await self._attempt(msgspec.json.encode(config), line)
            except TimeoutError:
                raise UnavailableError(_UNAVAILABLE) from None

    @contextlib.asynccontextmanager
    async def _place(self, client: str) -> AsyncIterator[None]:
        """Hold one of the places of a client, and one of all; wait for them."""
        its = self._clients.setdefault(client, _Client())
        its.num_callers += 1
        try:
            async with contextlib.AsyncExitStack() as places:
                try:
                    async with asyncio.timeout(_QUEUE_SECONDS):
                        await places.enter_async_context(its.places)
                        await self._places.acquire(client)
                        places.callback(self._places.release)
                except TimeoutError:
                    raise OverloadedError("too many grammars wait to be compiled") from None
                yield
        finally:
            its.num_callers -= 1
            if not its.num_callers:
                del self._clients[client]

    async def _attempt(self, config: bytes, line: bytes) -> msgspec.Raw:
        """Ask workers until one answers, or until the task is at fault; see `_run`."""
        num_crashes = 0
        for pause in (*_PAUSES, None):
            worker = None if num_crashes else self._take()
            try:
                if worker is None:
                    worker = HelperProcess(_COMMAND, config, SECONDS, self._running)
                    await worker.start()
                answer = await worker.ask(line)
            except CrashError as error:
                log.warning("a grammar worker %s", error)
                num_crashes += error.is_fresh
                if num_crashes == _CRASHES:
                    raise
            except LostError as error:
                log.warning("a grammar worker %s; its check is made again", error)
            else:
                if self._is_closed:
                    worker.kill()
                else:
                    self._idle.append(worker)
                return answer
            if pause is not None:
                await asyncio.sleep(pause)
        raise UnavailableError(_UNAVAILABLE)

    def _take(self) -> HelperProcess | None:
        """Return the worker that was used last, of those that wait; None if one has to be started."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            worker.kill()
        return None
