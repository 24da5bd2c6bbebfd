"""The last step's tokens, kept on the device so that the next step can be computed before the host has seen them.

A step names such a token by its row: -1 - row stands where its id would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from torch import Tensor

    from server.engine.core.sequence import Sequence
    from server.engine.core.step import ScheduledSequence


class SampledTokens:
    """Where each step leaves its tokens and the next finds them.

    Attributes:
        ids: [capacity] int64, valid token ids; the leading ones are the last step's.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._rows: dict[Sequence, int] = {}

    def id_or_row(self, sequence: Sequence, position: int) -> int:
        """Return a token's id where the host knows it, else -1 - its row in the last step."""
        token_ids = sequence.token_ids
        if position < len(token_ids):
            return token_ids[position]
        return -1 - self._rows[sequence]

    def note(self, scheduled: TypingSequence[ScheduledSequence]) -> None:
        """Remember whose tokens a step samples, in the order of its rows."""
        sampling = (s.sequence for s in scheduled if s.num_logits)
        self._rows = {sequence: row for row, sequence in enumerate(sampling)}

    def put(self, tokens: Tensor) -> None:
        """Leave a step's tokens, [M] int64, on the device."""
        if len(tokens) > len(self.ids):
            self.ids = torch.zeros(len(tokens), dtype=torch.int64, device=self.ids.device)
        self.ids[: len(tokens)].copy_(tokens)
