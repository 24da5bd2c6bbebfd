"""Draws the tokens of many rows on an accelerator, all rows at once and without waiting for the device.

Every result is bitwise independent of the other rows: what is computed per element or selected is exact, and
sums are taken over integers (see `WEIGHT_SCALE`), so no reduction order can show. Kernels draw where there are any
(`kernels.sampling.tokens`), PyTorch draws elsewhere and behind typical_p, both by the rules of `model.sampling.host`.
Knows no CUDA: its tests run it on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.tokens import (
    FILTERED,
    GREEDY,
    UNFILTERED,
    DrawRow,
    candidate_bounds,
    chosen_logprobs,
    draw_tokens,
    has_kernels,
    log_softmax,
)
from model.device.transfer import Download, upload
from model.sampling.parameters import NOT_FINITE, WEIGHT_SCALE, SampledToken, SamplingRow, uniform

# Candidates of a filtered row that PyTorch looks at first: sorting a whole vocabulary costs far more, and nucleus and
# top_k rarely reach further. Rows that do are found by the last candidate still being kept, and drawn again.
NUM_CANDIDATES = 1024

# Rows that PyTorch draws at once: several arrays of rows x vocabulary in 64 bits are what takes its memory.
_ROWS_AT_ONCE = 64

_ID_MASK = 0xFFFFFFFF
_ENTROPY_SCALE = 2.0**36
_BROKEN: Final = -1
_AGAIN: Final = -2


class DeviceDraw:
    """A token for each row, drawn without waiting for the device.

    Args:
        logits: [M, V] float32, bfloat16 or float16, contiguous in V. Not changed; must stay as it is until `result`
            unless the draw `feeds_next`.
        rows: M >= 1 rows.
        by_kernel: None has kernels draw where there are any.

    Attributes:
        tokens: [M] int64, valid ids; arbitrary for a row without a usable largest logit.
        feeds_next: whether `tokens` are final, and the host need not see them before the next ones are drawn: no row
            has penalties, which count tokens there, and none may have to be drawn again.
    """

    def __init__(
        self, logits: Tensor, rows: Sequence[SamplingRow], *, by_kernel: bool | None = None
    ) -> None:
        if by_kernel is None:
            by_kernel = has_kernels(logits.device)
        self._logits, self._rows = logits, rows
        self.tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        self._checked = torch.empty_like(self.tokens)
        as_they_are, changed, *others = _groups(rows, by_kernel=by_kernel)
        if as_they_are:
            self._draw_by_kernel(logits, as_they_are, as_they_are)
        if changed:
            self._draw_changed(changed)
        for group in others:
            self._draw_by_torch(group, NUM_CANDIDATES)
        # The last group is that of filters in PyTorch.
        self.feeds_next = not others[-1] and not any(row.has_penalties for row in rows)
        self._answers = Download(self._checked)
        self._wanted = [i for i, row in enumerate(rows) if row.wants_logprobs]
        self._logprobs = self._look_up_logprobs()

    def result(self) -> list[SampledToken]:
        """Wait for the tokens; twice where candidates ran out."""
        answers: list[int] = self._answers.read().tolist()
        again = [i for i, answer in enumerate(answers) if answer == _AGAIN]
        if again:
            self._draw_by_torch(again, self._logits.shape[1])
            answers = self._checked.tolist()
            self._logprobs = self._look_up_logprobs()
        tokens = [
            SampledToken(error=NOT_FINITE) if answer == _BROKEN else SampledToken(answer)
            for answer in answers
        ]
        if self._logprobs is not None:
            for i, values in zip(self._wanted, self._logprobs.read().tolist(), strict=True):
                tokens[i] = _with_logprobs(tokens[i], self._rows[i], values)
        return tokens

    def _draw_by_kernel(self, logits: Tensor, sources: Sequence[int], group: list[int]) -> None:
        """Draw the rows of a group from rows of logits."""
        size = logits.shape[1]
        draws = [
            draw_row(self._rows[i], source, i, size)
            for source, i in zip(sources, group, strict=True)
        ]
        (table,) = upload([np.array(draws, np.float64)], logits.device)
        draw_tokens(logits, draws, table, self.tokens, self._checked)

    def _draw_changed(self, group: list[int]) -> None:
        """Draw rows from a copy of their logits with penalties and bans applied."""
        at = _indices(group, self._logits.device)
        logits = self._logits[at].float()
        finite = logits.amax(-1).isfinite()  # a ban may hide what is not
        apply_penalties(logits, [self._rows[i] for i in group])
        self._draw_by_kernel(logits, range(len(group)), group)
        self._checked[at] = torch.where(finite, self._checked[at], _BROKEN)

    def _draw_by_torch(self, group: list[int], num_candidates: int) -> None:
        """Draw rows of one of PyTorch's groups, some at a time."""
        for start in range(0, len(group), _ROWS_AT_ONCE):
            self._draw_some(group[start : start + _ROWS_AT_ONCE], num_candidates)

    def _draw_some(self, group: list[int], num_candidates: int) -> None:
        at = _indices(group, self._logits.device)
        rows = [self._rows[i] for i in group]
        logits = self._logits[at].float()
        finite = logits.amax(-1).isfinite()
        apply_penalties(logits, rows)
        finite &= logits.amax(-1).isfinite()
        if rows[0].temperature == 0.0:
            chosen, exact = logits.argmax(-1), torch.ones_like(finite)
        else:
            chosen, exact = draw(logits, rows, num_candidates)
        self.tokens[at] = chosen
        checked = torch.where(exact, chosen, _AGAIN)
        self._checked[at] = torch.where(finite, checked, _BROKEN)

    def _look_up_logprobs(self) -> Download | None:
        """Send the host what `_with_logprobs` takes for each row that asks."""
        if not self._wanted:
            return None
        logits, tokens = self._logits, self.tokens
        if len(self._wanted) < len(self._rows):
            at = _indices(self._wanted, logits.device)
            logits, tokens = logits[at], tokens[at]
        count = min(max(self._rows[i].top_logprobs for i in self._wanted), logits.shape[1])
        if count == 0:
            return Download(chosen_logprobs(logits, tokens).double()[:, None])
        logits = logits.float()
        logprobs = log_softmax(logits)
        keys = _ranking_keys(logits.amax(-1, keepdim=True) - logits)
        top = keys.topk(count, dim=-1, largest=False, sorted=True).values & _ID_MASK
        drawn = logprobs.gather(1, tokens[:, None])
        # Float64 holds every id and every float32 exactly, so that one transfer brings them all.
        columns = (drawn, top, logprobs.gather(1, top))
        return Download(torch.cat([column.double() for column in columns], dim=1))


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], *, by_kernel: bool | None = None
) -> list[SampledToken]:
    """Choose one token for each row and wait for them; arguments as for `DeviceDraw`."""
    return DeviceDraw(logits, rows, by_kernel=by_kernel).result()


