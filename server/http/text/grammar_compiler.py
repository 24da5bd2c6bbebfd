"""Checks constraints and keeps the results.

Constraints are checked in processes of their own (`server.http.text.grammar_worker`). The engine compiles the same
grammar again, for which it has the same limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import queue
import signal
import subprocess
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from server.engine.link.spawn import interrupts_blocked, module_command, use_safe_path
from server.errors import OverloadedError
from server.http.text.tokenizing import run_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("tessera")

SECONDS: Final = 2.0
"""How long compiling and checking a constraint may take."""

# Of what is sent to a worker, which counts what it compiles. Descriptions in schemas may be much longer than that.
_MAX_BYTES: Final = 8 << 20
_WORKERS: Final = 2
_QUEUE_SECONDS: Final = 5 * SECONDS
_KEPT: Final = 256
_COMMAND: Final = module_command("server.http.text.grammar_worker")


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


class GrammarCompiler:
    """Owns the worker processes, which start when they are needed, and the cache of their results.

    Used only on the event loop.
    """

    def __init__(self, folder: str, eos_token_ids: tuple[int, ...]) -> None:
        self._folder, self._eos_token_ids = folder, eos_token_ids
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._threads = ThreadPoolExecutor(_WORKERS, "grammars")
        self._places = asyncio.Semaphore(_WORKERS)
        self._workers: queue.LifoQueue[_Worker] = queue.LifoQueue()
        processes: list[subprocess.Popen[bytes]] = []
        for _ in range(_WORKERS):
            self._workers.put(_Worker(processes))
        self._end = weakref.finalize(self, _end_all, processes)

    async def check(self, constraint: Constraint, vocab_size: int) -> Verdict:
        """Check a constraint, or return the verdict of an equal one.

        Raises:
            OverloadedError: no worker becomes free in time.
        """
        line = msgspec.json.encode(Task(constraint)) + b"\n"
        if len(line) > _MAX_BYTES:
            return Verdict(error=f"must have at most {_MAX_BYTES} bytes")
        key = hashlib.sha256(line).digest()
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return known
        reply = await self._run(line, vocab_size)
        if isinstance(reply, bytes):
            verdict = msgspec.json.decode(reply, type=Verdict)
        elif reply == -signal.SIGALRM:
            verdict = Verdict(error=f"takes longer than {SECONDS:g} seconds to compile")
        else:
            verdict = Verdict(error="is too complex to compile")
        self._cache[key] = verdict
        if len(self._cache) > _KEPT:
            self._cache.popitem(last=False)
        return verdict

    async def find_violations(
        self, constraint: Constraint, texts: Sequence[str], vocab_size: int
    ) -> tuple[str, ...] | None:
        """Check finished texts; return how they violate the constraint, or None if that cannot be told in time.

        Raises:
            OverloadedError: no worker becomes free in time.
        """
        line = msgspec.json.encode(Task(constraint, tuple(texts))) + b"\n"
        reply = await self._run(line, vocab_size)
        if not isinstance(reply, bytes):
            return None
        found = msgspec.json.decode(reply, type=Findings)
        return found.violations if found.checked else None

    async def _run(self, line: bytes, vocab_size: int) -> bytes | int:
        """Return a worker's reply, or the code with which it ended.

        Raises:
            OverloadedError: no worker becomes free in time.
        """
        config = WorkerConfig(self._folder, vocab_size, self._eos_token_ids)
        try:
            async with asyncio.timeout(_QUEUE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise OverloadedError("too many grammars wait to be compiled") from None
        ask = functools.partial(self._ask, config, line)
        return await run_in_place(self._threads, self._places, ask)

    def close(self) -> None:
        """End the worker processes; a check that is running fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _ask(self, config: WorkerConfig, line: bytes) -> bytes | int:
        # The one that was used last, so that the others need not start.
        worker = self._workers.get()
        try:
            return worker.ask(config, line)
        finally:
            self._workers.put(worker)


class _Worker:
    """A worker process, started for the first constraint and again after it ended; used by one thread at a time."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, config: WorkerConfig, line: bytes) -> bytes | int:
        """Return the reply to an encoded task, or the code with which the process ended."""
        process = self._process or self._start(config)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if reply.endswith(b"\n"):
            return reply
        self._process = None
        self._processes.remove(process)
        _end(process)
        if process.returncode != -signal.SIGALRM:
            log.warning("a grammar ended its process with code %d", process.returncode)
        return process.returncode

    def _start(self, config: WorkerConfig) -> subprocess.Popen[bytes]:
        use_safe_path()
        with interrupts_blocked():
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own command
        self._process = process
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _end(process)
