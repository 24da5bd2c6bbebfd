"""Keeps steps short for other clients while one client has very many sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.engine.core.queue.recent_clients import RecentClients

if TYPE_CHECKING:
    from server.engine.core.accounting import Accounting
    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.queue.live_sequences import LiveSequences
    from server.engine.core.sequence import Sequence

_MANY: Final = 16
"""Unfinished sequences with more than which a client counts as one that floods."""
_RATIO: Final = 2.0
"""How many times as long as the shortest step, one of a client that floods may take."""


class ShortSteps:
    """Limits what a client that floods has in a step, so that the next request of another one waits for a short step.

    A request that arrives waits for the end of the step that is being computed, and its own step takes as long as the
    rows beside it make it. Where one more row makes a step longer, as on a CPU, a client with more than `_MANY`
    unfinished sequences therefore gets no more rows than the device computes in about twice the time of its shortest
    step, as long as others have sent requests in the last minute. Where rows are nearly free, as on a GPU, the limit is
    above all others. A client alone has no limit.

    The limit is `LiveSequences.place_limits`: of the running sequences of each such client, and of the tokens of its
    prompts in a step beside one for each sequence.
    """

    def __init__(
        self, live: LiveSequences, block_manager: BlockManager, accounting: Accounting
    ) -> None:
        self._live, self._block_manager, self._accounting = live, block_manager, accounting
        self._arrived: dict[str, None] = {}  # since the last step
        self._recent = RecentClients()  # at the time of the next step

    def note_arrival(self, client: str) -> None:
        """Note that a client has sent a request."""
        self._arrived[client] = None

    def begin(self) -> list[Sequence]:
        """Limit the clients for the step that is being scheduled; return what must be preempted of their sequences.

        Sequences are preempted only if the prefix cache keeps what they have computed.
        """
        live = self._live
        for client in self._arrived:
            self._recent.note(client, self._accounting.now)
        self._arrived.clear()
        limits = self._limits()
        live.limit_places(limits)
        if not limits or not self._block_manager.enable_prefix_caching:
            return []
        left = {client: live.num_places.get(client, 0) - most for client, most in limits.items()}
        excess = []
        for sequence in reversed(live.running[1:]):
            if left.get(sequence.client, 0) > 0:
                left[sequence.client] -= 1
                excess.append(sequence)
        return excess

    def _limits(self) -> dict[str, int]:
        live, accounting = self._live, self._accounting
        if len(live) <= _MANY or len(self._recent) < 2 or not accounting.least_price:
            return {}
        tokens = _RATIO * accounting.least_seconds / accounting.least_price
        return {
            client: max(1, int(tokens / 2))
            for client, count in live.num_places.items()
            if count + live.waiting.num_of(client) > _MANY
            and self._recent.has_other(client, accounting.now)
        }
