"""Samples the tokens of many rows on an accelerator, all rows at once and without waiting for the device.

Every result is bitwise independent of the other rows: elementwise operations and selections are exact, and sums are of
integers (see `WEIGHT_SCALE`), so the order of a reduction does not matter. Triton kernels (`kernels.sampling.tokens`)
sample on devices that support them; PyTorch samples on other devices and where typical_p is set. Both follow the rules
of `model.sampling.host`. This module does not depend on CUDA; the tests also run on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence, Set
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling.tokens import (
    FILTERED,
    GREEDY,
    UNFILTERED,
    WEIGHT_SCALE,
    SampleRow,
    candidate_bounds,
    chosen_logprobs,
    has_kernels,
    log_softmax,
    sample_tokens,
)
from model.device.transfer import Download, HostArray, upload
from model.sampling.logprobs import RANKING_ID_MASK, ranking_keys
from model.sampling.mask import WORD_BITS, build_masks
from model.sampling.noise import gumbel_noise, noise_keys
from model.sampling.parameters import SampledToken, SamplingParams, no_token_error
from model.sampling.rows import SamplingRow

# Candidates of a filtered row that PyTorch considers first: sorting a whole vocabulary takes far longer, and top_p and
# top_k rarely reach further. A row whose last candidate is kept is sampled again from the whole vocabulary.
NUM_CANDIDATES = 1024

# Rows that PyTorch samples at once: several arrays of rows x vocabulary in 64 bits dominate its memory.
_ROWS_AT_ONCE = 64

_ENTROPY_SCALE = 2.0**36
_KEPT_ROWS: Final = 1024
_GREEDY_ROW: Final = SampleRow(0, 0, 0, GREEDY)
_SOURCE, _TARGET, _MASK, _KIND = map(SampleRow._fields.index, ("source", "target", "mask", "kind"))
_NOISE: Final = [SampleRow._fields.index(name) for name in ("noise_low", "noise_high")]
_BROKEN: Final = -1
_AGAIN: Final = -2


class DeviceTokens:
    """A token for each row, sampled without waiting for the device.

    Args:
        logits: [M, V] float32, bfloat16 or float16, contiguous in V. Not changed here; the caller must not change it
            until `result` has returned, unless `feeds_next`.
        rows: M >= 1 rows.
        by_kernel: whether Triton kernels sample; None if the device supports them.

    Attributes:
        tokens: [M] int64, valid ids; arbitrary for a row without a finite largest logit.
        feeds_next: whether `tokens` are final and the next step can be launched before the host has read them: no row
            may have to be sampled again.
    """

    def __init__(
        self, logits: Tensor, rows: Sequence[SamplingRow], *, by_kernel: bool | None = None
    ) -> None:
        if by_kernel is None:
            by_kernel = has_kernels(logits.device)
        self._logits, self._rows = logits, rows
        self.tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        self._checked = torch.empty_like(self.tokens)
        size, device = logits.shape[1], logits.device
        bits, self._mask_of = build_masks(rows, size)
        unchanged, changed, *others = _groups(rows, by_kernel=by_kernel)
        tables = [
            kernel_table([rows[i] for i in group], sources, group, self._mask_of, size)
            for sources, group in ((unchanged, unchanged), (range(len(changed)), changed))
        ]
        arrays: list[HostArray] = [bits, *(table.columns for table in tables)]
        self._masks, *uploaded = upload(arrays, device)
        if unchanged:
            self._sample_by_kernel(logits, uploaded[0], tables[0].kinds)
        if changed:
            copies = logits[_indices(changed, device)].float()
            adjust_logits(copies, [rows[i] for i in changed])
            self._sample_by_kernel(copies, uploaded[1], tables[1].kinds)
        for group in others:
            self._sample_by_torch(group, NUM_CANDIDATES)
        # The last group holds the filtered rows that PyTorch samples, which may have to be sampled again.
        self.feeds_next = not others[-1]
        self._answers = Download(self._checked)
        self._wanted = [i for i, row in enumerate(rows) if row.parameters.wants_logprobs]
        self._logprobs = self._look_up_logprobs()

    def result(self) -> list[SampledToken]:
        """Wait for the tokens. Rows whose candidates did not suffice are sampled again, which waits a second time."""
        answers: list[int] = self._answers.read().tolist()
        again = [i for i, answer in enumerate(answers) if answer == _AGAIN]
        if again:
            self._sample_by_torch(again, self._logits.shape[1])
            answers = self._checked.tolist()
            self._logprobs = self._look_up_logprobs()
        tokens = [
            SampledToken(answer) if answer != _BROKEN else SampledToken(error=no_token_error(mask))
            for answer, mask in zip(answers, self._mask_of, strict=True)
        ]
        if self._logprobs is not None:
            for i, values in zip(self._wanted, self._logprobs.read().tolist(), strict=True):
                tokens[i] = _with_logprobs(tokens[i], self._rows[i], values)
        return tokens

    def _sample_by_kernel(self, logits: Tensor, table: Tensor, kinds: Set[int]) -> None:
        sample_tokens(logits, table, kinds, self._masks, self.tokens, self._checked)

    def _sample_by_torch(self, group: list[int], num_candidates: int) -> None:
        """Sample the rows of one of PyTorch's groups, `_ROWS_AT_ONCE` rows at a time."""
        for start in range(0, len(group), _ROWS_AT_ONCE):
            self._sample_some(group[start : start + _ROWS_AT_ONCE], num_candidates)

    def _sample_some(self, group: list[int], num_candidates: int) -> None:
        at = _indices(group, self._logits.device)
        rows = [self._rows[i] for i in group]
        logits = self._logits[at].float()
        adjust_logits(logits, rows)
        apply_masks(logits, self._masks, [self._mask_of[i] for i in group])
        finite = logits.amax(-1).isfinite()
        if rows[0].parameters.temperature == 0.0:
            chosen, exact = logits.argmax(-1), torch.ones_like(finite)
        else:
            chosen, exact = sample_rows(logits, rows, num_candidates)
        self.tokens[at] = chosen
        checked = torch.where(exact, chosen, _AGAIN)
        self._checked[at] = torch.where(finite, checked, _BROKEN)

    def _look_up_logprobs(self) -> Download | None:
        """Queue the download of the input of `_with_logprobs` for each row that reports log-probabilities."""
        if not self._wanted:
            return None
        logits, tokens = self._logits, self.tokens
        if len(self._wanted) < len(self._rows):
            at = _indices(self._wanted, logits.device)
            logits, tokens = logits[at], tokens[at]
        counts = [self._rows[i].parameters.top_logprobs for i in self._wanted]
        count = min(max(counts), logits.shape[1])
        chosen = None
        if min(counts) == 0:
            chosen = chosen_logprobs(logits, tokens)[:, None]
            if count == 0:
                return Download(chosen.double())
        logits = logits.float()
        logprobs = log_softmax(logits)
        keys = ranking_keys(logits.amax(-1, keepdim=True) - logits)
        top = keys.topk(count, dim=-1, largest=False, sorted=True).values & RANKING_ID_MASK
        sampled = logprobs.gather(1, tokens[:, None])
        if chosen is not None:
            # `chosen_logprobs` may round otherwise, and the bits of a row must not depend on what the others report.
            (has_top,) = upload([np.array(counts, np.int64)[:, None]], logits.device)
            sampled = torch.where(has_top > 0, sampled, chosen)
        # Float64 represents every id and every float32 exactly, so one transfer is enough.
        columns = (sampled, top, logprobs.gather(1, top))
        return Download(torch.cat([column.double() for column in columns], dim=1))


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], *, by_kernel: bool | None = None
) -> list[SampledToken]:
    """Choose one token for each row and wait for them; arguments as for `DeviceTokens`."""
    return DeviceTokens(logits, rows, by_kernel=by_kernel).result()


