"""Follows grammars in processes of their own, a share of the sequences in each.

Accepting a token, finding what is forced and computing a mask takes 10 to 100 us for a sequence, most of it while the
library holds the interpreter lock. With hundreds of sequences a step on a GPU would wait for it longer than for the
device. The processes need no lock of the engine's, and write the masks into memory that the device copies.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np

from model.errors import GrammarError
from model.sampling.followed_matcher import FAILURE, FollowedMatcher, MatcherRules
from model.sampling.grammar_process import (
    ADVANCE,
    CONSUME,
    COPY,
    FAILED,
    FOLLOWED,
    FORCED,
    MASK,
    MOST_PACKET_NUMBERS,
    REFUSED,
    STOPPED,
    Answer,
    Compile,
    Explain,
    Numbers,
    Setup,
    receive_order,
    send_order,
)

log = logging.getLogger("tessera.engine")

_SECONDS: Final = 10.0
"""Time after which a process that does not answer is killed. The limits of a grammar end sooner."""
_ORDER_SECONDS: Final = 30.0
"""The same while grammars wait to be compiled; includes the start of the process."""
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_COPIES: Final = 8
"""Matchers that a process with the grammar may have more than the others, before another one compiles it too."""
_REMEMBERED: Final = 64
_MOST_GONE: Final = 1024


class RemoteMatcher(FollowedMatcher):
    """A matcher of another process.

    Attributes:
        worker: where it is.
        matcher_id: its id there.
    """

    __slots__ = ("matcher_id", "worker")

    def __init__(self, worker: _Worker, matcher_id: int, rules: MatcherRules) -> None:
        super().__init__(rules)
        self.worker, self.matcher_id = worker, matcher_id

    def copy(self) -> RemoteMatcher:
        """Return an independent matcher in the same state."""
        copy = self.worker.new_matcher(self.rules)
        self.worker.ask_one(COPY, self.matcher_id, copy.matcher_id)
        copy.take_over(self)
        return copy

    def note(self, flags: int, forced: Sequence[int]) -> None:
        """Take the state from a process's answer."""
        self.is_refused = bool(flags & REFUSED)
        self.has_stopped = bool(flags & STOPPED)
        if flags & FAILED:
            self.fail()
        self.is_followed = bool(flags & FOLLOWED)
        self.ahead += forced
        self.num_tokens += len(forced)

    def _find_error(self) -> str:
        return self.worker.order(Explain(self.matcher_id)).result(_SECONDS)

    def _consume(self, token_id: int) -> bool:
        self.note(self.worker.ask_one(CONSUME, self.matcher_id, token_id)[0], ())
        return not self.is_refused

    def _find_forced(self) -> list[int]:
        return self.worker.ask_one(FORCED, self.matcher_id, 0)[1]

    def _ends(self) -> bool:
        return self.has_stopped and not self.error


