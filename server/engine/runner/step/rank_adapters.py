"""Adapters of a model that several ranks share: each reads the files of an adapter, and writes its part to its slots.

    leader      tell read ── read the files ── hear from all ranks ──> content    tell write ── write
    follower    read the files ── report                                          write

A rank that cannot read an adapter reports why, and then none of them uses it: the files may change between two reads.
A follower keeps what it has read until the leader forgets the adapter.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from model.errors import AdapterError
from server.engine.core.request import AdapterRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from model.network.adapter_slots import Updates
    from server.engine.runner.step.adapters import SlotLoader

log = logging.getLogger("tessera.engine")

_POLL_SECONDS: Final = 0.001


class ReadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read an adapter, and report; `number` identifies what was read."""

    number: int
    adapter: AdapterRef


class WriteAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write what was read to a slot, before the steps that follow."""

    number: int
    slot: int


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget what was read."""

    number: int


AdapterCommand = ReadAdapter | WriteAdapter | DropAdapter


class AdapterReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank has read an adapter, or could not.

    Attributes:
        number: of the command.
        error: of an `AdapterError`; None if there was none.
        is_internal: whether another error occurred, which the rank has logged.
    """

    number: int
    error: str | None = None
    is_internal: bool = False


class AdapterRanks(Protocol):
    """The other ranks, as the leader sees them.

    Attributes:
        size: number of ranks, the leader included.
    """

    size: int

    def tell(self, command: AdapterCommand) -> None:
        """Send a command to all other ranks; never blocks."""

    def reports(self) -> Sequence[AdapterReport]:
        """Return what the other ranks have reported since the last call; for one thread at a time.

        Raises:
            RuntimeError: the ranks are being ended.
        """


class SharedContent(NamedTuple):
    """An adapter that all ranks have read.

    Attributes:
        number: of the command that made them read it.
        part: the leader's.
    """

    number: int
    part: Updates


class LeadingLoader:
    """Implements `server.engine.core.adapter_pool.AdapterLoader` for the first of several ranks.

    Args:
        slots: of the leader's part of the model.
        ranks: the others.
    """

    def __init__(self, slots: SlotLoader, ranks: AdapterRanks) -> None:
        self._slots, self._ranks = slots, ranks
        self._numbers = itertools.count()
        self._reports: dict[int, list[AdapterReport]] = {}
        self._lock = threading.Lock()

    def read(self, adapter: AdapterRef) -> Future[SharedContent]:
        """See `AdapterLoader.read`; it has ended when all ranks have read the adapter, or one cannot."""
        number = next(self._numbers)
        self._ranks.tell(ReadAdapter(number, adapter))
        return self._slots.submit(lambda: self._read(number, adapter))

    def write(self, slot: int, content: SharedContent, /) -> None:
        """See `AdapterLoader.write`."""
        self._ranks.tell(WriteAdapter(content.number, slot))
        self._slots.write(slot, content.part)

    def num_bytes(self, content: SharedContent, /) -> int:
        """See `AdapterLoader.num_bytes`; of a rank."""
        return self._slots.num_bytes(content.part)

    def drop(self, content: SharedContent, /) -> None:
        """See `AdapterLoader.drop`."""
        self._ranks.tell(DropAdapter(content.number))

    def _read(self, number: int, adapter: AdapterRef) -> SharedContent:
        try:
            try:
                part = self._slots.read_now(adapter)
            finally:  # each rank reports in any case
                reports = self._await_reports(number)
            for report in reports:
                if report.is_internal:
                    raise RuntimeError("a rank could not read an adapter; its error is above")
                if report.error is not None:
                    raise AdapterError(report.error)
        except BaseException:
            self._ranks.tell(DropAdapter(number))
            raise
        return SharedContent(number, part)

    def _await_reports(self, number: int) -> list[AdapterReport]:
        """Wait for the reports of all other ranks about an adapter.

        A rank that ends makes this process end.

        Raises:
            RuntimeError: the ranks are being ended.
        """
        while True:
            with self._lock:
                for report in self._ranks.reports():
                    self._reports.setdefault(report.number, []).append(report)
                if len(self._reports.get(number, ())) == self._ranks.size - 1:
                    return self._reports.pop(number)
            time.sleep(_POLL_SECONDS)


class FollowingLoader:
    """Repeats the leader's operations on the slots of this rank.

    Args:
        slots: of this rank's part of the model.
        report: sends a report to the leader; called by any thread.
    """

    def __init__(self, slots: SlotLoader, report: Callable[[AdapterReport], None]) -> None:
        self._slots, self._report = slots, report
        self._reads: dict[int, Future[Updates]] = {}

    def run(self, command: AdapterCommand) -> None:
        """Carry out a command of the leader."""
        number = command.number
        if isinstance(command, ReadAdapter):
            self._reads[number] = future = self._slots.read(command.adapter)
            future.add_done_callback(lambda it: self._report(_report_of(number, it)))
        elif isinstance(command, WriteAdapter):
            self._slots.write(command.slot, self._reads[number].result())
        else:
            del self._reads[number]


def _report_of(number: int, future: Future[Updates]) -> AdapterReport:
    error = future.exception()
    if error is None:
        return AdapterReport(number)
    if isinstance(error, AdapterError):
        return AdapterReport(number, str(error))
    log.error("reading an adapter failed", exc_info=error)
    return AdapterReport(number, is_internal=True)