def _groups(rows: Sequence[SamplingRow], *, by_kernel: bool) -> list[list[int]]:
    """Group rows by how they are sampled.

    Returns:
        Five lists of row indices: kernels; kernels on changed logits; PyTorch greedy, unfiltered and filtered.
    """
    groups: list[list[int]] = [[], [], [], [], []]
    for i, row in enumerate(rows):
        parameters = row.parameters
        if by_kernel and (parameters.temperature == 0.0 or not parameters.has_host_filter):
            groups[1 if parameters.changes_logits else 0].append(i)
        elif parameters.temperature == 0.0:
            groups[2].append(i)
        else:
            groups[4 if parameters.is_filtered else 3].append(i)
    return groups


def _indices(rows: list[int], device: torch.device) -> Tensor:
    return upload([np.array(rows, np.int64)], device)[0]


class KernelTable(NamedTuple):
    """The table of the sampling kernels.

    Attributes:
        columns: [R, fields of `SampleRow`] float64.
        kinds: of the rows.
    """

    columns: npt.NDArray[np.float64]
    kinds: Set[int]


def kernel_table(
    rows: Sequence[SamplingRow],
    sources: Sequence[int],
    targets: Sequence[int],
    mask_of: Sequence[int],
    size: int,
) -> KernelTable:
    """Return the rows of the sampling kernels' table.

    Args:
        rows: how to sample R rows.
        sources: their rows of the logits.
        targets: their rows of the output.
        mask_of: index in the token masks of each row of the output; -1 for none.
        size: logits of a row.
    """
    if not rows:
        return KernelTable(np.empty((0, len(SampleRow._fields))), frozenset())
    fixed = [_fixed_columns(row.parameters, size) for row in rows]
    # Equal parameters have the same object, and few requests have parameters of their own.
    distinct = {id(it): it for it in fixed}
    numbers = {identity: number for number, identity in enumerate(distinct)}
    columns = np.array(list(distinct.values()), np.float64)[[numbers[id(it)] for it in fixed]]
    columns[:, _SOURCE], columns[:, _TARGET] = sources, targets
    columns[:, _MASK] = [mask_of[target] for target in targets]
    kinds = {it.kind for it in distinct.values()}
    if kinds != {GREEDY}:
        keys = noise_keys([row.parameters.seed for row in rows], [row.position for row in rows])
        columns[:, _NOISE] = np.where(columns[:, _KIND] == GREEDY, 0, keys).T
    return KernelTable(columns, kinds)


