"""What Prometheus scrapes: the service's own metrics, and the same numbers under other servers' names.

Each front end counts its requests in counters that all front ends share. The engine's gauges and counters are read from
the engine client at each scrape. Text from a client never becomes a label.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from server.http.metrics import own, tgi, vllm
from server.http.metrics.client_counts import ClientCounts
from server.http.metrics.exposition import Exposition
from server.http.metrics.histogram import Histogram
from server.http.metrics.process import EngineProcesses, Processes
from server.http.metrics.shared_counters import SharedCounters
from server.http.metrics.snapshot import KeptResults, Snapshot
from server.http.metrics.specs import (
    HISTOGRAM_CELLS,
    HISTOGRAMS,
    IN_FLIGHT_CELL,
    LOG_LINES_DROPPED_CELL,
    MAX_ENDPOINTS,
    NUM_CELLS,
    NUM_METRICS,
    PID_CELL,
    Outcome,
)
from server.standard_error import count_dropped_lines_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.link.front_end.client import EngineHandle
    from server.http.config import HTTPConfig
    from server.http.lifecycle import Lifecycle
    from server.http.metrics.rows import Reading

_SETS = (own, vllm, tgi)


class Metrics:
    """Owns this process's row of the counters, and renders the metrics of the service.

    Used only on the event loop.

    Attributes:
        clients: what each client has in progress; no metric shows it.

    Args:
        client: provides the engine's state and statistics.
        config: provides the model's name.
        version: the service's version.
        endpoints: labels that requests are counted under; the same in all processes of the service.
        counters: rows of `NUM_CELLS` numbers; None if this process is the only one.
        lifecycle: the stage of this front end; None if it never ends.
    """

    def __init__(
        self,
        client: EngineHandle,
        config: HTTPConfig,
        version: str,
        endpoints: Sequence[str],
        counters: SharedCounters | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        assert len(endpoints) <= MAX_ENDPOINTS, endpoints
        self._request_cells = {
            pair: cell for cell, pair in enumerate(itertools.product(endpoints, Outcome))
        }
        self._counters = counters or SharedCounters.private(NUM_CELLS)
        mine = self._counters.mine
        mine[IN_FLIGHT_CELL] = 0  # requests of an earlier process with this row have ended
        self.clients = ClientCounts(
            mine[NUM_METRICS:],
            [row[NUM_METRICS:] for row in self._counters.rows if row is not mine],
        )
        mark_process(self._counters)
        (
            self.ttft, self.itl, self.duration, self.validation, self.queue, self.prefill, self.decode, self.inference,
            self.time_per_token, self.prompt_length, self.output_length, self.max_new_tokens,
        ) = (Histogram(spec.buckets, mine[HISTOGRAM_CELLS[spec]]) for spec in HISTOGRAMS)  # fmt: skip
        self._client = client
        self._lifecycle = lifecycle
        self._config = config
        self._version = version
        self._processes = Processes()
        self._engine_processes = EngineProcesses()
        self._exposition = Exposition()
        self._kept = KeptResults()

    def count_request(self, endpoint: str, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._counters.mine[self._request_cells[endpoint, outcome]] += 1

    @property
    def in_flight(self) -> int:
        """Sequences in flight in all processes of the service: admitted and not yet answered."""
        return int(self._counters.total(IN_FLIGHT_CELL))

    def add_in_flight(self, sequences: int) -> None:
        """Count admitted sequences; a negative number removes answered ones."""
        self._counters.mine[IN_FLIGHT_CELL] += sequences

    def read(self) -> list[Reading]:
        """Read all metrics."""
        snapshot = Snapshot(
            self._config.model_id,
            self._version,
            self._counters.totals(NUM_METRICS),
            list(self._request_cells),
            self._client,
            self._kept,
        )
        snapshot.is_draining = self._lifecycle is not None and self._lifecycle.is_draining
        readings = [reading for metrics in _SETS for reading in metrics.read(snapshot)]
        readings += self._processes.read([row[PID_CELL] for row in self._counters.rows])
        return readings + self._engine_processes.read(snapshot.engines)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Render all metrics in Prometheus' text format, or in another format that the client prefers.

        Returns:
            The text and its content type.
        """
        return self._exposition.render(self.read(), accept)


def mark_process(counters: SharedCounters) -> None:
    """Include this process in the processor time, the memory and the dropped lines that the service reports."""
    counters.mine[PID_CELL] = os.getpid()
    count_dropped_lines_in(counters.mine, LOG_LINES_DROPPED_CELL)
