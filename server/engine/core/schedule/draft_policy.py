"""Decides how many proposed tokens a step computes: as many as make the tokens of a second more."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from server.engine.core.schedule.draft import Drafter
from server.engine.core.schedule.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import DecodeRows

_FIRST_ACCEPTANCE: Final = (0.3, 0.45, 0.6, 0.75, 0.9)
"""Share of the proposed tokens that are right, by the length of the match, before any was computed."""
_RATE: Final = 0.02
"""Weight of a token in the service's shares."""
_PRIOR: Final = 3.0
"""Tokens as which the service's share counts beside those of a sequence itself."""
_MEMORY: Final = 0.95
"""What a token of a sequence's share counts after the next one."""
_LEAST_GAIN: Final = 1.02
"""Tokens per second with drafts, relative to those without, from which on drafts are used."""
_BEST_RATE: Final = 0.9
"""Share of right tokens at which drafts must be able to pay, for sequences to be looked at at all."""
_PROBE: Final = 32
"""Tokens after which a sequence whose drafts do not pay gets a draft of one token, since its text may have changed. The
next such draft comes after twice as many, up to `_MOST_WAITED`."""
_MOST_WAITED: Final = 16 * _PROBE
_MOST_SKIPPED: Final = 7
"""Tokens that a sequence without drafts has at most before its text is looked at again; one at first, then three."""
_RENEWED: Final = 256
_RENEWED_YES: Final = 16
"""Steps after which `_may_pay` asks again for a number of sequences: those without drafts cost nothing."""


class _Record:
    """How often the drafts of a sequence were right.

    Attributes:
        accepted, proposed: tokens, of late more than before.
        match_class, is_predicted, num_tokens: of the last draft.
        num_accepted: the account's accepted tokens before it.
        probe_at: output tokens at which a draft is due whether it pays or not.
        wait: tokens between the last such draft and that one.
        look_at: known output tokens from which on its text is looked at again.
        skipped: tokens that were skipped before that.
    """

    __slots__ = (
        "accepted", "is_predicted", "look_at", "match_class", "num_accepted", "num_tokens", "probe_at", "proposed",
        "skipped", "wait",
    )  # fmt: skip

    def __init__(self) -> None:
        self.accepted = self.proposed = 0.0
        self.match_class = self.num_tokens = self.num_accepted = 0
        self.probe_at = self.wait = _PROBE
        self.look_at = self.skipped = 0
        self.is_predicted = False

    def skip(self, num_output_tokens: int) -> None:
        """Note that the sequence gets no draft: its text is looked at more and more rarely."""
        self.skipped = min(2 * self.skipped + 1, _MOST_SKIPPED)
        self.look_at = num_output_tokens + self.skipped

    def use(self, num_output_tokens: int) -> None:
        """Note that the sequence gets a draft that pays."""
        self.skipped, self.wait = 0, _PROBE
        self.probe_at = num_output_tokens + _PROBE

    def probe(self, num_output_tokens: int) -> None:
        """Note that the sequence gets a draft although it does not pay; the next one comes later."""
        self.wait = min(2 * self.wait, _MOST_WAITED)
        self.probe_at = num_output_tokens + self.wait


