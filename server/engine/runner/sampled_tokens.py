"""Keeps the last step's tokens on the device, so that the next step can start before the host knows them.

In the input of a step, -1 - row in place of a token id refers to the token in that row.
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
    """Tokens that the last step sampled, on the device.

    Attributes:
        ids: [capacity] int64, valid token ids; the last step's tokens come first.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._rows: dict[Sequence, int] = {}

    def id_or_row(self, sequence: Sequence, position: int) -> int:
        """Return a token's id if the host knows it, else -1 - its row in `ids`."""
        token_ids = sequence.token_ids
        if position < len(token_ids):
            return token_ids[position]
        return -1 - self._rows[sequence]

    def note(self, scheduled: TypingSequence[ScheduledSequence]) -> None:
        """Record which sequences a step samples tokens for, in the order of their rows."""
        end = 0
        self._rows = {
            s.sequence: (end := end + s.num_logits) - 1 for s in scheduled if s.num_logits
        }

    def put(self, tokens: Tensor) -> None:
        """Copy a step's tokens, [M] int64, to `ids`."""
        if len(tokens) > len(self.ids):
            self.ids = torch.zeros(len(tokens), dtype=torch.int64, device=self.ids.device)
        self.ids[: len(tokens)].copy_(tokens)