class _Worker:
    """A process, and the connections to it.

    Attributes:
        gone: ids of matchers that the process may drop.
        num_matchers: matchers in use.
        grammars: those that were sent to it.
        has_ended: whether the process does not answer any more.

    Args:
        setup: of the process.
        memory: file descriptor of the masks.
    """

    def __init__(self, setup: Setup, memory: int) -> None:
        self.gone: list[int] = []
        self.num_matchers = 0
        self.grammars: set[str] = set()
        self.has_ended = False
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[Future[str], float]] = {}  # with the times of the orders
        self._lock = threading.Lock()
        self._steps, steps = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (steps.fileno(), orders.fileno(), memory)
        command = [sys.executable, "-P", "-m", "model.sampling.grammar_process", *map(str, fds)]
        with steps, orders:
            # In a session of its own, since an interrupt often goes to the whole process group.
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True,
                env=os.environ | _ENVIRONMENT,  # noqa: TID251 - handed on, not read
            )  # fmt: skip
        self._steps.settimeout(_SECONDS)
        self._orders.settimeout(_ORDER_SECONDS)
        self._buffer = np.empty(2 * MOST_PACKET_NUMBERS, np.int32)
        threading.Thread(target=self._read_answers, name="grammar-answers", daemon=True).start()
        send_order(self._orders, setup)

    def new_matcher(self, rules: MatcherRules) -> RemoteMatcher:
        """Return a matcher with an id of its own, which the process does not know yet."""
        matcher = RemoteMatcher(self, next(self._ids), rules)
        self.num_matchers += 1
        weakref.finalize(matcher, self._drop, matcher.matcher_id)
        return matcher

    def order(self, order: Compile | Explain) -> Future[str]:
        """Send an order; the future has the text of the answer, `FAILURE` if the process has ended."""
        future: Future[str] = Future()
        with self._lock:
            if not self.has_ended:
                self._waiting[order.matcher_id] = future, time.monotonic()
                # If the process ends now, the thread that reads answers finds the order in the table.
                with contextlib.suppress(OSError):
                    send_order(self._orders, order)
                return future
        future.set_result(FAILURE)
        return future

    def start(self, request: int, rows: Sequence[int]) -> None:
        """Send a packet for some rows, three numbers each."""
        # Finalizers add to the list at any time; a packet has room for some.
        gone = [self.gone.pop() for _ in range(min(len(self.gone), _MOST_GONE))]
        packet = np.array([request, len(gone), *gone, *rows], np.int32)
        try:
            self._steps.send(packet.data)
        except OSError as error:
            self._fail(error)

    def answers(self, count: int) -> list[tuple[int, list[int]]]:
        """Wait for the flags and the forced tokens of some rows; `FAILED` if the process has ended."""
        found: list[tuple[int, list[int]]] = []
        while len(found) < count and not self.has_ended:
            try:
                size = self._steps.recv_into(self._buffer.data)
            except OSError as error:
                self._fail(error)
                break
            if not size:
                self._fail(EOFError("it has exited"))
                break
            numbers, at = self._buffer[: size // self._buffer.itemsize].tolist(), 0
            while at < len(numbers):
                stop = at + 2 + numbers[at + 1]
                found.append((numbers[at], numbers[at + 2 : stop]))
                at = stop
        return found + [(FAILED, [])] * (count - len(found))

    def ask_one(self, request: int, matcher_id: int, number: int) -> tuple[int, list[int]]:
        """Ask for one matcher, and wait."""
        self.start(request, (matcher_id, 0, number))
        return self.answers(1)[0]

    def end(self) -> None:
        """End the process."""
        self.has_ended = True
        self._process.kill()
        self._steps.close()
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)  # ends the thread that reads

    def _fail(self, error: Exception) -> None:
        if not self.has_ended:
            log.error("a process that follows grammars does not answer: %s", error)
            self.end()

    def _drop(self, matcher_id: int) -> None:
        self.num_matchers -= 1
        self.gone.append(matcher_id)

    def _next_answer(self) -> Answer | None:
        """Wait for an answer.

        Raises:
            TimeoutError: an order waits for too long; the process may be stopped.
        """
        seconds = self._orders.gettimeout()
        assert seconds is not None
        while True:
            try:
                return receive_order(self._orders, Answer)
            except TimeoutError:
                latest = time.monotonic() - seconds
                if any(ordered <= latest for _, ordered in list(self._waiting.values())):
                    raise

    def _read_answers(self) -> None:
        try:
            while (answer := self._next_answer()) is not None:
                self._waiting.pop(answer.matcher_id)[0].set_result(answer.text)
        except OSError as error:
            self._fail(error)
        self.end()
        self._orders.close()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            future.set_result(FAILURE)
        self._process.wait()


