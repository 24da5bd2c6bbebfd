"""Draws one row's token on the CPU with NumPy: the row alone, so its neighbours cannot change it.

NumPy because its calls cost a tenth of PyTorch's at these sizes and its sort uses the CPU's vectors: 10 us for
4096 keys, against 126 us for `torch.sort` (one core of an AMD EPYC with AVX-512). Knows one row, not the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.sampling.tokens import log_softmax
from model.sampling.parameters import NOT_FINITE, WEIGHT_SCALE, SampledToken, SamplingRow, uniform

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_POSITION_MASK = np.int64(0xFFFFFFFF)
# The entropy's sum p * d is at most 1 / e for a token: units of 2^-36 leave room for 2^22 tokens and more.
_ENTROPY_SCALE = 2.0**36


class HostSampler:
    """Owns the scratch memory of one row's draw, so that no step asks the system for fresh pages.

    Used by one thread at a time. What the buffers hold between calls has no meaning.
    """

    def __init__(self) -> None:
        self._resize(0)

    def _resize(self, size: int) -> None:
        self._distances = np.empty(size, np.float32)
        self._floats = np.empty(size, np.float32)
        self._weights = np.empty(size, np.int64)
        self._sums = np.empty(size, np.int64)
        self._keys = np.empty(size, np.int64)
        self._mask = np.empty(size, np.bool_)
        self._positions = np.arange(size, dtype=np.int64)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Choose one token for each row.

        Args:
            logits: [M, V] float32 on the CPU, contiguous.
            rows: M >= 1 rows.
        """
        array = logits.numpy()
        best = array.argmax(axis=1)  # NaN counts as the largest
        finite = np.isfinite(array[np.arange(len(array)), best])
        tokens: list[int | None] = best.tolist()
        plain = True
        for i, row in enumerate(rows):
            if not finite[i]:
                tokens[i] = None
            elif not row.is_argmax:
                tokens[i] = self.choose(array[i], row)
            plain = plain and not row.wants_logprobs
        results = [
            SampledToken(error=NOT_FINITE) if token is None else SampledToken(token)
            for token in tokens
        ]
        if plain:
            return results
        wanted = [i for i, row in enumerate(rows) if row.wants_logprobs and tokens[i] is not None]
        logprobs = log_softmax(logits if len(wanted) == len(rows) else logits[wanted]).numpy()
        for i, row_logprobs in zip(wanted, logprobs, strict=True):
            top = _most_likely(row_logprobs, rows[i].top_logprobs)
            token = results[i].token_id
            results[i] = SampledToken(token, float(row_logprobs[token]), top)
        return results

    def choose(self, logits: Floats, row: SamplingRow) -> int | None:
        """Return the token of one row, or None where its adjusted logits have no finite largest value.

        Args:
            logits: [V] float32, contiguous.
            row: how to choose.
        """
        if len(logits) != len(self._mask):
            self._resize(len(logits))
        # Huge logits, tiny temperatures and penalties may overflow to infinity: meant, and checked for below.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if row.banned or row.has_penalties:
                logits = apply_penalties(logits, row)
            best = int(logits.argmax())
            peak = logits[best]
            if not math.isfinite(peak):
                return None
            if row.temperature == 0.0:
                return best
            distances = np.subtract(peak, logits, out=self._distances)
            distances *= np.float32(row.inverse_temperature)
            return self._draw(distances, row)

    def _draw(self, distances: Floats, row: SamplingRow) -> int:
        """Draw a token from weights exp(-distance), by inverting their cumulative sum.

        Filters follow transformers' order: top_k, top_p, min_p, typical_p, each on what the one before has kept.

        Args:
            distances: [V] float32, >= 0: how far below the largest one each scaled logit is.
            row: filters, seed and position.
        """
        ids: Ints | None = None  # all, in their own order: nothing to gain from sorting
        if row.is_filtered:
            ids, cumulative = self._keep(distances, row)
        else:
            cumulative = self._weigh(distances).cumsum(out=self._sums)
        total = int(cumulative[-1])
        target = min(int(uniform(row.seed, row.position) * total), total - 1)
        index = int(cumulative.searchsorted(target, side="right"))
        return index if ids is None else int(ids[index])

    def _weigh(self, distances: Floats) -> Ints:
        weights = self._weights[: len(distances)]
        floats = np.negative(distances, out=self._floats[: len(distances)])
        np.exp(floats, out=floats)
        floats *= np.float32(WEIGHT_SCALE)
        np.copyto(weights, floats, casting="unsafe")
        return weights

    def _keep(self, distances: Floats, row: SamplingRow) -> tuple[Ints, Ints]:
        """Return the ids that the filters keep, most likely first, and the cumulative sum of their weights."""
        ids: Ints | None = None
        if 0 < row.top_k < len(distances):
            self._floats[:] = distances
            self._floats.partition(row.top_k - 1)
            last = self._floats[row.top_k - 1]
            ids = np.flatnonzero(np.less_equal(distances, last, out=self._mask))
            distances = distances[ids]
        weights = self._weigh(distances)
        total = int(weights.sum())
        # Tokens below this weight hold less than 1 - top_p together, so all of them lie outside the nucleus;
        # without them there are few left to sort. A weight of zero can never be drawn.
        least = max(int((1.0 - row.top_p) * total / len(weights)), 1)
        kept = np.greater_equal(weights, least, out=self._mask[: len(weights)])
        if row.min_p > 0.0:
            # Only shortens the tail, so it may come before the nucleus: `total` was summed over all.
            kept &= distances <= np.float32(row.min_p_distance)
        num_kept = int(np.count_nonzero(kept))
        # What is kept comes first when sorted: dropping a few from a flat row costs more than sorting them.
        if num_kept < 0.75 * len(weights):
            where = np.flatnonzero(kept)
            ids = where if ids is None else ids[where]
            distances = distances.take(where, out=self._floats[:num_kept], mode="clip")
            weights = weights[where]
        order = self._ascending(distances)[:num_kept]
        sums = self._sums[:num_kept]
        weights.take(order, out=sums, mode="clip").cumsum(out=sums)
        if row.top_p < 1.0:
            end = int(sums.searchsorted(math.ceil(row.top_p * total))) + 1
            order, sums = order[:end], sums[:end]
        if row.typical_p < 1.0:
            order = self._typical(distances, weights, order, row.typical_p)
            sums = weights[order].cumsum()
        return (order if ids is None else ids[order]), sums

    def _ascending(self, values: Floats) -> Ints:
        """Return the positions of non-negative `values` in ascending order, equals by smaller position.

        The bits of a non-negative float sort like the float: with the position below them every key is distinct,
        and an unstable sort of integers, the fastest NumPy has, gives the stable order.

        Returns:
            A view of scratch memory, valid until the next call.
        """
        keys = self._keys[: len(values)]
        keys[:] = values.view(np.int32)
        keys <<= np.int64(32)
        keys |= self._positions[: len(values)]
        keys.sort()
        keys &= _POSITION_MASK
        return keys

    def _typical(self, distances: Floats, weights: Ints, order: Ints, mass: float) -> Ints:
        """Return those positions of `order` that are among the most typical ones holding `mass` of its weight.

        A token's surprise less the entropy is its distance less the mean distance: the logarithm of the sum of
        weights is in both and cancels.

        Source: Locally Typical Sampling (Meister et al. 2022).
        """
        order = order.copy()  # a view of the keys that are about to be overwritten
        distances, weights = distances[order], weights[order]
        total = int(weights.sum())
        products = (np.exp(-distances) * distances * np.float32(_ENTROPY_SCALE)).astype(np.int64)
        mean = int(products.sum()) * (WEIGHT_SCALE / _ENTROPY_SCALE) / total
        surprise = np.abs(distances - np.float32(mean))
        most_typical = self._ascending(surprise)
        last = int(weights[most_typical].cumsum().searchsorted(math.ceil(mass * total)))
        limit = surprise[most_typical[min(last, len(order) - 1)]]
        typical: Ints = order[surprise <= limit]
        return typical


