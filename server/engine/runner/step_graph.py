"""What the recordings of decode steps and of prompts share: the model, and where replays leave their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels import PagedBatch
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder, Replay
    from model.network.decoder import DecoderLM
    from model.network.single_launch import OneSequence
    from server.engine.runner.sampled_tokens import DrawnTokens


class Computed(NamedTuple):
    """What a recording leaves, in memory that all recordings of decode steps share, or all with prompts.

    Attributes:
        logits: [M, V], a row for each sequence that samples.
        tokens: [M] int64, the most likely of each row, the smallest id among equals; -1 where the largest logit is
            not a finite number.
        logprobs: [M] float32, their natural log-probabilities; anything where there is none.
    """

    logits: Tensor
    tokens: Tensor
    logprobs: Tensor

    def first(self, num_rows: int) -> Computed:
        """Return the leading rows."""
        return Computed(self.logits[:num_rows], self.tokens[:num_rows], self.logprobs[:num_rows])


@dataclass(frozen=True, slots=True)
class StepModel:
    """What computes steps that are recorded.

    Attributes:
        model: the model.
        kv_cache: its cache, which must stay where it is.
        recorder: makes recordings.
        drawn: where steps leave their tokens; with room for a step's rows and one more.
        one_sequence: computes decode steps of one sequence in one launch; None where the model has no such.
    """

    model: DecoderLM
    kv_cache: KVCache
    recorder: Recorder
    drawn: DrawnTokens
    one_sequence: OneSequence | None = None

    @property
    def device(self) -> torch.device:
        """Of the cache."""
        return self.kv_cache.layer(0).device

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        decode: PagedBatch | None,
        prefill: PagedBatch | None,
    ) -> Tensor:
        """Plan the attention of a step and compute its hidden states, [T, hidden_size].

        Ids below 0 are those of tokens that the step before drew.
        """
        cache = self.kv_cache
        metadata = self.model.attention_metadata(
            slots, cache.block_size, decode, prefill, cache.kv_dtype
        )
        hidden: Tensor = self.model(input_ids, positions, cache, metadata, self.drawn.ids)
        return hidden

    def make_room(self, num_rows: int) -> Computed:
        """Allocate what replays leave behind, for so many rows."""
        weight = self.model.embed_tokens
        logits = torch.empty(num_rows, weight.shape[0], dtype=weight.dtype, device=self.device)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        return Computed(logits, tokens, torch.empty_like(tokens, dtype=torch.float32))

    def choose(self, hidden: Tensor, room: Computed) -> Tensor:
        """Score the vocabulary and choose the most likely token of each row.

        Args:
            hidden: [M, hidden_size].
            room: of M rows; written.

        Returns:
            [M] int64, valid ids: the tokens, and anything in the place of -1.
        """
        ids: Tensor = self.model.most_likely(hidden, *room)
        return ids

    @torch.inference_mode()
    def record(self, compute: Callable[[], Computed]) -> Replay:
        """Record a step; what the last one drew is kept, since the next may continue from it."""
        kept = self.drawn.ids.clone()
        replay = self.recorder.record(compute)
        self.drawn.ids.copy_(kept)
        return replay


@torch.inference_mode()
def choose_invented(model: DecoderLM, num_rows: int) -> None:
    """Choose tokens as a recording of so many rows does, and leave nothing behind."""
    weight = model.embed_tokens
    hidden = weight.new_zeros(num_rows, weight.shape[1])
    logits = weight.new_empty(num_rows, weight.shape[0])
    tokens = hidden.new_empty(num_rows, dtype=torch.int64)
    model.most_likely(hidden, logits, tokens, torch.empty_like(tokens, dtype=torch.float32))