def _fixed_columns(parameters: SamplingParams, size: int) -> SampleRow:
    """Return the columns of a row that follow from its parameters; the others are 0."""
    if parameters.temperature == 0.0:
        return _GREEDY_ROW
    if not parameters.is_filtered:
        return _unfiltered_row(parameters.inverse_temperature)
    return _filtered_row(size, parameters.kernel_columns)


@functools.lru_cache(_KEPT_ROWS)
def _unfiltered_row(scale: float) -> SampleRow:
    return SampleRow(0, 0, 0, UNFILTERED, inverse_temperature=scale)


@functools.lru_cache(_KEPT_ROWS)
def _filtered_row(size: int, columns: tuple[float, ...]) -> SampleRow:
    scale, top_k, top_p, *others = columns
    top_k = int(top_k) if top_k < size else 0
    bounds = candidate_bounds(size, top_k, top_p)
    return SampleRow._make((0, 0, 0, FILTERED, 0, 0, scale, top_k, top_p, *others, *bounds))


def _with_logprobs(token: SampledToken, row: SamplingRow, values: list[float]) -> SampledToken:
    """Add log-probabilities to a token: values are its own, the ids of the most likely tokens, and theirs."""
    if token.token_id is None:
        return token
    count = len(values) // 2
    pairs = zip(values[1 : 1 + count], values[1 + count :], strict=True)
    wanted = list(pairs)[: row.parameters.top_logprobs]
    top = tuple((int(i), logprob) for i, logprob in wanted if math.isfinite(logprob))
    return SampledToken(token.token_id, values[0], top)


