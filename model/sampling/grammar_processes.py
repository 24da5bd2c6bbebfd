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
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
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

_SECONDS: Final = 30.0
"""Time after which a process that does not answer is killed. The limits of a grammar end sooner."""
_LOOK_SECONDS: Final = 0.5
"""How often a process that does not answer is looked at: one that was stopped is killed earlier."""
_ATTEMPTS: Final = 3
"""Processes that are asked to compile a grammar, or to follow it from its beginning, when one after the other ends."""
_LOST: Final = "the process that follows grammars has ended"
_TIMEVAL: Final = struct.Struct("@ll")
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_COPIES: Final = 8
"""Matchers that a process with the grammar may have more than the others, before another one compiles it too."""
_REMEMBERED: Final = 64
_MOST_ROWS: Final = 4096
_MOST_GONE: Final = 1024


class ProcessLostError(Exception):
    """A process has ended, or does not answer, which says nothing about the grammars that it followed."""


class RemoteMatcher(FollowedMatcher):
    """A matcher of another process. If that ends, another one follows the grammar from its beginning.

    Attributes:
        worker: where it is.
        matcher_id: its id there.
        grammar: serialized.
        history: the tokens that were accepted there.
    """

    __slots__ = ("_processes", "grammar", "history", "matcher_id", "worker")

    def __init__(
        self, processes: GrammarProcesses, worker: _Worker, grammar: str, rules: MatcherRules
    ) -> None:
        super().__init__(rules)
        self._processes, self.grammar = processes, grammar
        self.history: list[int] = []
        self.place_at(worker)

    def place_at(self, worker: _Worker) -> None:
        """Take an id in a process, which does not know it yet."""
        self.worker = worker
        self.matcher_id = worker.new_id()
        weakref.finalize(self, worker.drop, self.matcher_id)

    def copy(self) -> RemoteMatcher:
        """Return an independent matcher in the same state."""
        copy = RemoteMatcher(self._processes, self.worker, self.grammar, self.rules)
        copy.history = self.history.copy()
        self._ask(COPY, copy.matcher_id)
        if copy.worker is not self.worker:  # which has ended
            self._processes.recover(copy)
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
        for _ in range(_ATTEMPTS):
            try:
                return self.worker.order(Explain(self.matcher_id)).result(_SECONDS)
            except ProcessLostError:
                if not self._processes.recover(self):
                    break
        return FAILURE

    def _consume(self, token_id: int) -> bool:
        self.note(self._ask(CONSUME, token_id)[0], ())
        self.history.append(token_id)
        return not self.is_refused

    def _find_forced(self) -> list[int]:
        return self._ask(FORCED, 0)[1]

    def _ask(self, request: int, number: int) -> tuple[int, list[int]]:
        """Ask the process, and the next one if it has ended."""
        answer = self.worker.ask_one(request, self.matcher_id, number)
        while answer[0] & FAILED and self.worker.has_ended and self._processes.recover(self):
            if request == COPY:  # the copy is recovered in the same way
                return 0, []
            answer = self.worker.ask_one(request, self.matcher_id, number)
        return answer

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
        self._waiting: dict[int, Future[str]] = {}
        self._lock = threading.Lock()
        self._buffer = np.empty(2 * MOST_PACKET_NUMBERS, np.int32)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as theirs:
            self._steps, steps = map(
                opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            self._orders, orders = map(
                opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            theirs.callback(steps.close)
            theirs.callback(orders.close)
            fds = (steps.fileno(), orders.fileno(), memory)
            command = [sys.executable, "-P", "-m", "model.sampling.grammar_process", *map(str, fds)]
            # In a session of its own, since an interrupt often goes to the whole process group.
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True,
                env=os.environ | _ENVIRONMENT,  # noqa: TID251 - handed on, not read
            )  # fmt: skip
            opened.callback(self._process.wait)
            opened.callback(self._process.kill)
            self._steps.settimeout(_LOOK_SECONDS)
            # A process that was stopped does not read.
            timeout = _TIMEVAL.pack(int(_SECONDS), 0)
            self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            send_order(self._orders, setup)
            threading.Thread(target=self._read_answers, name="grammar-answers", daemon=True).start()
            opened.pop_all()

    def new_id(self) -> int:
        """Return the id of a new matcher."""
        self.num_matchers += 1
        return next(self._ids)

    def drop(self, matcher_id: int) -> None:
        """Note that a matcher is gone."""
        self.num_matchers -= 1
        self.gone.append(matcher_id)

    def order(self, order: Compile | Explain) -> Future[str]:
        """Send an order; the future has the text of the answer, or `ProcessLostError` if the process has ended."""
        future: Future[str] = Future()
        with self._lock:
            if not self.has_ended:
                self._waiting[order.matcher_id] = future
                # If the process ends now, the thread that reads answers finds the order in the table.
                try:
                    send_order(self._orders, order)
                except OSError as error:
                    self._fail(error)
                return future
        future.set_exception(ProcessLostError(_LOST))
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
        patience = _Patience(self._process.pid)
        while len(found) < count and not self.has_ended:
            try:
                size = self._steps.recv_into(self._buffer.data)
            except TimeoutError:
                if reason := patience.exhausted():
                    self._fail(TimeoutError(reason))
                continue
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

    def _read_answers(self) -> None:
        patience = None
        arrived = select.poll()
        arrived.register(self._orders, select.POLLIN)
        try:
            while not self.has_ended:
                if not arrived.poll(1000 * _LOOK_SECONDS):
                    patience = (patience or _Patience(self._process.pid)) if self._waiting else None
                    if patience is not None and (reason := patience.exhausted()):
                        self._fail(TimeoutError(reason))
                    continue
                patience = None
                if (answer := receive_order(self._orders, Answer)) is None:
                    break
                self._waiting.pop(answer.matcher_id).set_result(answer.text)
        except OSError as error:
            self._fail(error)
        self.end()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._orders.close()
        for future in waiting.values():
            future.set_exception(ProcessLostError(_LOST))
        self._process.wait()


class _Patience:
    """Says when a process that does not answer is given up.

    Args:
        pid: of the process, a child of this one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._end = time.monotonic() + _SECONDS
        self._num_stops = 0

    def exhausted(self) -> str:
        """Return why the process is given up; empty if it is not. Call it each `_LOOK_SECONDS`."""
        is_stopped = False
        with contextlib.suppress(ChildProcessError):
            options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            is_stopped = os.waitid(os.P_PID, self._pid, options) is not None
        # Twice in sequence, since a signal that continues all processes may just be on its way.
        self._num_stops = self._num_stops + 1 if is_stopped else 0
        if self._num_stops > 1:
            return "it was stopped"
        return f"{_SECONDS:g} s have passed" if time.monotonic() > self._end else ""


class GrammarProcesses:
    """Owns the processes. Only one thread computes masks; others may compile.

    Args:
        setup: of the processes.
        num_processes: at least 1.
        num_slots: masks that there is place for: at least the sequences of a step.
    """

    def __init__(self, setup: Setup, num_processes: int, num_slots: int) -> None:
        self._setup, self._lock = setup, threading.Lock()
        self._is_closed = False
        self._memory = os.memfd_create("masks")
        os.ftruncate(self._memory, num_slots * setup.num_words * 4)
        self._mapped = mmap.mmap(self._memory, 0)
        self.words: Numbers = np.frombuffer(self._mapped, np.int32).reshape(num_slots, -1)
        self._workers = [_Worker(setup, self._memory) for _ in range(num_processes)]
        self._free = list(range(num_slots))
        self._owners: dict[int, weakref.ref[RemoteMatcher]] = {}

    def compile(self, grammar: str, rules: MatcherRules) -> Future[RemoteMatcher]:
        """Start to compile a grammar. If a process ends before it has answered, the next one is asked.

        Returns:
            A future, which raises a `GrammarError` if the grammar cannot be compiled, and a `ProcessLostError` if no
            process answers.
        """
        future: Future[RemoteMatcher] = Future()
        self._order(future, grammar, rules, _ATTEMPTS)
        return future

    def _order(
        self, future: Future[RemoteMatcher], grammar: str, rules: MatcherRules, attempts: int
    ) -> None:
        try:
            with self._lock:
                matcher = RemoteMatcher(self, self._worker_for(grammar), grammar, rules)
        except ProcessLostError as error:
            future.set_exception(error)
            return
        answer = matcher.worker.order(Compile(matcher.matcher_id, grammar, rules))
        answer.add_done_callback(partial(self._complete, future, matcher, attempts - 1))

    def _complete(
        self,
        future: Future[RemoteMatcher],
        matcher: RemoteMatcher,
        attempts: int,
        answer: Future[str],
    ) -> None:
        error = answer.exception()
        if isinstance(error, ProcessLostError) and attempts and not self._is_closed:
            self._order(future, matcher.grammar, matcher.rules, attempts)
        elif error is not None:
            future.set_exception(error)
        elif text := answer.result():
            future.set_exception(GrammarError(text))
        else:
            future.set_result(matcher)

    def recover(self, matcher: RemoteMatcher) -> bool:
        """Follow a grammar in another process, since that of its matcher has ended; return whether that succeeded.

        Only the engine's thread calls it, which waits: rather for a process that runs than for one that starts.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self._lock:
                    matcher.place_at(self._worker_for(matcher.grammar, running=True))
                worker = matcher.worker
                order = Compile(matcher.matcher_id, matcher.grammar, matcher.rules)
                if worker.order(order).result(_SECONDS):
                    return False
            except (ProcessLostError, TimeoutError):
                continue
            history = matcher.history
            answers: list[tuple[int, list[int]]] = []
            for start in range(0, len(history), _MOST_ROWS):
                part = history[start : start + _MOST_ROWS]
                rows = [number for token_id in part for number in (matcher.matcher_id, 0, token_id)]
                worker.start(CONSUME, rows)
                answers += worker.answers(len(part))
            if not worker.has_ended:
                matcher.is_masked = False
                return not any(flags & FAILED for flags, _ in answers)
        return False

    def compute(self, matchers: Iterable[RemoteMatcher]) -> None:
        """Compute the masks of the matchers that have none for their state; see `GrammarMatcher.write_mask`."""
        matchers = list(matchers)
        due = [(matcher, 0) for matcher in matchers if not matcher.is_masked]
        if due:
            self._run(MASK, due, kept=matchers)

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
        self._run(ADVANCE, rows, meanwhile, kept=[matcher for matcher, _ in rows])

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for worker in self._workers:
            worker.end()
        os.close(self._memory)

    def _run(
        self,
        request: int,
        rows: Sequence[tuple[RemoteMatcher, int]],
        meanwhile: Callable[[], None] | None = None,
        *,
        kept: Sequence[RemoteMatcher],
    ) -> None:
        """Let the processes compute rows at the same time, and take their answers; `kept` keep their slots."""
        numbers: dict[_Worker, list[int]] = {}
        matchers: dict[_Worker, list[RemoteMatcher]] = {}
        for matcher, token_id in rows:
            if matcher.slot < 0:
                self._assign_slot(matcher, kept)
            worker = matcher.worker
            if worker not in numbers:
                numbers[worker], matchers[worker] = [], []
            numbers[worker] += (matcher.matcher_id, matcher.slot, token_id)
            matchers[worker].append(matcher)
        for worker, its in numbers.items():
            worker.start(request, its)
        if meanwhile is not None:
            meanwhile()
        lost: list[RemoteMatcher] = []
        for worker, of_worker in matchers.items():
            for matcher, (flags, forced) in zip(
                of_worker, worker.answers(len(of_worker)), strict=True
            ):
                if flags & FAILED and worker.has_ended:
                    lost.append(matcher)
                else:
                    self._note(request, matcher, flags, forced)
        for matcher in lost:
            self._note(request, matcher, *self._recovered(request, matcher))

    def _recovered(self, request: int, matcher: RemoteMatcher) -> tuple[int, list[int]]:
        """Return the answer of another process for a matcher whose own has ended."""
        token_id = matcher.ahead[-1] if request == ADVANCE else 0
        for _ in range(_ATTEMPTS):
            if not self.recover(matcher):
                break
            matcher.worker.start(request, (matcher.matcher_id, matcher.slot, token_id))
            (answer,) = matcher.worker.answers(1)
            if not matcher.worker.has_ended:
                return answer
        return FAILED, []

    @staticmethod
    def _note(request: int, matcher: RemoteMatcher, flags: int, forced: Sequence[int]) -> None:
        """Take a process's answer."""
        if request == ADVANCE:
            matcher.history += (matcher.ahead[-1], *forced)
        matcher.note(flags, forced)
        matcher.is_masked = True

    def _assign_slot(self, matcher: RemoteMatcher, kept: Sequence[RemoteMatcher]) -> None:
        """Give a matcher a slot; one that is not among those to be kept loses its own if none is free."""
        if not self._free:
            self._free = [slot for slot, owner in self._owners.items() if owner() is None]
        if not self._free:
            needed = {it.slot for it in kept}
            slot = next(slot for slot in self._owners if slot not in needed)
            owner = self._owners[slot]()
            assert owner is not None
            owner.slot, owner.is_masked = -1, False
            self._free.append(slot)
        matcher.slot = self._free.pop()
        self._owners[matcher.slot] = weakref.ref(matcher)

    def _worker_for(self, grammar: str, *, running: bool = False) -> _Worker:
        """Return the process for a new matcher: one that knows the grammar, unless others have much less to do.

        Args:
            grammar: of the matcher.
            running: whether one that runs is better than one that has to start.

        Raises:
            ProcessLostError: all have ended, and the system refuses new ones.
        """
        usable = [worker for worker in self._workers if not worker.has_ended]
        for i, worker in enumerate(self._workers):
            if worker.has_ended:
                try:
                    self._workers[i] = _Worker(self._setup, self._memory)
                except (
                    OSError,
                    RuntimeError,
                    MemoryError,
                ) as error:  # the second: there can be no thread
                    log.error("a process that follows grammars cannot be started: %s", error)
                    continue
                if not running or not usable:
                    usable.append(self._workers[i])
        if not usable:
            raise ProcessLostError("the processes that follow grammars cannot be started")
        least = min(usable, key=_num_matchers)
        knowing = [worker for worker in usable if grammar in worker.grammars]
        found = min(knowing, key=_num_matchers, default=least)
        if found.num_matchers >= least.num_matchers + _COPIES:
            found = least
        if len(found.grammars) >= _REMEMBERED:
            found.grammars.clear()
        found.grammars.add(grammar)
        return found


def _num_matchers(worker: _Worker) -> int:
    return worker.num_matchers
