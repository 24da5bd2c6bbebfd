"""Allocates the slots of the cache, which hold the states of fixed size of sequences, and keeps snapshots of them.

A step reads the state of a sequence from one slot and writes it to another or the same one, so a state is kept by
writing the next one elsewhere: nothing is copied.

    first step          reads nothing, or a snapshot     writes a slot of its own
    next steps          read and write that slot
    step after a cut    reads that slot                  writes a new one; the old one becomes a snapshot
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

NO_SLOT: Final = -1
"""Of a step's input: nothing is read, so that the state is zero, or nothing is written."""


def slots_needed(max_num_seqs: int, *, enable_prefix_caching: bool) -> int:
    """Return the number of slots for the sequences of a step, and for as many snapshots if prefixes are cached."""
    return max_num_seqs * (2 if enable_prefix_caching else 1)


@dataclass(slots=True, eq=False)
class SequenceSlots:
    """The slots of a running sequence.

    Attributes:
        read: from which its next step reads the state; `NO_SLOT` for a sequence without one.
        write: to which its next step writes the state; no other sequence reads or writes it.
        cuts: numbers of tokens, ascending, after which the state is kept: a step computes no tokens beyond the first.
        kept: by number of tokens, slots with the state after them, until their blocks are in the prefix cache.
    """

    read: int
    write: int
    cuts: list[int]
    kept: dict[int, int] = field(default_factory=dict)

    def cut(self, start: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `start` on a step may compute."""
        return min(num_tokens, self.cuts[0] - start) if self.cuts else num_tokens


class StateSlots:
    """Owns the slots: which are in use, and the snapshots of the prefix cache. Part of `BlockManager`.

    A snapshot is the state after the blocks of a link (`block_manager.Link`). It leaves with the last of these blocks,
    or when its slot is needed and no snapshot was used longer ago. A slot that a scheduled step reads is not given to
    another sequence before the step is launched. Later steps may write it, because the device computes steps in order.

    Invariants (`check_invariants`): a slot that is not free is held by as many owners as `_holds` counts: each is the
    slot that a sequence writes, one that it reads and does not write, one that it keeps, or a snapshot.

    Args:
        num_slots: at least as many as sequences run at the same time.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._holds = [0] * num_slots
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # by link, the last used one last

    def longest(self, links: Sequence[int]) -> int:
        """Return the largest number of leading blocks after which there is a snapshot, given their links."""
        for count in range(len(links), 0, -1):
            if links[count - 1] in self._snapshots:
                return count
        return 0

    def admit(self, link: int | None, cuts: Iterable[int]) -> SequenceSlots | None:
        """Return the slots of a new sequence.

        Args:
            link: of the cached blocks with its leading tokens, which has a snapshot; None if there are none.
            cuts: see `SequenceSlots`.

        Returns:
            None, with nothing changed, if no slot can be given to it now.
        """
        read = NO_SLOT
        if link is not None:
            read = self._snapshots[link]
            self._holds[read] += 1
        write = self._take()
        if write is None:
            self._drop(read)
            return None
        if link is not None:
            self._snapshots.move_to_end(link)
        return SequenceSlots(read, write, sorted(cuts))

    def advance(self, slots: SequenceSlots, num_tokens: int) -> bool:
        """Note that a step was launched, which writes the state after the leading `num_tokens` tokens of a sequence.

        Returns:
            Whether the next step of the sequence has other slots than this one.
        """
        before = slots.read, slots.write
        if slots.read != slots.write:
            self._drop(slots.read)
            slots.read = slots.write
        if slots.cuts and slots.cuts[0] == num_tokens:
            del slots.cuts[0]
            if (slot := self._take()) is not None:
                slots.kept[num_tokens] = slots.write
                self._holds[slots.read] += 1
                slots.write = slot
        return (slots.read, slots.write) != before

    def keep(self, slots: SequenceSlots, num_tokens: int, link: int) -> None:
        """Make the state after `num_tokens` tokens of a sequence a snapshot, if it was kept.

        Args:
            slots: of the sequence.
            num_tokens: a multiple of the block size; the tokens are computed.
            link: of their blocks, which are in the prefix cache.
        """
        slot = slots.kept.pop(num_tokens, None)
        if slot is None:
            return
        if link in self._snapshots:
            self._drop(slot)
        else:
            self._snapshots[link] = slot

    def forget(self, link: int) -> None:
        """Drop the snapshot of a block that leaves the prefix cache, if there is one."""
        self._drop(self._snapshots.pop(link, NO_SLOT))

    def free(self, slots: SequenceSlots) -> None:
        """Release the slots of a sequence."""
        if slots.read != slots.write:
            self._drop(slots.read)
        for slot in (slots.write, *slots.kept.values()):
            self._drop(slot)

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping while no sequence runs."""
        free, kept = len(self._free), len(self._snapshots)
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
        holds = Counter(self._snapshots.values())
        written = [it.write for it in running]
        assert len(set(written)) == len(written), "two sequences write a slot"
        assert not set(written) & set(holds), "a sequence writes a snapshot"
        for it in running:
            assert it.cuts == sorted(set(it.cuts))
            assert it.write not in it.kept.values(), "a sequence writes the state that it keeps"
            holds.update((it.write, *it.kept.values()))
            if it.read not in (NO_SLOT, it.write):
                holds[it.read] += 1
            assert not any(it.read == other.write for other in running if other is not it)
        assert [holds[slot] for slot in range(self.num_slots)] == self._holds
        free = [slot for slot in range(self.num_slots) if not self._holds[slot]]
        assert sorted(self._free) == free, "slots lost or doubled"
        assert self._snapshots.keys() <= set(links), "a snapshot of blocks that are not cached"

    def _take(self) -> int | None:
        """Take a free slot, or that of the snapshot that was used longest ago and that no step is about to read."""
        if not self._free:
            link = next(
                (it for it, slot in self._snapshots.items() if self._holds[slot] == 1), None
            )
            if link is None:
                return None
            self.forget(link)
        slot = self._free.pop()
        self._holds[slot] = 1
        return slot

    def _drop(self, slot: int) -> None:
        """Release a slot for one of its owners."""
        if slot == NO_SLOT:
            return
        self._holds[slot] -= 1
        if not self._holds[slot]:
            self._free.append(slot)