class StepKind:
    """Steps that compute the rows of a draft with the bits of steps without.

    Attributes:
        costs: of such steps.
        most_tokens: of such a step, with drafts.

    Args:
        most_tokens: see above.
        pads: see `DraftPolicy`; None if each token is a row, and the number of rows a power of two.
    """

    def __init__(self, most_tokens: int, *, pads: bool | None) -> None:
        self.costs = StepCosts(most_tokens)
        self.most_tokens, self._pads = most_tokens, pads

    def size(self, num_rows: int, num_tokens: int, longest: int) -> int:
        """Return how many tokens a step is computed as."""
        if self._pads is None:
            return 1 << (num_tokens - 1).bit_length()
        if not self._pads or longest == 1:
            return num_tokens
        return num_rows << (longest - 1).bit_length()

    def seconds(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """Return how long a step takes; 0 if none was measured."""
        return self.costs.seconds(self.size(num_rows, num_tokens, longest))


class DraftPolicy:
    """Chooses the drafts of a step's decode rows.

    The acceptance rate of a proposed token follows from the drafts before it: those of the sequence and, by the length
    of the match, those of all sequences. A step with n tokens takes the time that such steps took. Tokens are added in
    the order of the probability that they are accepted, as long as the step's tokens per second grow. Sequences get
    drafts where these change no bit: deterministic ones, and all in steps of at most `exact_rows` tokens.

    Attributes:
        drafter: proposes the tokens; may be replaced.
        most: tokens of a draft; 0 switches drafts off.
        kinds: steps of deterministic sequences, others, and steps of deterministic sequences of which some have
            adapters, whose tokens cost more.
        most_in_step: returns how many tokens the drafts of a step may have in all; may be replaced.
        has_exact_rows: returns whether the others have the bits that `exact_rows` of the limits promises; may be
            replaced.

    Args:
        limits: of a step.
        drafter: see above.
        pads: whether a step is computed as one whose rows all have the tokens of the longest, rounded up to a power of
            two, as recorded steps are.
    """

    def __init__(self, limits: SchedulerConfig, drafter: Drafter, *, pads: bool = False) -> None:
        self.most = limits.max_queries - 1
        self.drafter = drafter
        self._deterministic = StepKind(limits.max_logits, pads=pads)
        self._exact = StepKind(min(limits.exact_rows, limits.max_num_batched_tokens), pads=None)
        self.has_exact_rows: Callable[[], bool] = lambda: True
        self.most_in_step: Callable[[], int] = lambda: limits.max_logits
        self._adapted = StepKind(limits.max_logits, pads=pads)
        self.kinds = self._deterministic, self._exact, self._adapted
        self._acceptance = list(_FIRST_ACCEPTANCE)
        self._records: dict[Sequence, _Record] = {}
        self._pays: dict[tuple[StepKind, int], tuple[int, bool]] = {}
        self._num_asked = 0

    def choose(
        self, sequences: TypingSequence[Sequence], num_sampling: int | None = None
    ) -> list[tuple[int, ...]] | None:
        """Return the drafts of the rows of a step that sample; None if none has one.

        A row whose token is in flight has none.

        Args:
            sequences: of all decode rows.
            num_sampling: the first of them, which sample; None if all do.
        """
        return self._choose(self._usable_kind(sequences), sequences[:num_sampling], num_ahead=0)

    def expects(self, sequences: TypingSequence[Sequence]) -> bool:
        """Return whether drafts will probably pay once a token in flight of each of the sequences is known."""
        return self._choose(self._usable_kind(sequences), sequences, num_ahead=1) is not None

    def _choose(
        self, kind: StepKind | None, sequences: TypingSequence[Sequence], num_ahead: int
    ) -> list[tuple[int, ...]] | None:
        """Return drafts without their first tokens, which stand for so many tokens in flight."""
        if kind is None:
            return None
        self.drafter.begin_step()
        proposed: list[tuple[int, ...]] = [()] * len(sequences)
        rates: dict[int, float] = {}
        for row, sequence in enumerate(sequences):
            if kind is not self._exact and not sequence.deterministic:
                continue
            found = self._propose(sequence, num_ahead)
            if found is not None:
                proposed[row], rates[row] = found
        if not rates:
            return None
        counts = self._counts(kind, len(sequences), proposed, rates)
        for row in rates:
            sequence = sequences[row]
            record = self._records[sequence]
            if row in counts:
                record.use(sequence.num_output_tokens)
            elif record.probe_at <= sequence.num_output_tokens and self._has_room(
                kind, counts, proposed
            ):
                counts[row] = 1
                if not num_ahead:
                    record.probe(sequence.num_output_tokens)
            else:
                record.skip(sequence.num_output_tokens)
        if not counts:
            return None
        return [tokens[: counts.get(row, 0)] for row, tokens in enumerate(proposed)]

    def note_drafts(
        self, sequences: TypingSequence[Sequence], drafts: TypingSequence[tuple[int, ...]]
    ) -> None:
        """Note the drafts that a step was given."""
        for sequence, tokens in zip(sequences, drafts, strict=False):
            record = self._records.get(sequence)
            if tokens and record is not None:
                record.num_tokens = len(tokens)
                record.num_accepted = sequence.account.num_accepted_tokens
                sequence.account.draft_is_predicted = record.is_predicted

    def note_step(self, decode: DecodeRows, seconds: float) -> None:
        """Enter the time of a step without prompts, unless it says nothing about steps that may have drafts."""
        batch = decode.batch
        kind = self._kind(deterministic=batch.deterministic, adapted=batch.has_adapters)
        if kind is self._exact and not _is_one_launch(decode):
            return
        longest = 1 if decode.drafts is None else 1 + max(map(len, decode.drafts))
        if decode.num_tokens <= kind.most_tokens:
            kind.costs.note(kind.size(len(decode), decode.num_tokens, longest), seconds)

    def forget_ended(self) -> None:
        """Drop the records of the sequences that have ended."""
        ended = [it for it in self._records if it.finish_reason is not None]
        for sequence in ended:
            del self._records[sequence]
            self.drafter.forget(sequence)

    def _propose(self, sequence: Sequence, num_ahead: int) -> tuple[tuple[int, ...], float] | None:
        """Return a draft without its first tokens, and how probably one of its tokens is right; None for no draft."""
        limit = self._limit(sequence)
        if limit < 1 or sequence.num_tokens_in_flight > num_ahead:
            return None
        record = self._record(sequence)
        if sequence.num_output_tokens < record.look_at:
            return None
        draft = self.drafter.propose(sequence, limit + num_ahead)
        if len(draft.tokens) <= num_ahead:
            record.skip(sequence.num_output_tokens)
            if not num_ahead and record.probe_at <= sequence.num_output_tokens:
                record.probe(sequence.num_output_tokens)
            return None
        record.match_class, record.is_predicted = draft.match_class, draft.is_predicted
        prior = self._acceptance[draft.match_class]
        rate = (record.accepted + _PRIOR * prior) / (record.proposed + _PRIOR)
        return draft.tokens[num_ahead : num_ahead + limit], rate

    def _limit(self, sequence: Sequence) -> int:
        """Return the most tokens of a draft for a sequence."""
        held = sequence.slots
        if sequence.num_void_results or not (held is None or held.may_have_draft):
            return 0
        most = self.most
        if sequence.max_draft_tokens is not None:
            most = min(most, sequence.max_draft_tokens)
        return min(most, sequence.max_num_tokens - sequence.num_known_tokens - 1)

    def _record(self, sequence: Sequence) -> _Record:
        """Return the record of a sequence, with the result of its last draft."""
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record()
        if record.num_tokens:
            self._learn(sequence, record)
        return record

    def _learn(self, sequence: Sequence, record: _Record) -> None:
        """Enter the last draft of a sequence: its accepted tokens, and the first that was not."""
        num_accepted = sequence.account.num_accepted_tokens - record.num_accepted
        results = [1.0] * num_accepted + [0.0] * (num_accepted < record.num_tokens)
        record.num_tokens = 0
        for accepted in results:
            record.accepted = record.accepted * _MEMORY + accepted
            record.proposed = record.proposed * _MEMORY + 1
            before = self._acceptance[record.match_class]
            self._acceptance[record.match_class] = before + _RATE * (accepted - before)

    def _usable_kind(self, sequences: TypingSequence[Sequence]) -> StepKind | None:
        """Return the kind of a step of these sequences; None if it can have no drafts, or none that pay."""
        deterministic = any(it.deterministic for it in sequences)
        adapted = deterministic and any(it.adapter is not None for it in sequences)
        kind = self._kind(deterministic=deterministic, adapted=adapted)
        if not self.most or not 0 < len(sequences) < kind.most_tokens:
            return None
        is_exact = kind is not self._exact or (
            self.has_exact_rows() and all(map(_has_exact_rows, sequences))
        )
        return kind if is_exact and self._may_pay(kind, len(sequences)) else None

    def _kind(self, *, deterministic: bool, adapted: bool) -> StepKind:
        """Return the kind of steps of which a sequence is deterministic, and of which one has an adapter."""
        if not deterministic:
            return self._exact
        return self._adapted if adapted else self._deterministic

    def _counts(
        self,
        kind: StepKind,
        num_rows: int,
        proposed: TypingSequence[tuple[int, ...]],
        rates: dict[int, float],
    ) -> dict[int, int]:
        """Return by row how many of its proposed tokens to compute, so that most tokens per second are kept."""
        heap = [(-rate, row, 1) for row, rate in rates.items()]
        heapq.heapify(heap)
        order: list[int] = []
        gain, total, longest = float(num_rows), num_rows, 1
        alone = kind.seconds(num_rows, num_rows, 1)
        if not alone:  # nothing was measured: the next step does
            return {}
        best, num_best = _LEAST_GAIN * num_rows / alone, 0
        most = self.most_in_step()
        while heap and len(order) < most:
            share, row, count = heapq.heappop(heap)
            total += 1
            longest = max(longest, 1 + count)
            if kind.size(num_rows, total, longest) > kind.most_tokens:
                break
            gain -= share
            order.append(row)
            speed = gain / kind.seconds(num_rows, total, longest)
            if speed > best:
                best, num_best = speed, len(order)
            if count < len(proposed[row]):
                heapq.heappush(heap, (share * rates[row], row, count + 1))
        counts: dict[int, int] = {}
        for row in order[:num_best]:
            counts[row] = counts.get(row, 0) + 1
        return counts

    def _has_room(
        self, kind: StepKind, counts: dict[int, int], proposed: TypingSequence[tuple[int, ...]]
    ) -> bool:
        """Return whether a step with drafts of `counts` tokens may have another one."""
        num_rows, count = len(proposed), sum(counts.values()) + 1
        longest = 1 + max([1, *counts.values()])
        size = kind.size(num_rows, num_rows + count, longest)
        return size <= kind.most_tokens and count <= self.most_in_step()

    def _may_pay(self, kind: StepKind, num_rows: int) -> bool:
        """Return whether drafts that are mostly right make a step of so many rows more productive."""
        self._num_asked += 1
        asked, pays = self._pays.get((kind, num_rows), (-_RENEWED, False))
        if self._num_asked - asked < (_RENEWED_YES if pays else _RENEWED):
            return pays
        alone = kind.seconds(num_rows, num_rows, 1)
        pays = False
        gain = share = 1.0
        for count in range(1, self.most + 1):
            share *= _BEST_RATE
            gain += share
            tokens, kept = num_rows * (1 + count), num_rows * gain
            is_last = kind.size(num_rows, tokens, 1 + count) > kind.most_tokens
            if is_last:  # only some rows may have so many
                tokens = kind.most_tokens
                kept = num_rows + _BEST_RATE * (tokens - num_rows)
            size = kind.size(num_rows, tokens, 1 + count)
            if size <= kind.most_tokens:
                pays = kind.costs.seconds(size) < kept / num_rows * alone / _LEAST_GAIN
            if pays or is_last:
                break
        if alone:
            self._pays[kind, num_rows] = self._num_asked, pays
        return pays


def _has_exact_rows(sequence: Sequence) -> bool:
    """Return whether drafts change no bit of a sequence, and of those beside it, although none is deterministic.

    Steps with adapters or scored prompts are computed layer by layer. Where tokens that a grammar forces are skipped,
    drafts change which tokens are computed as a chunk.
    """
    sampling = sequence.sampling
    scores = sampling.prompt_logprobs and not sequence.num_known_output_tokens
    return sequence.adapter is None and not scores and not sampling.skips_forced_tokens


def _is_one_launch(decode: DecodeRows) -> bool:
    """Return whether a step took the time of steps that may have drafts of sequences that are not deterministic."""
    sequences = decode.batch.sequences
    return decode.num_logits == decode.num_tokens and all(map(_has_exact_rows, sequences))
