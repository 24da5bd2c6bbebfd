"""Allocates the slots of the cache, which hold the states of fixed size of sequences, and keeps snapshots of them.

A step reads the state of a sequence from one slot and writes it to another or the same one, so a state is kept by
writing the next one elsewhere: nothing is copied.

    first step          reads nothing, or a snapshot     writes a slot of its own
    next steps          read and write that slot
    step after a cut    reads that slot                  writes a new one; the old one becomes a snapshot
    step with a draft   reads that slot                  writes it after the sequence's own token, and one slot for
                                                         each token of the draft; those of wrong tokens are free again

Kernels that can write a state in the middle of a prompt write it to a further slot there, so that the step goes on.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

NO_SLOT: Final = -1
"""Of a step's input: nothing is read, so that the state is zero, or nothing is written."""
_LEAST_INTERVAL: Final = 512
_MOST_INTERVALS: Final = 8
"""Tokens between two states that are kept within a prompt, and how many of them; a longer prompt has longer intervals.
A snapshot is as large as the keys and values of 1,000 to 2,000 tokens of the same model."""
_MOST_MARKS: Final = 160
"""States that are kept within a prompt while slots are free. On an H100, that of Qwen3.5-0.8B, 18.9 MB, takes as long
to write as one or two tokens take to compute."""


def interval_of(num_tokens: int) -> int:
    """Return the tokens between the states that are kept within a prompt of a number of tokens.

    Intervals are powers of two, so that the states of prompts of different lengths are at the same places.
    """
    interval = _LEAST_INTERVAL
    while num_tokens > _MOST_INTERVALS * interval:
        interval *= 2
    return interval


