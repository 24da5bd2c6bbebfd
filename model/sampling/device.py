"""Samples the tokens of many rows on a GPU, all rows at once and without waiting for the device.

Every result is bitwise independent of the other rows: elementwise operations and selections are exact, and sums are of
integers, so the order of a reduction does not matter. The kernels (`kernels.sampling.tokens`) follow the rules of
`model.sampling.host`.
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
    SampleRow,
    candidate_bounds,
    chosen_logprobs,
    log_softmax,
    sample_tokens,
)
from model.device.transfer import Download, HostArray, upload
from model.sampling.device_masks import DeviceMasks
from model.sampling.logprobs import RANKING_ID_MASK, ranking_keys
from model.sampling.mask import WORD_BITS, RowMasks, build_masks
from model.sampling.noise import noise_keys
from model.sampling.parameters import SampledToken, SamplingParams, no_token_error
from model.sampling.rows import SamplingRow

_KEPT_ROWS: Final = 1024
_GREEDY_ROW: Final = SampleRow(0, 0, 0, GREEDY)
_SOURCE, _TARGET, _MASK, _KIND = map(SampleRow._fields.index, ("source", "target", "mask", "kind"))
_NOISE: Final = [SampleRow._fields.index(name) for name in ("noise_low", "noise_high")]
_BROKEN: Final = -1
_NO_MASKS: Final = np.empty((0, 0), np.int32)


class SampleTables:
    """The tables of a step's rows, which can be made before the tokens and the masks of these rows are known.

    Args:
        rows: M >= 1 rows.
        size: logits of a row.
    """

    def __init__(self, rows: Sequence[SamplingRow], size: int) -> None:
        self._rows, self._size = rows, size

    @functools.cached_property
    def tables(self) -> list[tuple[list[int], KernelTable]]:
        """The rows whose logits stay and those whose logits change, each with a table whose masks are not set."""
        unchanged: list[int] = []
        changed: list[int] = []
        for i, row in enumerate(self._rows):
            (changed if row.parameters.changes_logits else unchanged).append(i)
        found = []
        for group, sources in ((unchanged, unchanged), (changed, range(len(changed)))):
            rows = [self._rows[i] for i in group]
            found.append((group, kernel_table(rows, sources, group, None, self._size)))
        return found

    def prepare(self) -> None:
        """Make the tables."""
        self.tables  # noqa: B018 - computed when it is read first


class DeviceTokens:
    """A token for each row, sampled without waiting for the device; needs `kernels.sampling.tokens.has_kernels`.

    Args:
        logits: [M, V] float32, bfloat16 or float16, contiguous in V. Not changed.
        rows: M >= 1 rows.
        of_grammars: the masks of their grammars; None if no row has one.
        prepared: the tables of the rows; None to make them.

    Attributes:
        tokens: [M] int64, valid ids; arbitrary for a row without a finite largest logit.
    """

    feeds_next = True

    def __init__(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        of_grammars: RowMasks | None = None,
        prepared: SampleTables | None = None,
    ) -> None:
        self._logits, self._rows = logits, rows
        self.tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        checked = torch.empty_like(self.tokens)
        size, device = logits.shape[1], logits.device
        kept: DeviceMasks | None = None
        if of_grammars is not None and not any(row.parameters.bans_tokens for row in rows):
            kept = of_grammars.masks if isinstance(of_grammars.masks, DeviceMasks) else None
        bits: HostArray
        if kept is not None and of_grammars is not None:
            bits, self._mask_of = _NO_MASKS, list(of_grammars.slots)
        else:
            bits, self._mask_of = build_masks(rows, size, of_grammars)
        (unchanged, plain), (changed, adjusted) = (prepared or SampleTables(rows, size)).tables
        arrays: list[HostArray] = [bits]
        mask_of = np.array(self._mask_of)
        for group, table in ((unchanged, plain), (changed, adjusted)):
            table.columns[:, _MASK] = mask_of[group]
            arrays.append(table.columns)
        masks, *uploaded = upload(arrays, device)
        if kept is not None:
            masks = kept.send(-(-size // WORD_BITS))
        if unchanged:
            sample_tokens(logits, uploaded[0], plain.kinds, masks, self.tokens, checked)
        if changed:
            copies = logits[_indices(changed, device)].float()
            adjust_logits(copies, [rows[i] for i in changed])
            sample_tokens(copies, uploaded[1], adjusted.kinds, masks, self.tokens, checked)
        if kept is not None:
            kept.note_read()
        self._answers = Download(checked)
        self._wanted = [i for i, row in enumerate(rows) if row.parameters.wants_logprobs]
        self._logprobs = self._look_up_logprobs()

    def result(self) -> list[SampledToken]:
        """Wait for the tokens."""
        answers: list[int] = self._answers.read().tolist()
        tokens = [
            SampledToken(answer) if answer != _BROKEN else SampledToken(error=no_token_error(mask))
            for answer, mask in zip(answers, self._mask_of, strict=True)
        ]
        if self._logprobs is not None:
            for i, values in zip(self._wanted, self._logprobs.read().tolist(), strict=True):
                tokens[i] = _with_logprobs(tokens[i], self._rows[i], values)
        return tokens

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
    mask_of: Sequence[int] | None,
    size: int,
) -> KernelTable:
    """Return the rows of the sampling kernels' table.

    Args:
        rows: how to sample R rows.
        sources: their rows of the logits.
        targets: their rows of the output.
        mask_of: index in the token masks of each row of the output; -1 for none. None leaves the column open.
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
    if mask_of is not None:
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