class GrammarProcesses:
    """Owns the processes. Only one thread computes masks; others may compile.

    Args:
        setup: of the processes.
        num_processes: at least 1.
        num_slots: masks that there is place for: at least the sequences of a step.
    """

    def __init__(self, setup: Setup, num_processes: int, num_slots: int) -> None:
        self._setup, self._lock = setup, threading.Lock()
        self._memory = os.memfd_create("masks")
        os.ftruncate(self._memory, num_slots * setup.num_words * 4)
        self._mapped = mmap.mmap(self._memory, 0)
        self.words: Numbers = np.frombuffer(self._mapped, np.int32).reshape(num_slots, -1)
        self._workers = [_Worker(setup, self._memory) for _ in range(num_processes)]
        self._free = list(range(num_slots))
        self._owners: dict[int, weakref.ref[RemoteMatcher]] = {}

    def compile(self, grammar: str, rules: MatcherRules) -> Future[RemoteMatcher]:
        """Start to compile a grammar. The future raises a `GrammarError` if that fails."""
        with self._lock:
            worker = self._worker_for(grammar)
            matcher = worker.new_matcher(rules)
        future: Future[RemoteMatcher] = Future()

        def complete(answer: Future[str]) -> None:
            if text := answer.result():
                future.set_exception(GrammarError(text))
            else:
                future.set_result(matcher)

        worker.order(Compile(matcher.matcher_id, grammar, rules)).add_done_callback(complete)
        return future

    def compute(self, matchers: Iterable[RemoteMatcher]) -> None:
        """Compute the masks of the matchers that have none for their state; see `GrammarMatcher.write_mask`."""
        due = [(matcher, 0) for matcher in matchers if not matcher.is_masked]
        if due:
            self._run(MASK, due)

    def advance(
        self,
        rows: Sequence[tuple[RemoteMatcher, int]],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Accept tokens ahead and compute the masks; see `TokenMasker.advance`.

        Args:
            rows: different matchers without tokens ahead, and the token of each.
            meanwhile: is called while the processes compute.
        """
        for matcher, token_id in rows:
            matcher.ahead.append(token_id)
            matcher.num_tokens += 1
        self._run(ADVANCE, rows, meanwhile)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        os.close(self._memory)

    def _run(
        self,
        request: int,
        rows: Sequence[tuple[RemoteMatcher, int]],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Let the processes compute rows at the same time, and take their answers."""
        numbers: dict[_Worker, list[int]] = {}
        matchers: dict[_Worker, list[RemoteMatcher]] = {}
        for matcher, token_id in rows:
            if matcher.slot < 0:
                self._assign_slot(matcher, rows)
            worker = matcher.worker
            if worker not in numbers:
                numbers[worker], matchers[worker] = [], []
            numbers[worker] += (matcher.matcher_id, matcher.slot, token_id)
            matchers[worker].append(matcher)
        for worker, its in numbers.items():
            worker.start(request, its)
        if meanwhile is not None:
            meanwhile()
        for worker, of_worker in matchers.items():
            for matcher, (flags, forced) in zip(
                of_worker, worker.answers(len(of_worker)), strict=True
            ):
                matcher.note(flags, forced)
                matcher.is_masked = True

    def _assign_slot(
        self, matcher: RemoteMatcher, rows: Sequence[tuple[RemoteMatcher, int]]
    ) -> None:
        """Give a matcher a slot; one that is not among the rows loses its own if none is free."""
        if not self._free:
            self._free = [slot for slot, owner in self._owners.items() if owner() is None]
        if not self._free:
            needed = {it.slot for it, _ in rows}
            slot = next(slot for slot in self._owners if slot not in needed)
            owner = self._owners[slot]()
            assert owner is not None
            owner.slot, owner.is_masked = -1, False
            self._free.append(slot)
        matcher.slot = self._free.pop()
        self._owners[matcher.slot] = weakref.ref(matcher)

    def _worker_for(self, grammar: str) -> _Worker:
        """Return the process for a new matcher: one that knows the grammar, unless others have much less to do."""
        for i, worker in enumerate(self._workers):
            if worker.has_ended:
                self._workers[i] = _Worker(self._setup, self._memory)
        least = min(self._workers, key=_num_matchers)
        knowing = [worker for worker in self._workers if grammar in worker.grammars]
        found = min(knowing, key=_num_matchers, default=least)
        if found.num_matchers >= least.num_matchers + _COPIES:
            found = least
        if len(found.grammars) >= _REMEMBERED:
            found.grammars.clear()
        found.grammars.add(grammar)
        return found


def _num_matchers(worker: _Worker) -> int:
    return worker.num_matchers
