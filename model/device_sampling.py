"""Draws the tokens of many rows on an accelerator, all rows at once and without waiting for the device.

Every result is bitwise independent of the other rows: what is computed per element or selected is exact, and
sums are taken over integers (see `WEIGHT_SCALE`), so no reduction order can show. Knows no CUDA: it runs on any
PyTorch device, and its tests run it on the CPU beside `model.host_sampling`, whose rules it follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.logprobs import log_softmax
from model.sampling import NOT_FINITE, WEIGHT_SCALE, SampledToken, SamplingRow, uniform
from model.transfer import Download, upload

# Candidates of a filtered row that are looked at first: sorting a whole vocabulary costs far more, and nucleus and
# top_k rarely reach further. Rows that do are found by the last candidate still being kept, and drawn again.
NUM_CANDIDATES = 1024

_ID_MASK = 0xFFFFFFFF
_ENTROPY_SCALE = 2.0**36


class DeviceDraw:
    """A token for each row, drawn without waiting for the device.

    Args:
        logits: [M, V] float32, contiguous. Not changed; must stay as it is until `result` where a row is not
            `is_drawn_at_once`.
        rows: M >= 1 rows.

    Attributes:
        tokens: [M] int64; an arbitrary valid id for a row without a usable largest logit. Final for rows that are
            `is_drawn_at_once`.
    """

    def __init__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        self._logits, self._rows = logits, rows
        self.tokens = logits.argmax(-1)  # NaN counts as the largest
        finite = logits.gather(1, self.tokens[:, None])[:, 0].isfinite()
        exact = torch.ones_like(finite)
        for group in _groups(rows):
            at = _indices(group, logits.device)
            chosen, group_finite, exact[at] = _choose(
                logits[at], [rows[i] for i in group], NUM_CANDIDATES
            )
            self.tokens[at] = chosen
            finite[at] &= group_finite
        self._table = Download(_tabulate(logits, rows, self.tokens, finite, exact))

    def result(self) -> list[SampledToken]:
        """Wait for the tokens; twice where candidates ran out."""
        table: list[list[float]] = self._table.read().tolist()
        again = [i for i, values in enumerate(table) if values[1] and not values[2]]
        if again:
            at = _indices(again, self._logits.device)
            rows = [self._rows[i] for i in again]
            chosen = _choose(self._logits[at], rows, self._logits.shape[1])
            redrawn = _tabulate(self._logits[at], rows, *chosen).tolist()
            for i, values in zip(again, redrawn, strict=True):
                table[i] = values
        return [_from_table(row, values) for row, values in zip(self._rows, table, strict=True)]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token for each row and wait for them; arguments as for `DeviceDraw`."""
    return DeviceDraw(logits, rows).result()


def _groups(rows: Sequence[SamplingRow]) -> list[list[int]]:
    """Return the rows that need more than an argmax: greedy ones, unfiltered and filtered ones."""
    groups: list[list[int]] = [[], [], []]
    for i, row in enumerate(rows):
        if row.temperature > 0.0:
            groups[2 if row.is_filtered else 1].append(i)
        elif not row.is_argmax:
            groups[0].append(i)
    return [group for group in groups if group]


def _indices(rows: list[int], device: torch.device) -> Tensor:
    return upload([np.array(rows, np.int64)], device)[0]


