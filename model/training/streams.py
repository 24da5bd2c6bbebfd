"""Samples batches of token rows from the prepared streams; (seed, step) determines a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.training.prepare import STREAMS, TEXT_STREAMS, infilling_stream


class TokenStreams:
    """The streams on the device; immutable.

    A row begins at the start of a document or anywhere in a stream, and continues across documents, which a separator
    divides.
    """

    def __init__(self, folder: Path, device: torch.device, weights: Sequence[float]) -> None:
        with np.load(folder / "tokens.npz") as arrays:
            # Each text stream's rearranged documents follow the streams, in the order of the text streams.
            names = (*STREAMS, *(infilling_stream(name) for name in TEXT_STREAMS))
            tokens = [arrays[name] for name in names]
            starts = [arrays[f"{name}_starts"].astype(np.int64) for name in names]
        lengths = np.array([len(stream) for stream in tokens])
        self._offsets = np.cumsum(lengths) - lengths
        self._lengths = lengths
        self._starts = starts
        if len(weights) != len(STREAMS):
            raise ValueError(
                f"{len(weights)} stream weights given, one for each of {STREAMS} needed"
            )
        self._shares = np.array(weights) / sum(weights)
        self._tokens = torch.from_numpy(np.concatenate(tokens).astype(np.int32)).to(device)
        self._left, self._right = (part.to(device) for part in _merge_parts(folder))

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams together."""
        return len(self._tokens)

    def batch(
        self,
        seed: int,
        step: int,
        rows: int,
        length: int,
        *,
        start_share: float,
        split: float,
        infilling_share: float = 0.0,
    ) -> Tensor:
        """Sample one batch.

        Args:
            seed: of the run.
            step: of the run; the same pair gives the same batch.
            rows: number of rows R.
            length: tokens per row L.
            start_share: share of rows that begin at the start of a document.
            split: in every second row each token is split with this probability into the two that it was merged from,
                twice, so that the model also reads unusual token boundaries.
            infilling_share: share of the rows from text streams that are taken from their documents rearranged for
                fill-in-the-middle.

        Returns:
            Token ids, int64 [R, L + 1]: inputs and, shifted by one, targets.
        """
        generator = np.random.default_rng((seed, step))
        streams = generator.choice(len(STREAMS), size=rows, p=self._shares)
        infilling = (generator.random(rows) < infilling_share) & (streams < len(TEXT_STREAMS))
        streams = np.where(infilling, streams + len(STREAMS), streams)
        first = np.empty(rows, dtype=np.int64)
        for row, stream in enumerate(streams):
            limit = max(1, self._lengths[stream] - length - 1)
            if generator.random() < start_share:
                starts = self._starts[stream]
                usable = max(1, int(np.searchsorted(starts, limit)))
                first[row] = starts[generator.integers(usable)]
            else:
                first[row] = generator.integers(limit)
            first[row] += self._offsets[stream]
        device = self._tokens.device
        index = _to_device(first, device)[:, None]
        index = (index + torch.arange(length + 1, device=device)).clamp_(max=self.num_tokens - 1)
        ids = self._tokens[index].long()
        if split > 0:
            device_generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
            for _ in range(2):
                ids[::2] = self._split(ids[::2], split, device_generator)
        return ids

    def _split(self, ids: Tensor, probability: float, generator: torch.Generator) -> Tensor:
        """Undo merges at random; tokens that no longer fit into the row are dropped at its end."""
        uniform = torch.rand(ids.shape, device=ids.device, generator=generator)
        chosen = (uniform < probability) & (self._left[ids] >= 0)
        position = torch.arange(ids.shape[1], device=ids.device) + chosen.cumsum(1) - chosen.long()
        wide = torch.zeros(ids.shape[0], 2 * ids.shape[1], dtype=ids.dtype, device=ids.device)
        wide.scatter_(1, position, torch.where(chosen, self._left[ids], ids))
        # Tokens that are not split write their right half to the spare last column.
        spare = wide.shape[1] - 1
        wide.scatter_(1, torch.where(chosen, position + 1, spare), self._right[ids].clamp(min=0))
        return wide[:, : ids.shape[1]]


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    # A copy from pageable memory would block until all queued work is done: 5 ms of every step.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _merge_parts(folder: Path) -> tuple[Tensor, Tensor]:
    """Return for each token the two that it was merged from, int64 [vocabulary], -1 for none."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    left = torch.full((len(vocabulary),), -1, dtype=torch.int64)
    right = left.clone()
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merged = vocabulary[first + second]
        left[merged], right[merged] = vocabulary[first], vocabulary[second]
    return left, right