def marks_of(num_tokens: int, start: int, stop: int, unit: int, num_free: int) -> list[int]:
    """Return the numbers of tokens after which a state is kept within a prompt, apart from its end.

    They are close to each other while slots are free, since nobody knows yet where the next prompt parts from this one.
    Otherwise they are at intervals of `interval_of` and, before the first of these, at each power of two.

    Args:
        num_tokens: of the prompt.
        start: they are larger.
        stop: they are smaller.
        unit: they are multiples of it.
        num_free: slots.
    """
    step = unit
    while (stop - start) // step > _MOST_MARKS:
        step *= 2
    close = range(start // step * step + step, stop, step)
    if len(close) <= num_free // 2:
        return list(close)
    interval = interval_of(num_tokens)
    counts = [*range(interval, stop, interval)]
    while interval > _LEAST_INTERVAL:
        interval //= 2
        counts.append(interval)
    return sorted({it for count in counts if start < (it := count // unit * unit) < stop})


class Kept(NamedTuple):
    """A state that is kept, until its blocks are in the prefix cache.

    Attributes:
        slot: that holds it.
        is_lasting: see `_Snapshot`.
    """

    slot: int
    is_lasting: bool


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A state that sequences may begin at.

    Attributes:
        slot: that holds it.
        is_lasting: whether others leave before it: it is where a prompt ends or two prompts part, or a sequence began
            at it, and it was not superseded since.
        num_hits: sequences that began at it.
    """

    slot: int
    is_lasting: bool
    num_hits: int = 0


@dataclass(slots=True, eq=False)
class SequenceSlots:
    """The slots of a running sequence.

    Attributes:
        read: from which its next step reads the state; `NO_SLOT` for a sequence without one.
        write: to which its next step writes the state; no other sequence reads or writes it.
        cuts: numbers of tokens, ascending, after which the state is kept: a step computes no tokens beyond the first
            unless `keeps_inside`.
        marks: likewise, of states that do not last; of use only if `keeps_inside`.
        keeps_inside: whether a step writes states that are kept also within the tokens that it computes of a prompt.
        num_chunked: leading tokens that steps may compute together, however many; those after them come one by one.
        align: a step ends at a multiple of so many tokens, at a cut, after `num_chunked` or the last known token.
        last: number of tokens after which its state was kept last, or at which it began.
        takes_drafts: whether a step writes the states after each token of a draft.
        drafts: slots for the states after each token of the draft of the scheduled or launched step.
        interval: tokens after which a state at the end of a step may be kept; 0 if none is, or `marks` say which.
        stop: most tokens after which a state may be kept.
        start: link of the snapshot that it began at; None if there is none.
        planned: by number of tokens, what the scheduled step keeps within the tokens that it computes.
        kept: by number of tokens, what launched steps keep, until the blocks are in the prefix cache.
    """

    read: int
    write: int
    cuts: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    keeps_inside: bool = False
    num_chunked: int = 1 << 62
    align: int = 1
    takes_drafts: bool = False
    drafts: list[int] = field(default_factory=list)
    last: int = 0
    interval: int = 0
    stop: int = 0
    start: int | None = None
    planned: dict[int, Kept] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)

    def cut(self, start: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `start` on a step may compute.

        A token alone, as the last one of a prompt may be after a hit, is a decode row, which may have other bits than
        as a part of a prompt. So one after a multiple of `align` is always alone.
        """
        if start >= self.num_chunked:
            return 1
        stop = min(start + num_tokens, self.num_chunked)
        if self.cuts and not self.keeps_inside:
            stop = min(stop, self.cuts[0])
        if self.align > 1 and stop % self.align == 1 and stop - start > 1:
            stop -= 1
        return stop - start

    @property
    def may_have_draft(self) -> bool:
        """Whether the next step may have a draft: it keeps no state, and its own slot is the one that it reads."""
        moves = self.cuts or self.planned or self.read != self.write
        return self.takes_drafts and not moves

    @property
    def is_pending(self) -> bool:
        """Whether a snapshot will probably be taken of it."""
        return bool(self.cuts or self.marks or self.planned or self.kept)


class StateSlots:
    """Owns the slots: which are in use, and the snapshots of the prefix cache. Part of `BlockManager`.

    A snapshot is the state after the blocks of a link (`block_manager.Link`), after a multiple of `unit` tokens. It
    leaves with the last of these blocks, or when its slot is needed: first those that do not last, of these and of the
    others the one that was used longest ago. A state that would not last takes the slot of no snapshot that does. A
    slot that a scheduled step reads is not given to another sequence before the step is launched. Later steps may write
    it, because the device computes steps in order.

    Invariants (`check_invariants`): a slot that is not free is held by as many owners as `_holds` counts: each is the
    slot that a sequence writes, one that it reads and does not write, one that it keeps, one of its draft, or a
    snapshot. Up to `num_reserved` of those that are free are for drafts alone.

    Args:
        num_slots: at least as many as sequences run at the same time.
        chunk: of `StateSpec`.
        block_size: tokens in a block of the cache.
        keeps_inside: see `SequenceSlots`.

    Attributes:
        num_slots, chunk, keeps_inside: see above.
        takes_drafts: see `SequenceSlots`; set by `reserve_for_drafts`.
        num_reserved: slots that only drafts take.
        mark_unit: `SequenceSlots.marks` are at multiples of so many tokens, a multiple of `unit`; may be set at the
            start.
        unit: snapshots are taken after multiples of so many tokens.
        num_taken: snapshots taken so far.
        num_hits: sequences that began at one.
        num_evicted: snapshots that have left.
    """

    def __init__(
        self, num_slots: int, chunk: int = 1, block_size: int = 1, *, keeps_inside: bool = False
    ) -> None:
        assert num_slots > 0
        self.num_slots, self.chunk, self.keeps_inside = num_slots, chunk, keeps_inside
        self.takes_drafts = False
        self.num_reserved = 0
        self._reserved: list[int] = []
        self.unit = math.lcm(chunk, block_size)
        self.mark_unit = self.unit
        self.num_taken = self.num_hits = self.num_evicted = 0
        self._free = list(range(num_slots))
        self._holds = [0] * num_slots
        self._snapshots: dict[int, _Snapshot] = {}  # by link
        # Those that do not last and those that do, the last used one last.
        self._order: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (
            OrderedDict(),
            OrderedDict(),
        )

    @property
    def num_free(self) -> int:
        """Slots that neither a sequence nor a snapshot has, and that are not for drafts alone."""
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that sequences may begin at."""
        return len(self._snapshots)

    def longest(self, links: Sequence[int]) -> int:
        """Return the largest number of leading blocks after which there is a snapshot, given their links."""
        for count in range(len(links), 0, -1):
            if links[count - 1] in self._snapshots:
                return count
        return 0

    def admit(self, link: int | None, cuts: Iterable[int] = ()) -> SequenceSlots | None:
        """Return the slots of a new sequence.

        Args:
            link: of the cached blocks with its leading tokens, which has a snapshot; None if there are none.
            cuts: see `SequenceSlots`.

        Returns:
            None, with nothing changed, if no slot can be given to it now.
        """
        read = NO_SLOT
        if link is not None:
            read = self._snapshots[link].slot
            self._holds[read] += 1
        write = self._take(for_lasting=True)
        if write is None:
            self._drop(read)
            return None
        if link is not None:
            self._use(link)
        return SequenceSlots(
            read,
            write,
            sorted(cuts),
            keeps_inside=self.keeps_inside,
            align=self.chunk,
            takes_drafts=self.takes_drafts,
            start=link,
        )

    def plan(self, slots: SequenceSlots, start: int, stop: int) -> None:
        """Take slots for the states that a step keeps within the tokens `start .. stop` of a prompt.

        The step may be scheduled again instead of being launched.
        """
        for counts, is_lasting in ((slots.cuts, True), (slots.marks, False)):
            for count in counts:
                if count >= stop:
                    break
                if count > start and count not in slots.planned:
                    slot = self._take(for_lasting=is_lasting)
                    if slot is not None:
                        slots.planned[count] = Kept(slot, is_lasting)

    def advance(self, slots: SequenceSlots, num_tokens: int) -> bool:
        """Note that a step was launched, which writes the state after the leading `num_tokens` tokens of a sequence.

        Returns:
            Whether the next step of the sequence has other slots than this one.
        """
        before = slots.read, slots.write
        if slots.read != slots.write:
            self._drop(slots.read)
            slots.read = slots.write
        if slots.keeps_inside:
            self._advance_inside(slots, num_tokens)
        elif slots.cuts and slots.cuts[0] == num_tokens:
            del slots.cuts[0]
            self._keep_after(slots, num_tokens, is_lasting=True)
        elif slots.interval and num_tokens - slots.last >= slots.interval:
            if num_tokens > slots.stop:
                slots.interval = 0
            elif num_tokens % self.unit == 0:
                self._keep_after(slots, num_tokens, is_lasting=False)
        return (slots.read, slots.write) != before

    def reserve_for_drafts(self, count: int) -> None:
        """Let sequences have drafts, and keep so many slots for these alone. Call it at the start."""
        assert len(self._free) == self.num_slots > count
        self.takes_drafts, self.num_reserved = True, count
        self._reserved = [self._free.pop() for _ in range(count)]

    def num_for_drafts(self) -> int:
        """Return how many tokens the drafts of a step may have: free slots, and those of snapshots that do not last."""
        return len(self._reserved) + len(self._free) + len(self._order[False])

    def lend(self, slots: SequenceSlots, count: int) -> int:
        """Give a sequence slots for a draft of `count` tokens, or release them; return how many it has.

        No snapshot that lasts leaves for a draft, whose states last for a step.
        """
        while len(slots.drafts) > count:
            self._drop(slots.drafts.pop())
        while len(slots.drafts) < count:
            slot = self._reserved.pop() if self._reserved else None
            if slot is not None:
                self._holds[slot] = 1
            elif (slot := self._take(for_lasting=False)) is None:
                break
            slots.drafts.append(slot)
        return len(slots.drafts)

    def accept(self, slots: SequenceSlots, count: int) -> bool:
        """Let a sequence go on after the first `count` tokens of its draft, whose step has ended.

        Returns:
            Whether its next step has another slot than this one.
        """
        if count:
            self._drop(slots.write)
            slots.read = slots.write = slots.drafts.pop(count - 1)
        self.lend(slots, 0)
        return count > 0

    def keep(self, slots: SequenceSlots, num_tokens: int, link: int) -> None:
        """Make the state after `num_tokens` tokens of a sequence, which was kept, a snapshot.

        Args:
            slots: of the sequence.
            num_tokens: a multiple of `unit`; the tokens are computed.
            link: of their blocks, which are in the prefix cache.
        """
        slot, is_lasting = slots.kept.pop(num_tokens)
        found = self._snapshots.get(link)
        if found is not None:
            self._drop(slot)
            if is_lasting and not found.is_lasting:
                self._rank(link, is_lasting=True)
        else:
            self._snapshots[link] = _Snapshot(slot, is_lasting)
            self._order[is_lasting][link] = None
            self.num_taken += 1
        if is_lasting and num_tokens == slots.stop and slots.start not in (None, link):
            self._supersede(slots.start)

    def forget(self, link: int) -> None:
        """Drop the snapshot of a block that leaves the prefix cache, if there is one."""
        found = self._snapshots.pop(link, None)
        if found is not None:
            del self._order[found.is_lasting][link]
            self._drop(found.slot)
            self.num_evicted += 1

    def free(self, slots: SequenceSlots) -> None:
        """Release the slots of a sequence."""
        if slots.read != slots.write:
            self._drop(slots.read)
        self._drop(slots.write)
        for kept in (*slots.kept.values(), *slots.planned.values()):
            self._drop(kept.slot)
        self.lend(slots, 0)

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping while no sequence runs."""
        free, kept = len(self._free) + len(self._reserved), len(self._snapshots)
        if free + kept == self.num_slots:
            return []
        return [f"{free} free slots and {kept} snapshots are not {self.num_slots}"]

    def check_invariants(self, running: Iterable[SequenceSlots], links: Collection[int]) -> None:
        """Assert the invariants.

        Args:
            running: slots of the running sequences.
            links: of the blocks in the prefix cache.
        """
        running = list(running)
        holds = Counter(it.slot for it in self._snapshots.values())
        assert max(holds.values(), default=1) == 1, "two snapshots share a slot"
        written = [it.write for it in running]
        assert len(set(written)) == len(written), "two sequences write a slot"
        assert not set(written) & set(holds), "a sequence writes a snapshot"
        for it in running:
            assert it.cuts == sorted(set(it.cuts))
            counts = (*it.cuts, *it.marks, *it.kept, *it.planned)
            assert all(count % self.unit == 0 for count in counts)
            assert it.keeps_inside or not it.planned
            kept = [state.slot for state in (*it.kept.values(), *it.planned.values())]
            assert it.write not in kept, "a sequence writes the state that it keeps"
            holds.update((it.write, *kept, *it.drafts))
            if it.read not in (NO_SLOT, it.write):
                holds[it.read] += 1
            assert not any(it.read == other.write for other in running if other is not it)
        assert [holds[slot] for slot in range(self.num_slots)] == self._holds
        free = [slot for slot in range(self.num_slots) if not self._holds[slot]]
        assert sorted(self._free + self._reserved) == free, "slots lost or doubled"
        assert len(self._reserved) <= self.num_reserved
        assert self._snapshots.keys() <= set(links), "a snapshot of blocks that are not cached"
        passing, lasting = self._order
        assert passing.keys() | lasting.keys() == self._snapshots.keys()
        assert all(it.is_lasting == (link in lasting) for link, it in self._snapshots.items())
        assert len(passing) + len(lasting) == len(self._snapshots)
        assert self.num_taken - self.num_evicted == len(self._snapshots)

    def _advance_inside(self, slots: SequenceSlots, num_tokens: int) -> None:
        """Note which states a launched step keeps within its tokens and after the last of them."""
        counts = (slots.cuts, slots.marks)
        for count in [it for it in slots.planned if it <= num_tokens]:
            kept = slots.planned.pop(count)
            if count == num_tokens:  # planned for a longer step, which was not launched
                self._drop(kept.slot)
            else:
                slots.kept[count] = kept
        for marks, is_lasting in zip(counts, (True, False), strict=True):
            while marks and marks[0] <= num_tokens:
                if marks.pop(0) == num_tokens:
                    self._keep_after(slots, num_tokens, is_lasting=is_lasting)

    def _keep_after(self, slots: SequenceSlots, num_tokens: int, *, is_lasting: bool) -> None:
        """Keep the state that a launched step writes, if there is a slot for the next one."""
        slot = self._take(for_lasting=is_lasting)
        if slot is None:
            return
        slots.kept[num_tokens] = Kept(slots.write, is_lasting)
        self._holds[slots.read] += 1
        slots.write = slot
        slots.last = num_tokens

    def _use(self, link: int) -> None:
        """Note that a sequence begins at a snapshot."""
        self._snapshots[link].num_hits += 1
        self.num_hits += 1
        self._rank(link, is_lasting=True)

    def _supersede(self, link: int | None) -> None:
        """Let a snapshot leave early: the only sequence that began at it has one that goes further.

        So of a conversation only its last prompt counts, and a beginning that several prompts have lasts.
        """
        found = None if link is None else self._snapshots.get(link)
        if link is not None and found is not None and found.num_hits == 1:
            self._rank(link, is_lasting=False)

    def _rank(self, link: int, *, is_lasting: bool) -> None:
        """Set whether a snapshot lasts, and make it the last used one."""
        found = self._snapshots[link]
        del self._order[found.is_lasting][link]
        found.is_lasting = is_lasting
        self._order[is_lasting][link] = None

    def _take(self, *, for_lasting: bool) -> int | None:
        """Take a free slot, or that of a snapshot; None if there is none to take."""
        if not self._free:
            link = self._oldest(self._order[False])
            if link is None and for_lasting:
                link = self._oldest(self._order[True])
            if link is None:
                return None
            self.forget(link)  # its slot may replace one of those for drafts that is lent
        slot = (self._free or self._reserved).pop()
        self._holds[slot] = 1
        return slot

    def _oldest(self, links: OrderedDict[int, None]) -> int | None:
        """Return the snapshot that was used longest ago of those that no step is about to read."""
        return next((it for it in links if self._holds[self._snapshots[it].slot] == 1), None)

    def _drop(self, slot: int) -> None:
        """Release a slot for one of its owners."""
        if slot == NO_SLOT:
            return
        self._holds[slot] -= 1
        if not self._holds[slot]:
            is_short = len(self._reserved) < self.num_reserved
            (self._reserved if is_short else self._free).append(slot)