def adjust_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply biases and penalties in place, in the order of `model.sampling.host.adjust_logits`.

    Args:
        logits: [R, V] float32.
        rows: R rows. Ids outside [0, V) are ignored.
    """
    biased, repeated, counted = _Changes(), _Changes(), _Changes()
    for i, row in enumerate(rows):
        parameters = row.parameters
        if bias := parameters.logit_bias:
            biased.add(i, np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), float))
        if not parameters.has_penalties:
            continue
        if parameters.repetition_penalty != 1.0:
            repeated.add(i, row.history.seen_ids(), parameters.repetition_penalty)
        ids, counts = row.history.output_counts()
        presence, frequency = parameters.presence_penalty, parameters.frequency_penalty
        counted.add(i, ids, presence + frequency * counts)
    if biased:
        at, amounts = biased.upload(logits)
        logits[at] += amounts
    if repeated:
        at, penalties = repeated.upload(logits)
        values = logits[at]
        logits[at] = torch.where(values < 0, values * penalties, values / penalties)
    if counted:
        at, penalties = counted.upload(logits)
        logits[at] -= penalties


class _Changes:
    """Amounts by which single logits of some rows change."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.float64]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(
        self, row: int, ids: npt.NDArray[np.int64], amounts: npt.NDArray[np.floating] | float
    ) -> None:
        """Add the changes of one row; ids and amounts [n], or one amount for all."""
        part = np.empty((len(ids), 3))
        part[:, 0], part[:, 1], part[:, 2] = row, ids, amounts
        self._parts.append(part)

    def upload(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return (rows [n], ids [n]) int64, without ids from V on, and amounts [n] float32 for `logits` [R, V]."""
        parts = np.concatenate(self._parts)
        (table,) = upload([parts[parts[:, 1] < logits.shape[1]]], logits.device)
        return (table[:, 0].long(), table[:, 1].long()), table[:, 2].float()


def apply_masks(logits: Tensor, masks: Tensor, of_rows: Sequence[int]) -> None:
    """Set the logits of banned tokens to minus infinity in place; NaN and plus infinity stay, so that the row fails.

    Args:
        logits: [R, V] float32.
        masks: [K, ceil(V / 32)] int32, as in `model.sampling.mask.TokenMasks`.
        of_rows: R indices of masks; -1 for none.
    """
    masked = [row for row, mask in enumerate(of_rows) if mask >= 0]
    if not masked:
        return
    at = _indices(masked, logits.device)
    words = masks[_indices([of_rows[row] for row in masked], logits.device)]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    banned = ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    values = logits[at]
    logits[at] = values.masked_fill(banned & (values < torch.inf), -torch.inf)


def sample_rows(
    logits: Tensor, rows: Sequence[SamplingRow], num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row in PyTorch.

    Args:
        logits: [R, V] float32, biases, penalties and masks applied.
        rows: R rows, each with a temperature above 0; either all are filtered or none is.
        num_candidates: number of most likely tokens of a filtered row that are considered; V for all.

    Returns:
        Token ids [R] int64, and [R] bool: whether the filters kept only candidates, so that sampling from the whole
        vocabulary gives the same token. Rows without a finite largest logit get an arbitrary valid id.
    """
    *key, top_k, top_p, min_p_distance, typical_p, inverse_temperature = _parameters(rows, logits)
    distances = (logits.amax(-1, keepdim=True) - logits) * inverse_temperature.float()
    if not rows[0].parameters.is_filtered:
        all_ids = torch.arange(logits.shape[1], device=logits.device)
        chosen = (gumbel_noise(all_ids, *key) - distances).argmax(-1)
        return chosen, torch.ones_like(chosen, dtype=torch.bool)

    weights = (torch.exp(-distances) * WEIGHT_SCALE).long()
    keys = ranking_keys(distances)
    complete = num_candidates >= logits.shape[1]
    keys = (
        keys.sort(dim=-1).values
        if complete
        else keys.topk(num_candidates, dim=-1, largest=False, sorted=True).values
    )
    ids = keys & RANKING_ID_MASK
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
    if any(row.parameters.typical_p < 1.0 for row in rows):
        keep = _typical(distances, weights * keep, typical_p)
    sums = (gumbel_noise(ids, *key) - distances).masked_fill(~keep, -torch.inf)
    best = sums == sums.amax(-1, keepdim=True)
    # A row of NaN has no best token; its id must still be valid.
    chosen = ids.masked_fill(~best, logits.shape[1] - 1).amin(-1)
    return chosen, exact


def _parameters(rows: Sequence[SamplingRow], logits: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters that `sample_rows` needs, each [R, 1] float64, in one transfer."""
    keys = noise_keys([row.parameters.seed for row in rows], [row.position for row in rows])
    table = [
        (
            low,
            high,
            min(row.parameters.top_k, logits.shape[1]),
            # A mass of 1 never cuts: rounding the integer total to a float must not drop a token.
            row.parameters.top_p if row.parameters.top_p < 1.0 else 2.0,
            row.parameters.min_p_distance,
            row.parameters.typical_p if row.parameters.typical_p < 1.0 else 2.0,
            row.parameters.inverse_temperature,
        )
        for row, low, high in zip(rows, *keys.tolist(), strict=True)
    ]
    return upload([np.array(table, np.float64)], logits.device)[0][:, :, None].unbind(1)


def _typical(distances: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return a bool mask [R, C] of the most typical tokens that hold `mass` [R, 1]; tokens of weight 0 are excluded."""
    kept = weights > 0
    total = weights.sum(-1, keepdim=True)
    products = (torch.exp(-distances) * distances * _ENTROPY_SCALE).masked_fill(~kept, 0.0).long()
    mean = products.sum(-1, keepdim=True).double() * (WEIGHT_SCALE / _ENTROPY_SCALE) / total
    surprise = (distances - mean.float()).abs().masked_fill(~kept, torch.inf)
    ordered, order = surprise.sort(dim=-1, stable=True)
    below = weights.gather(1, order).cumsum(-1) < mass * total
    last = below.sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return kept & (surprise <= ordered.gather(1, last))
