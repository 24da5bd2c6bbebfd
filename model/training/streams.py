"""Packs documents of the prepared streams into batches; (seed, step) determines a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.training.prepare import (
    CONTEXT_LENGTH,
    STREAMS,
    TEXT_STREAMS,
    infilling_stream,
    read_arrays,
)

_TOKENS_PER_SEQUENCE = 256
"""A batch has room for one sequence of this many tokens each; in one that needs more, the room is doubled."""


class PackedTokens(NamedTuple):
    """A batch of B documents, or parts of documents, one after the other.

    Attributes:
        inputs: int64 [T].
        targets: int64 [T], the token after each input in its document.
        positions: int64 [T], from 0 in each document.
        cu_seqlens: int32 [B + 1], first token of each document, and T; the last documents can be empty, so that B is
            the same in most batches.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor


class TokenStreams:
    """The streams in the host's memory; immutable.

    Args:
        folder: written by `prepare`.
        weights: share of a batch's tokens from each of `prepare.STREAMS`.
    """

    def __init__(self, folder: Path, weights: Sequence[float]) -> None:
        arrays = read_arrays(folder)
        # Each text stream's rearranged documents follow the streams, in the order of the text streams.
        names = (*STREAMS, *(infilling_stream(name) for name in TEXT_STREAMS))
        tokens = [arrays[name] for name in names]
        lengths = np.array([len(stream) for stream in tokens])
        offsets = np.cumsum(lengths) - lengths
        # The first token of each document, and the separator after the last one.
        self._bounds = [
            offset + np.append(arrays[f"{name}_starts"].astype(np.int64), length - 1)
            for name, offset, length in zip(names, offsets, lengths, strict=True)
        ]
        if len(weights) != len(STREAMS):
            raise ValueError(
                f"{len(weights)} stream weights given, one for each of {STREAMS} needed"
            )
        self._shares = np.array(weights) / sum(weights)
        self._tokens = np.concatenate(tokens)
        self._left, self._right = _merge_parts(folder)

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams together."""
        return len(self._tokens)

    def batch(
        self,
        seed: int,
        step: int,
        num_tokens: int,
        *,
        lengths: Sequence[int],
        start_share: float,
        split: float,
        infilling_share: float = 0.0,
    ) -> PackedTokens:
        """Sample one batch.

        Args:
            seed: of the run.
            step: of the run; the same pair gives the same batch.
            num_tokens: T.
            lengths: a document is cut to one of these, chosen at random; the context at most.
            start_share: share of the longer documents that are cut at the end only.
            split: in every second document each token is split with this probability into the two that it was merged
                from, twice, so that the model also reads unusual token boundaries.
            infilling_share: share of the tokens of text streams that are taken from their documents rearranged for
                fill-in-the-middle.

        Returns:
            The batch, in the host's memory.
        """
        generator = np.random.default_rng((seed, step))
        texts = len(TEXT_STREAMS)
        budgets = num_tokens * np.append(self._shares, self._shares[:texts] * infilling_share)
        budgets[:texts] *= 1 - infilling_share
        parts = [
            self._parts(generator, bounds, int(np.ceil(budget)), lengths, start_share)
            for bounds, budget in zip(self._bounds, budgets, strict=True)
            if budget > 0
        ]
        first, sizes = np.concatenate(parts, axis=1)
        order = generator.permutation(len(first))
        first, sizes = first[order], sizes[order] + 1  # and the target of the last
        owner = np.repeat(np.arange(len(sizes)), sizes)
        shift = np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        tokens = self._tokens[shift + np.arange(len(owner))].astype(np.int64)
        if split > 0:
            for _ in range(2):
                tokens, owner = self._split(generator, tokens, owner, split)
        return pack(tokens, owner, num_tokens)

    def _parts(
        self,
        generator: np.random.Generator,
        bounds: np.ndarray,
        num_tokens: int,
        lengths: Sequence[int],
        start_share: float,
    ) -> np.ndarray:
        """Sample parts of documents, [2, n]: the first token of each, and their numbers, `num_tokens` in all."""
        if bounds[0] == bounds[-1]:
            raise ValueError("a stream with a weight has no tokens")
        found: list[np.ndarray] = []
        missing = num_tokens
        while missing > 0:
            count = 1 + missing // 128
            place = generator.integers(bounds[0], bounds[-1], count)
            document = np.searchsorted(bounds, place, side="right") - 1
            start, end = bounds[document], bounds[document + 1]
            limit = generator.choice(np.array(lengths), count)
            place = np.where(generator.random(count) < start_share, start, place)
            first = np.maximum(start, np.minimum(place, end - limit))
            sizes = np.minimum(end - first, limit)
            enough = int(np.searchsorted(np.cumsum(sizes), missing)) + 1
            found.append(np.stack((first, sizes))[:, :enough])
            missing -= int(found[-1][1].sum())
        return np.concatenate(found, axis=1)

    def _split(
        self,
        generator: np.random.Generator,
        tokens: np.ndarray,
        owner: np.ndarray,
        probability: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Undo merges at random in the documents of odd number."""
        chosen = generator.random(len(tokens)) < probability
        chosen &= (self._left[tokens] >= 0) & (owner % 2 == 1)
        counts = 1 + chosen
        wide = np.repeat(tokens, counts)
        places = (np.cumsum(counts) - counts)[chosen]
        wide[places] = self._left[tokens[chosen]]
        wide[places + 1] = self._right[tokens[chosen]]
        return wide, np.repeat(owner, counts)


def pack(tokens: np.ndarray, owner: np.ndarray, num_tokens: int) -> PackedTokens:
    """Make a batch of documents that lie one after the other.

    Args:
        tokens: int64 [N].
        owner: int [N], the number of each token's document, ascending. A document of n tokens gives n - 1 inputs, at
            most `CONTEXT_LENGTH`.
        num_tokens: T; the rest is left out.

    Raises:
        ValueError: the documents have fewer inputs.
    """
    _, begin, number = np.unique(owner, return_index=True, return_inverse=True)
    place = np.arange(len(owner)) - begin[number]
    is_input = np.append(number[1:] == number[:-1], False) & (place < CONTEXT_LENGTH)
    chosen = np.flatnonzero(is_input)[:num_tokens]
    if len(chosen) < num_tokens:
        raise ValueError(f"the documents have {len(chosen)} inputs, {num_tokens} needed")
    ends = np.cumsum(np.bincount(number[chosen]))
    room = max(1, num_tokens // _TOKENS_PER_SEQUENCE)
    while room < len(ends):
        room *= 2
    cu_seqlens = np.full(room + 1, num_tokens, dtype=np.int32)
    cu_seqlens[: len(ends) + 1] = np.append(0, ends)
    arrays = (tokens[chosen], tokens[chosen + 1], place[chosen], cu_seqlens)
    return PackedTokens(*(torch.from_numpy(array) for array in arrays))


def to_device(batch: PackedTokens, device: torch.device) -> PackedTokens:
    """Copy a batch to a device."""
    if device.type != "cuda":
        return batch
    # A copy from pageable memory would block until all queued work is done: 5 ms of every step.
    return PackedTokens(*(it.pin_memory().to(device, non_blocking=True) for it in batch))


def _merge_parts(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token the two that it was merged from, int64 [vocabulary], -1 for none."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    left = np.full(len(vocabulary), -1, dtype=np.int64)
    right = left.copy()
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merged = vocabulary[first + second]
        left[merged], right[merged] = vocabulary[first], vocabulary[second]
    return left, right
