"""Combines the reports of a service's engine processes into that of one, which the HTTP layer reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from server.engine.core.messages import (
    MAX_LISTED_ADAPTERS,
    EngineInfo,
    EngineStats,
    add_counters,
)
from server.engine.link.protocol import EngineReport, EngineState

_SUMS: Final = (
    "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_reserved_tokens",
    "num_prefill_tokens", "num_snapshots", "num_waiting_for_slots",
)  # fmt: skip
_RATES: Final = ("prompt_rate", "output_rate")
_LIST_SUMS: Final = ("waiting_by_length", "waiting_tokens_by_length", "waiting_output_by_length")
_NAMES: Final = ("running_adapters", "waiting_adapters")


def combine_states(reports: Sequence[EngineReport]) -> tuple[EngineState, str]:
    """Return the state of all engines, and the phase that describes it.

    The service is ready once every engine has been ready, and from then on while at least one is.
    """
    if len(reports) == 1:
        return reports[0].state, reports[0].phase
    states = [report.state for report in reports]
    ready = states.count(EngineState.READY)
    phase = reports[0].phase
    if any(report.phase != phase for report in reports):
        first = next(i for i, state in enumerate(states) if state is not EngineState.READY)
        phase = (
            f"{ready} of {len(reports)} engines are ready; engine {first}: {reports[first].phase}"
        )
    if any(report.info is None for report in reports):
        stopped = EngineState.STOPPED in states
        return (EngineState.STOPPED if stopped else EngineState.STARTING), phase
    if ready:
        return EngineState.READY, phase
    if all(state is EngineState.STOPPED for state in states):
        return EngineState.STOPPED, phase
    return EngineState.RESTARTING, phase


def combine_info(reports: Sequence[EngineReport]) -> EngineInfo | None:
    """Return the properties of the first engine with the sums of blocks and sequences; None until all were ready.

    The limit of a request is the lowest of all engines.
    """
    infos = [report.info for report in reports if report.info is not None]
    if len(infos) < len(reports):
        return None
    first = infos[0]
    if len(infos) == 1:
        return first
    return msgspec.structs.replace(
        first,
        num_blocks=sum(info.num_blocks for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        max_num_batched_tokens=sum(info.max_num_batched_tokens for info in infos),
        max_prefill_tokens=sum(info.max_prefill_tokens for info in infos),
        max_total_tokens=min(info.max_total_tokens for info in infos),
        plan=msgspec.structs.replace(first.plan, num_engines=len(infos)),
    )


def combine_stats(reports: Sequence[EngineReport]) -> EngineStats:
    """Return the sums of counters and gauges; the usage of the KV cache is that of all blocks.

    Rates and free places are those of the engines that are ready. One whose rate is not known yet counts with the mean
    of the others.
    """
    all_stats = [report.stats for report in reports]
    if len(all_stats) == 1:
        return all_stats[0]
    ready = [report.stats for report in reports if report.state is EngineState.READY]
    num_blocks = sum(stats.num_blocks for stats in all_stats)
    used = sum(stats.kv_usage * stats.num_blocks for stats in all_stats)
    sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in _SUMS}
    sums["num_free_places"] = sum(stats.num_free_places for stats in ready)
    sums |= {name: _rate([getattr(stats, name) for stats in ready]) for name in _RATES}
    lists = {
        name: [
            sum(values)
            for values in itertools.zip_longest(
                *(getattr(stats, name) for stats in all_stats), fillvalue=0
            )
        ]
        for name in _LIST_SUMS
    }
    names = {
        name: sorted({it for stats in all_stats for it in getattr(stats, name)})[
            :MAX_LISTED_ADAPTERS
        ]
        for name in _NAMES
    }
    # The engines of a service get requests of the same clients.
    means = zip(*(stats.output_means for stats in ready if stats.output_means), strict=True)
    return msgspec.structs.replace(
        functools.reduce(add_counters, all_stats),
        output_means=[_mean_of_known(values) for values in means],
        kv_usage=used / num_blocks if num_blocks else 0.0,
        **sums,
        **lists,
        **names,
    )


def _rate(values: Sequence[float]) -> float:
    """Return the sum of rates, of which those that are 0.0 are not known."""
    return len(values) * _mean_of_known(values)


def _mean_of_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not 0.0, else 0.0."""
    known = [it for it in values if it]
    return sum(known) / len(known) if known else 0.0


def combine_past(reports: Sequence[EngineReport]) -> EngineStats:
    """Return the sums of the counters of earlier engine processes."""
    return functools.reduce(add_counters, (report.past for report in reports))


class EngineReports:
    """The reports of all engine processes of a service, read as those of one engine.

    Attributes:
        reports: a report for each engine, by its number; set by a subclass.
    """

    reports: list[EngineReport]
    # What was combined last, from which objects: each request reads these, and the engines send statistics often.
    _info: tuple[Sequence[object], EngineInfo | None] = ((), None)
    _stats: tuple[Sequence[object], EngineStats] = ((), EngineStats())
    _past: tuple[Sequence[object], EngineStats] = ((), EngineStats())

    @property
    def state(self) -> EngineState:
        """State of the service: ready once every engine has been ready, and then while one is."""
        return combine_states(self.reports)[0]

    @property
    def phase(self) -> str:
        """Describes the state for people."""
        return combine_states(self.reports)[1]

    @property
    def num_ready(self) -> int:
        """Number of engines that take requests."""
        return sum(report.state is EngineState.READY for report in self.reports)

    @property
    def restarts(self) -> int:
        """Number of engine processes that were ready and have ended."""
        return sum(report.restarts for report in self.reports)

    @property
    def past(self) -> EngineStats:
        """Sum of the counters of earlier engine processes. The same object while nothing changes."""
        parts = [report.past for report in self.reports]
        if not _same(parts, self._past[0]):
            self._past = parts, combine_past(self.reports)
        return self._past[1]

    @property
    def info(self) -> EngineInfo | None:
        """Properties of the newest engines that became ready; None before. The same object while nothing changes."""
        infos = [report.info for report in self.reports]
        if not _same(infos, self._info[0]):
            self._info = infos, combine_info(self.reports)
        return self._info[1]

    @property
    def stats(self) -> EngineStats:
        """The newest statistics. The same object while nothing changes."""
        if len(self.reports) == 1:
            return self.reports[0].stats
        parts = [part for report in self.reports for part in (report.state, report.stats)]
        if not _same(parts, self._stats[0]):
            self._stats = parts, combine_stats(self.reports)
        return self._stats[1]


def _same(new: Sequence[object], old: Sequence[object]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