def _most_likely(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` likeliest (id, log-probability), equals by smaller id; impossible tokens are left out."""
    if count <= 0:
        return ()
    count = min(count, len(logprobs))
    least = np.partition(logprobs, -count)[-count]
    ids = np.flatnonzero(logprobs >= max(least, np.finfo(np.float32).min))
    ids = ids[np.argsort(-logprobs[ids], kind="stable")][:count]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))


def apply_penalties(logits: Floats, row: SamplingRow) -> Floats:
    """Return a copy of the row with penalties and bans applied.

    Args:
        logits: [V] float32.
        row: repetition is applied first, then presence and frequency, then bans. Ids outside [0, V) are ignored.

    Source: repetition penalty of CTRL (Keskar et al. 2019); presence and frequency as in OpenAI's API.
    """
    logits = logits.copy()
    size = len(logits)
    if row.has_penalties:
        history = row.up_to_date_history()
        if row.repetition_penalty != 1.0:
            seen = history.seen_ids()
            seen = seen[seen < size]
            penalty = np.float32(row.repetition_penalty)
            values = logits[seen]
            logits[seen] = np.where(values < 0, values * penalty, values / penalty)
        ids, counts = history.output_ids()
        inside = ids < size
        logits[ids[inside]] -= (
            np.float32(row.presence_penalty) + np.float32(row.frequency_penalty) * counts[inside]
        )
    if row.banned:
        logits[[token_id for token_id in row.banned if 0 <= token_id < size]] = -np.inf
    return logits
