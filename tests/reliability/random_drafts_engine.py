"""Runs an engine process whose drafts are random: right, wrong, partly right, and with end tokens in them.

The service's own drafts are right more often than not, and it stops proposing where that does not pay. Here every
decode row has a draft, whatever it costs.

    python -m tests.reliability.random_drafts_engine
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

from server.engine.core.schedule.draft import NUM_MATCH_CLASSES, Draft, LookupDrafter
from server.engine.core.schedule.draft_policy import DraftPolicy
from server.engine.link.engine_process.process import main

if TYPE_CHECKING:
    from server.engine.core.sequence import Sequence

COMMAND = (sys.executable, "-m", "tests.reliability.random_drafts_engine")
_TOKENS = 256
"""Random tokens are below this number, which every vocabulary has."""


class RandomDrafter:
    """Proposes what a `LookupDrafter` does, with tokens replaced and added by chance."""

    def __init__(self) -> None:
        self._lookup = LookupDrafter()
        self._random = random.Random(0)

    def begin_step(self) -> None:
        """See `Drafter`."""

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """See `Drafter`."""
        rng = self._random
        tokens = [*self._lookup.propose(sequence, limit).tokens]
        if rng.random() < 0.5:
            tokens = tokens[: rng.randint(0, len(tokens))]
            ends = sequence.sampling.end_token_ids or (0,)
            while len(tokens) < limit:
                ends_here = rng.random() < 0.1
                tokens.append(rng.choice(ends) if ends_here else rng.randrange(_TOKENS))
        return Draft(tuple(tokens[: rng.randint(1, limit)]), NUM_MATCH_CLASSES - 1)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._lookup.forget(sequence)


class FreeSteps:
    """Costs of steps that take the same time, however many tokens they have: all drafts pay."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step."""
        return 1.0


def propose_at_random(policy: DraftPolicy) -> None:
    """Let a scheduler's drafts be random, for every row and as long as allowed."""
    policy.drafter = RandomDrafter()
    for kind in policy.kinds:
        kind.costs = FreeSteps()  # type: ignore[assignment]


if __name__ == "__main__":
    _init = DraftPolicy.__init__

    def _random(self: DraftPolicy, *arguments: object, **options: object) -> None:
        _init(self, *arguments, **options)  # type: ignore[arg-type]
        propose_at_random(self)

    DraftPolicy.__init__ = _random  # type: ignore[method-assign]
    main()