def _groups(rows: Sequence[SamplingRow], *, by_kernel: bool) -> list[list[int]]:
    """Sort rows by who draws them: kernels, the same from a copy, PyTorch greedily, unfiltered, filtered."""
    groups: list[list[int]] = [[], [], [], [], []]
    for i, row in enumerate(rows):
        if by_kernel and (row.temperature == 0.0 or row.typical_p == 1.0):
            groups[1 if row.banned or row.has_penalties else 0].append(i)
        elif row.temperature == 0.0:
            groups[2].append(i)
        else:
            groups[4 if row.is_filtered else 3].append(i)
    return groups


def _indices(rows: list[int], device: torch.device) -> Tensor:
    return upload([np.array(rows, np.int64)], device)[0]


def draw_row(row: SamplingRow, source: int, target: int, size: int) -> DrawRow:
    """Return what the kernels need to know of a row of `size` logits."""
    if row.temperature == 0.0:
        return DrawRow(source, target, GREEDY)
    number = uniform(row.seed, row.position)
    if not row.is_filtered:
        return DrawRow(source, target, UNFILTERED, number, row.inverse_temperature)
    top_k = row.top_k if row.top_k < size else 0
    bounds = candidate_bounds(size, top_k, row.top_p)
    return DrawRow(
        source, target, FILTERED, number, row.inverse_temperature,
        top_k, row.top_p, row.min_p_distance, *bounds,
    )  # fmt: skip


def _with_logprobs(token: SampledToken, row: SamplingRow, values: list[float]) -> SampledToken:
    """Add to a row's token: values are its log-probability, the likeliest ids, and their log-probabilities."""
    if token.token_id is None:
        return token
    count = len(values) // 2
    top = zip(values[1 : 1 + count], values[1 + count :], strict=True)
    likeliest = tuple((int(i), p) for i, p in list(top)[: row.top_logprobs] if math.isfinite(p))
    return SampledToken(token.token_id, values[0], likeliest)


def _ranking_keys(distances: Tensor) -> Tensor:
    """Return int64 keys [R, V], all distinct, that order by distance [R, V] float32 >= 0, then by id.

    The bits of a non-negative float sort like the float; the id goes below them.
    """
    ids = torch.arange(distances.shape[1], device=distances.device)
    return (distances.view(torch.int32).long() << 32) | ids


def apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties and bans in place, in the order of `model.sampling.host.apply_penalties`.

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
