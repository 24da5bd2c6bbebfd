"""Keeps the last step's tokens on the device, so that the next step can start before the host knows them.

In the input of a step, -1 - row in place of a token id refers to the token in that row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from server.engine.core.step import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from numpy.typing import NDArray
    from torch import Tensor

    from server.engine.core.sequence import Sequence
    from server.engine.core.step import DecodeRows, ScheduledSequence


class SampledTokens:
    """Tokens that the last step sampled, on the device.

    Attributes:
        ids: [capacity] int64, valid token ids; the last step's tokens come first.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._decode = NO_ROWS
        self._prefill: TypingSequence[ScheduledSequence] = ()
        self._references_of: dict[Sequence, int] | None = None
        self._references = -1 - np.arange(capacity)  # to the rows, as in the input of a step

    def ids_or_rows(self, decode: DecodeRows) -> NDArray[np.int64]:
        """Return each token's id if the host knows it, else -1 - its row in `ids`: [rows] int64."""
        sequences, starts = decode.batch.sequences, decode.starts
        last = self._decode
        continues = last.batch is decode.batch and last.num_sampling == decode.num_sampling
        if starts and continues and decode.num_sampling == len(starts):
            # Each row computes the token that its row of the last step sampled; the host has read all, or none.
            if len(sequences[0].token_ids) <= starts[0]:
                return self._references[: len(starts)]
            return np.array([sequence.token_ids[-1] for sequence in sequences])
        references = self._find_references()
        return np.array(
            [
                sequence.token_ids[start]
                if start < len(sequence.token_ids)
                else references[sequence]
                for sequence, start in zip(sequences, starts, strict=True)
            ],
            np.int64,
        )

    def _find_references(self) -> dict[Sequence, int]:
        """Return the reference to the last token that the last step samples for each of its sequences."""
        if self._references_of is None:
            # The next step of a sequence with a draft is launched once the host knows its tokens.
            members = self._decode.sampling_sequences
            self._references_of = dict(zip(members, range(-1, -1 - len(members), -1), strict=True))
            end = len(members)
            for s in self._prefill:
                end += s.num_logits
                if s.num_logits:
                    self._references_of[s.sequence] = -end
        return self._references_of

    def note(self, decode: DecodeRows, prefill: TypingSequence[ScheduledSequence]) -> None:
        """Record which sequences a step samples tokens for; decode rows come first."""
        self._decode, self._prefill, self._references_of = decode, prefill, None

    def put(self, tokens: Tensor) -> None:
        """Copy a step's tokens, [M] int64, to `ids`."""
        if len(tokens) > len(self.ids):
            self.ids = torch.zeros(len(tokens), dtype=torch.int64, device=self.ids.device)
            self._references = -1 - np.arange(len(tokens))
        self.ids[: len(tokens)].copy_(tokens)