def _choose(
    logits: Tensor, rows: Sequence[SamplingRow], num_candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [R] int64, whether each row is finite [R], and whether its draw is final [R].

    Args:
        logits: [R, V] float32; overwritten.
        rows: one of the groups of `_groups`.
        num_candidates: see `draw`.
    """
    apply_penalties(logits, rows)
    finite = logits.amax(-1).isfinite()
    if rows[0].temperature == 0.0:
        return logits.argmax(-1), finite, torch.ones_like(finite)
    tokens, exact = draw(logits, rows, num_candidates)
    return tokens, finite, exact


def _tabulate(
    logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor, finite: Tensor, exact: Tensor
) -> Tensor:
    """Return for each row: token, finite, exact and, where any row asks, log-probability, top ids, theirs.

    [R, 3 or more] float64, which holds every id and every float32 exactly, so that one transfer brings them all.
    """
    columns = [tokens[:, None], finite[:, None], exact[:, None]]
    if any(row.wants_logprobs for row in rows):
        count = min(max(row.top_logprobs for row in rows), logits.shape[1])
        logprobs = log_softmax(logits)
        keys = _ranking_keys(logits.amax(-1, keepdim=True) - logits)
        top = keys.topk(count, dim=-1, largest=False, sorted=True).values & _ID_MASK
        columns += [logprobs.gather(1, tokens[:, None]), top, logprobs.gather(1, top)]
    return torch.cat([column.double() for column in columns], dim=1)


def _from_table(row: SamplingRow, values: list[float]) -> SampledToken:
    token_id, finite, _, *logprobs = values
    if not finite:
        return SampledToken(error=NOT_FINITE)
    if not row.wants_logprobs:
        return SampledToken(int(token_id))
    count = len(logprobs) // 2
    top = zip(logprobs[1 : 1 + count], logprobs[1 + count :], strict=True)
    likeliest = tuple((int(i), p) for i, p in list(top)[: row.top_logprobs] if math.isfinite(p))
    return SampledToken(int(token_id), logprobs[0], likeliest)


def _ranking_keys(distances: Tensor) -> Tensor:
    """Return int64 keys [R, V], all distinct, that order by distance [R, V] float32 >= 0, then by id.

    The bits of a non-negative float sort like the float; the id goes below them.
    """
    ids = torch.arange(distances.shape[1], device=distances.device)
    return (distances.view(torch.int32).long() << 32) | ids


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties and bans in place, in the order of `model.host_sampling.apply_penalties`.

    Args:
        logits: [R, V] float32.
        rows: R rows. Ids outside [0, V) are ignored.
    """
    repeated: list[tuple[int, int, float]] = []
    counted: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        if row.has_penalties:
            history = row.up_to_date_history()
            if row.repetition_penalty != 1.0:
                repeated += [(i, t, row.repetition_penalty) for t in history.seen_ids().tolist()]
            presence, frequency = row.presence_penalty, row.frequency_penalty
            counted += [(i, t, presence + frequency * n) for t, n in history.counts.items()]
        banned += [(i, t, -torch.inf) for t in row.banned]
    if repeated:
        at, penalties = _scatter_table(repeated, logits)
        values = logits[at]
        logits[at] = torch.where(values < 0, values * penalties, values / penalties)
    if counted:
        at, penalties = _scatter_table(counted, logits)
        logits[at] -= penalties
    if banned:
        at, penalties = _scatter_table(banned, logits)
        logits[at] = penalties


def _scatter_table(
    entries: list[tuple[int, int, float]], logits: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return (rows [n], ids [n]) int64 and amounts [n] float32 on the device of `logits` [R, V]."""
    inside = [entry for entry in entries if 0 <= entry[1] < logits.shape[1]]
    (table,) = upload([np.array(inside, np.float64).reshape(-1, 3)], logits.device)
    return (table[:, 0].long(), table[:, 1].long()), table[:, 2].float()


def draw(logits: Tensor, rows: Sequence[SamplingRow], num_candidates: int) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: [R, V] float32, penalties applied.
        rows: R rows, each with a temperature above 0; either all are filtered or none is.
        num_candidates: how many of the most likely tokens of a filtered row are looked at; V for all.

    Returns:
        Token ids [R] int64, and [R] bool: whether the filters kept candidates only, so that the draw is the one
        that all tokens would have given. Rows without a finite largest logit get an arbitrary valid id.
    """
    u, top_k, top_p, min_p_distance, typical_p, inverse_temperature = _parameters(rows, logits)
    distances = (logits.amax(-1, keepdim=True) - logits) * inverse_temperature.float()
    weights = (torch.exp(-distances) * WEIGHT_SCALE).long()
    if not rows[0].is_filtered:
        return _invert(weights, u)[:, 0], torch.ones_like(u[:, 0], dtype=torch.bool)

    keys = _ranking_keys(distances)
    complete = num_candidates >= logits.shape[1]
    keys = (
        keys.sort(dim=-1).values
        if complete
        else keys.topk(num_candidates, dim=-1, largest=False, sorted=True).values
    )
    ids = keys & _ID_MASK
    distances = (keys >> 32).int().view(torch.float32)
    total = weights.sum(-1, keepdim=True)
    weights = weights.gather(1, ids)

    last = distances.gather(1, (top_k.long() - 1).clamp(0, ids.shape[1] - 1))
    keep = (distances <= last) | (top_k == 0)
    total = torch.where(top_k == 0, total, (weights * keep).sum(-1, keepdim=True))
    above = weights.cumsum(-1) - weights
    keep &= (above < top_p * total) & (distances <= min_p_distance.float()) & (weights > 0)
    exact = torch.ones_like(keep[:, 0])
    if not complete:
        exact = ~keep[:, -1] & (top_k[:, 0] <= num_candidates)
    if any(row.typical_p < 1.0 for row in rows):
        keep = _typical(distances, weights * keep, typical_p)
    return ids.gather(1, _invert(weights * keep, u))[:, 0], exact


def _parameters(rows: Sequence[SamplingRow], logits: Tensor) -> tuple[Tensor, ...]:
    """Return what `draw` needs of the rows, each [R, 1] float64, in one transfer."""
    table = np.array(
        [
            (
                uniform(row.seed, row.position),
                min(row.top_k, logits.shape[1]),
                # A mass of 1 never cuts: rounding the integer total to a float must not drop a token.
                row.top_p if row.top_p < 1.0 else 2.0,
                row.min_p_distance,
                row.typical_p if row.typical_p < 1.0 else 2.0,
                row.inverse_temperature,
            )
            for row in rows
        ],
        np.float64,
    )
    return upload([table], logits.device)[0][:, :, None].unbind(1)


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first position [R, 1] whose cumulative weight exceeds the fraction `u` [R, 1] of the total."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum((u * total).long(), total - 1)
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp(max=weights.shape[1] - 1)  # a row of NaN must not index past its end


def _typical(distances: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return which tokens [R, C] are the most typical ones holding `mass` [R, 1]; weight 0 is cut off already."""
    kept = weights > 0
    total = weights.sum(-1, keepdim=True)
    products = (torch.exp(-distances) * distances * _ENTROPY_SCALE).masked_fill(~kept, 0.0).long()
    mean = products.sum(-1, keepdim=True).double() * (WEIGHT_SCALE / _ENTROPY_SCALE) / total
    surprise = (distances - mean.float()).abs().masked_fill(~kept, torch.inf)
    ordered, order = surprise.sort(dim=-1, stable=True)
    below = weights.gather(1, order).cumsum(-1) < mass * total
    last = below.sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return kept & (surprise <= ordered.gather(1, last))
