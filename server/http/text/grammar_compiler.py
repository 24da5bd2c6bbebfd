"""Checks constraints and keeps the verdicts.

Constraints are checked in processes of their own (`server.http.text.grammar_worker`). The engine compiles the same
grammar again, for which it has the same limits.

A verdict is about the constraint. Whatever else goes wrong is none: a process that was killed or stopped, one that
cannot start, a service that is overloaded. The check is then made again, and refused as unavailable in the end.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from model.helper_process.command import module_command
from model.helper_process.pool import HelperPool
from model.helper_process.process import (
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
)
from model.helper_process.steps import run_on_loop
from server.errors import OverloadedError, StoppingError, UnavailableError
from server.http.load.fair_queue import FairPlaces
from server.http.text.fair_cache import FairCache

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from model.helper_process.steps import Steps

ResultT = TypeVar("ResultT")

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
_KEPT: Final = 256
_COMMAND: Final = module_command("server.http.text.grammar_worker")
_UNAVAILABLE: Final = "the processes that compile grammars fail at the moment"


class WorkerConfig(msgspec.Struct, frozen=True):
    """The model whose vocabulary constraints are compiled for.

    Attributes:
        folder: the checkpoint, with its tokenizer.
        vocab_size: number of the model's logits.
        eos_token_ids: the model's end tokens.
    """

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


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


class GrammarCompiler:
    """Owns the worker processes, which start when they are needed, and the cache of their verdicts.

    Used only on the event loop.
    """

    def __init__(self, folder: str, eos_token_ids: tuple[int, ...]) -> None:
        self._folder, self._eos_token_ids = folder, eos_token_ids
        self._cache: FairCache[Verdict] = FairCache(_KEPT)
        self._checks: dict[tuple[str, bytes], _Check] = {}
        self._places = FairPlaces(_WORKERS, most_of_a_client=_OF_A_CLIENT)
        self._pool = HelperPool("a grammar worker", pauses=_PAUSES)
        self._is_closed = False

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
        self._pool.end()

    async def _wait(
        self,
        check: _Check,
        key: tuple[str, bytes],
        find: Callable[[], Coroutine[Any, Any, ResultT]],
    ) -> ResultT:
        """Return the result of a check, made once for all callers; it goes on without them once it has started.

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

    async def _run(self, check: _Check, line: bytes, vocab_size: int, client: str) -> bytes:
        """Return a worker's answer.

        Raises:
            OverloadedError: no worker becomes free in time.
            UnavailableError: the workers fail, for reasons that say nothing about the task.
            ProcessorTimeError: the task takes too long.
            CrashError: the task ends new workers.
        """
        try:
            async with asyncio.timeout(_QUEUE_SECONDS):
                await self._places.acquire(client)
        except TimeoutError:
            raise OverloadedError("too many grammars wait to be compiled") from None
        check.has_begun = True
        config = WorkerConfig(self._folder, vocab_size, self._eos_token_ids)
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await self._attempt(msgspec.json.encode(config), line)
        except (TimeoutError, LostError):
            raise UnavailableError(_UNAVAILABLE) from None
        finally:
            self._places.release(client)

    async def _attempt(self, config: bytes, line: bytes) -> bytes:
        """Ask workers until one answers, or until the task is at fault; see `_run`."""

        def ask(process: HelperProcess, is_new: bool) -> Steps[bytes]:  # noqa: ARG001 - for the pool
            return (yield from process.ask(line, SECONDS)).content

        return await run_on_loop(self._pool.run(lambda: HelperProcess(_COMMAND, config), ask))
