"""Allocates the blocks of the KV cache to sequences and keeps the prefix cache.

Works on token ids and block ids, without tensors. The scheduler decides the order in which sequences get blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import NamedTuple, TypeAlias

from server.engine.core.memory.free_blocks import FreeBlocks
from server.engine.core.memory.shared_beginnings import MOST_COMPARED, common_tokens
from server.engine.core.memory.state_slots import StateSlots, interval_of, marks_of
from server.engine.core.sequence import CacheSalt, Sequence

Link: TypeAlias = int | CacheSalt
"""Identifies the content of a sequence's leading blocks: a number; before the first block, the cache salt."""

Key: TypeAlias = tuple[Link, tuple[int, ...]]
"""Identifies the content of a full block: the link of the blocks before it, and its token ids."""


def _none(_num_cached: int) -> tuple[int, ...]:
    """Return no numbers of tokens."""
    return ()


class _Prefix(NamedTuple):
    """The leading tokens of a sequence that need not be computed.

    Attributes:
        blocks: with their keys and values.
        link: of the content of these blocks.
        num_cached: leading blocks in the prefix cache, of which `blocks` are the first.
    """

    blocks: list[int]
    link: Link
    num_cached: int


class BlockManager:
    """Owns the blocks of the KV cache: reference counts, prefix cache, placement.

    A block is *owned* (in one or more block tables), *idle* (in no table, but its content is in the
    prefix cache) or *empty*. Sequences share a block only if it is full and all its keys and values
    are computed. A shared block is therefore never written again and never copied.

    Prefix cache: the key of a block is (link of the blocks before it, its token ids). A link is a
    number that is given to one content and never reused, so equal keys mean equal prefixes from the
    first token on. The dictionary compares whole keys, so a hash collision cannot cause a false hit.
    Idle blocks are evicted in the order in which they were freed. A sequence frees its last block
    first, so a prefix is evicted after the blocks that follow it.

    States of fixed size: where layers keep one, a running sequence has slots too, and its leading
    tokens come from the prefix cache only up to a block after which there is a snapshot of the state.
    Snapshots are taken, after multiples of `StateSlots.unit` tokens only,
    - after the last such multiple of a prompt, where a conversation goes on,
    - after the last block of a prompt that was in the prefix cache when it was admitted: where two
      prompts part, a third one may part too,
    - where waiting prompts part from it (`SharedBeginnings`),
    - where its chunks end at intervals, in slots that nothing better needs.
    Where kernels compute prompts in chunks (`StateSlots.chunk` > 1), blocks after the prompt are not
    in the prefix cache: their tokens were computed one by one, in other bits than as a prompt.

    Placement: attention on a CPU reads adjacent blocks without copying. A block table therefore
    grows into the empty block after its last one, else into the largest run of empty blocks. If an
    owned block precedes that run, the table starts in the run's middle, because that block's
    sequence may grow into the run.

    Only the scheduler calls it, from one thread.

    Invariants (`check_invariants`): owned, idle and empty blocks add up to all blocks; the reference
    count of a block is the number of block tables that contain it; the sequences of these tables
    have equal tokens up to the end of the block.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: whether full blocks are kept for later sequences with the same prefix.
        contiguity_reserve: share of the pool, in [0, 1). While fewer blocks than that are empty,
            idle blocks are evicted early, until the new blocks of a sequence fit in one run. With 0,
            a block is evicted only when no block is empty, and block tables scatter once all blocks
            have been used; use it for kernels that read scattered blocks at the same speed.
        num_slots: for states of fixed size; 0 if the network has none.
        state_chunk: of `StateSpec`, or 1 if kernels compute token by token.
        keeps_inside: whether steps write states that are kept within the tokens that they compute of a prompt; else
            they end there.
        repeats_output: whether all sequences compute what they generated before a preemption one by one, so that it has
            the same bits; else deterministic ones only.

    Attributes:
        slots: for states of fixed size; None if the network has none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        contiguity_reserve: float = 0.0,
        num_slots: int = 0,
        state_chunk: int = 1,
        keeps_inside: bool = False,
        repeats_output: bool = False,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        assert 0 <= contiguity_reserve < 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_reserved = int(num_blocks * contiguity_reserve)
        self._empty = FreeBlocks(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._owners: set[Sequence] = set()
        self._cached: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._link_of: dict[int, int] = {}
        self._num_links = 0
        self.slots: StateSlots | None = None
        if num_slots:
            self.slots = StateSlots(
                num_slots,
                state_chunk,
                block_size,
                keeps_inside=keeps_inside,
            )
        self._repeats_output = repeats_output
        self._only_prompts = num_slots > 0 and state_chunk > 1
        self._pending: dict[Sequence, None] = {}  # of which a snapshot will probably be taken

    @property
    def caches_output(self) -> bool:
        """Whether blocks with generated tokens come into the prefix cache."""
        return self.enable_prefix_caching and not self._only_prompts

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns: empty and idle blocks."""
        return self._empty.num_free + len(self._idle)

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that no sequence owns and whose content is in the prefix cache."""
        return len(self._idle)

    @property
    def owners(self) -> AbstractSet[Sequence]:
        """The sequences that own blocks."""
        return self._owners

    def looks_up(self, sequence: Sequence) -> bool:
        """Return whether a sequence's leading tokens are looked up in the prefix cache."""
        return self.enable_prefix_caching and not sequence.sampling.prompt_logprobs

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a sequence that owns no block are in the prefix cache."""
        return len(self._find_prefix(sequence).blocks) * self.block_size

    def num_pending_tokens(self, sequence: Sequence) -> int:
        """Return after how many leading tokens of a waiting sequence a running one has a snapshot soon; 0 for none."""
        if not self._pending or not self.looks_up(sequence):
            return 0
        assert self.slots is not None
        found, unit, known = 0, self.slots.unit, sequence.token_ids
        most = self._most_cached(sequence)
        for other in islice(self._pending, MOST_COMPARED):
            held = other.slots
            assert held is not None
            if other.cache_salt == sequence.cache_salt:
                common = common_tokens(known, other.token_ids, unit, most)
                counts = (*held.cuts, *held.marks, *held.planned, *held.kept)
                found = max(found, *(it for it in counts if it <= common), 0)
        return found

    def admit(
        self, sequence: Sequence, num_spare: int = 0, shared: Callable[[int], Iterable[int]] = _none
    ) -> bool:
        """Allocate blocks for all known tokens of a sequence and for one more token.

        Blocks with its leading tokens come from the prefix cache. They never include the last known
        token, so at least one token is left to compute. Sets `num_computed_tokens` to their tokens.

        Args:
            sequence: owns no block.
            num_spare: blocks that must stay free.
            shared: returns, for a number of leading tokens that are cached, after which more of them the state is
                worth a snapshot: multiples of `StateSlots.unit`.

        Returns:
            False, with nothing changed, where too few blocks are free, or no slot.
        """
        prefix = self._find_prefix(sequence)
        hits = prefix.blocks
        references = self._references
        num_new = sequence.num_tokens // self.block_size + 1 - len(hits)
        if self._num_taken(sequence, hits) + num_spare > self.num_free_blocks:
            return False
        if self.slots is not None and not self._admit_state(self.slots, sequence, prefix, shared):
            return False
        for block in hits:
            if not references[block]:
                del self._idle[block]
            references[block] += 1
        sequence.block_table = hits
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_linked_blocks = len(hits)
        sequence.prefix_link = prefix.link
        self._owners.add(sequence)
        self._extend(hits, num_new)
        self._set_capacity(sequence)
        return True

    def num_taken(self, sequence: Sequence) -> int:
        """Return how many of the free blocks `admit` would take for a sequence that owns no block."""
        return self._num_taken(sequence, self._find_prefix(sequence).blocks)

    def num_freed(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks would be free in addition if these admitted sequences owned none."""
        counts = Counter(block for sequence in sequences for block in sequence.block_table)
        return sum(self._references[block] == count for block, count in counts.items())

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table of an admitted sequence to hold `num_tokens` tokens.

        Returns:
            False, with nothing changed, where too few blocks are free.
        """
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if num_new > self.num_free_blocks:
            return False
        self._extend(sequence.block_table, num_new)
        self._set_capacity(sequence)
        return True

    def cache_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the blocks that were filled since the last call to the prefix cache.

        Args:
            sequence: an admitted sequence.
            num_tokens: number of its leading tokens that are known and computed.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        slots = self.slots
        if self._only_prompts:
            num_tokens = min(num_tokens, sequence.num_prompt_tokens)
        for index in range(sequence.num_linked_blocks, num_tokens // size):
            stop = (index + 1) * size
            tokens = tuple(sequence.token_ids[index * size : stop])
            link = self._enter((sequence.prefix_link, tokens), sequence.block_table[index])
            sequence.prefix_link = link
            sequence.num_linked_blocks += 1
            if slots is not None and sequence.slots is not None and stop in sequence.slots.kept:
                slots.keep(sequence.slots, stop, link)
                if not sequence.slots.is_pending:
                    self._pending.pop(sequence, None)

    def plan_state(self, sequence: Sequence, start: int, stop: int) -> None:
        """Take slots for the states that a step keeps within the tokens `start .. stop`; see `StateSlots.plan`."""
        held = sequence.slots
        if held is not None and held.keeps_inside and (held.cuts or held.marks):
            assert self.slots is not None
            self.slots.plan(held, start, stop)

    def advance_state(self, sequence: Sequence, num_tokens: int) -> bool:
        """Note that a step was launched that computes the first `num_tokens` tokens; see `StateSlots.advance`."""
        held = sequence.slots
        if held is None:  # it has ended, or was preempted
            return False
        assert self.slots is not None
        has_moved = self.slots.advance(held, num_tokens)
        if not held.is_pending:
            self._pending.pop(sequence, None)
        return has_moved

    def lend_for_draft(self, sequence: Sequence, count: int) -> int:
        """Return how many of `count` tokens a draft of a sequence may have; see `StateSlots.lend`."""
        if self.slots is None or sequence.slots is None:
            return count
        return self.slots.lend(sequence.slots, count)

    def accept_draft(self, sequence: Sequence, count: int) -> bool:
        """Note how many tokens of its draft a sequence keeps; see `StateSlots.accept`."""
        if self.slots is None or sequence.slots is None:
            return False
        return self.slots.accept(sequence.slots, count)

    def free(self, sequence: Sequence, discard_cached: bool = False) -> None:
        """Release all blocks and slots of an admitted sequence.

        Args:
            sequence: keeps its tokens; none of them counts as computed any more.
            discard_cached: whether its blocks leave the prefix cache, because their keys or values
                may be wrong. Sequences that share one of these blocks now keep it.
        """
        self._owners.remove(sequence)
        references = self._references
        for block in reversed(sequence.block_table):
            if discard_cached and block in self._key_of:
                self._forget(block)
            references[block] -= 1
            if references[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.release(block)
        if self.slots is not None and sequence.slots is not None:
            self.slots.free(sequence.slots)
            sequence.slots = None
            self._pending.pop(sequence, None)
        sequence.block_table = []
        sequence.capacity = 0
        sequence.num_computed_tokens = 0

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping while no sequence owns a block."""
        empty, idle, total = self._empty.num_free, len(self._idle), self.num_blocks
        used = total - self._references.count(0)
        found = []
        if used or self._owners:
            found.append(f"{used} blocks are used, by {len(self._owners)} sequences, expected none")
        if self.slots is not None:
            found += self.slots.idle_violations()
        if empty + idle + used != total:
            found.append(f"{empty} empty, {idle} cached and {used} used blocks are not {total}")
        if not len(self._cached) == len(self._key_of) == len(self._link_of) == idle:
            found.append(f"{len(self._cached)} blocks are in the prefix cache, {idle} are cached")
        return found

    def check_invariants(self) -> None:
        """Assert the invariants. Takes time proportional to the blocks and the tokens."""
        self._empty.check_invariants()
        empty = {block for start, stop in self._empty.stretches for block in range(start, stop)}
        owned: dict[int, list[tuple[Sequence, int]]] = {}
        for sequence in self._owners:
            self._check_sequence(sequence)
            for index, block in enumerate(sequence.block_table):
                owned.setdefault(block, []).append((sequence, index))
        idle = set(self._idle)
        assert len(empty) + len(idle) + len(owned) == self.num_blocks, "blocks lost or doubled"
        assert empty | idle | set(owned) == set(range(self.num_blocks))
        assert idle <= set(self._key_of), "an idle block without content"
        assert empty.isdisjoint(self._key_of), "an empty block in the prefix cache"
        for block, count in enumerate(self._references):
            assert count == len(owned.get(block, ())), f"block {block} has {count} references"
        for holders in owned.values():
            self._check_shared(holders)
        assert self._key_of == {block: key for key, block in self._cached.items()}
        assert self._link_of.keys() == self._key_of.keys()
        assert len(set(self._link_of.values())) == len(self._link_of), "a link names two contents"
        for link, tokens in self._cached:
            assert len(tokens) == self.block_size, "a block in the prefix cache is not full"
            assert not isinstance(link, int) or 0 < link <= self._num_links
        slots = [it.slots for it in self._owners if it.slots is not None]
        if self.slots is not None:
            assert len(slots) == len(self._owners), "a sequence runs without a slot"
            pending = {it for it in self._owners if it.slots is not None and it.slots.is_pending}
            assert pending >= self._pending.keys(), "a snapshot is awaited that will not be taken"
            self.slots.check_invariants(slots, self._link_of.values())
        else:
            assert not slots

    def _check_sequence(self, sequence: Sequence) -> None:
        table = sequence.block_table
        assert len(set(table)) == len(table), f"{sequence} owns a block twice"
        assert sequence.num_computed_tokens <= len(table) * self.block_size
        assert sequence.capacity == min(len(table) * self.block_size, sequence.max_num_tokens - 1)
        num_linked = sequence.num_linked_blocks * self.block_size
        assert num_linked <= sequence.num_computed_tokens
        assert not self._only_prompts or num_linked <= sequence.num_prompt_tokens
        for index, block in enumerate(table):
            if block in self._key_of:
                at = index * self.block_size
                tokens = tuple(sequence.token_ids[at : at + self.block_size])
                assert index < sequence.num_linked_blocks
                assert self._key_of[block][1] == tokens, f"block {block} has other tokens"

    def _check_shared(self, holders: list[tuple[Sequence, int]]) -> None:
        (first, index), *others = holders
        stop = (index + 1) * self.block_size
        for other, other_index in others:
            assert other_index == index
            assert other.cache_salt == first.cache_salt, "a block shared across salts"
            assert other.token_ids[:stop] == first.token_ids[:stop]
            assert stop <= min(first.num_computed_tokens, other.num_computed_tokens)

    def _set_capacity(self, sequence: Sequence) -> None:
        # The keys and values of the last token are never computed.
        held = len(sequence.block_table) * self.block_size
        sequence.capacity = min(held, sequence.max_num_tokens - 1)

    def _num_taken(self, sequence: Sequence, hits: list[int]) -> int:
        """Return how many free blocks a sequence takes whose first blocks are `hits`: empty ones and idle hits."""
        num_new = sequence.num_tokens // self.block_size + 1 - len(hits)
        return num_new + sum(not self._references[block] for block in hits)

    def _find_prefix(self, sequence: Sequence) -> _Prefix:
        """Find the leading tokens of a sequence in the prefix cache."""
        hits: list[int] = []
        link: Link = sequence.cache_salt
        if not self.looks_up(sequence):
            return _Prefix(hits, link, 0)
        size, token_ids, cached = self.block_size, sequence.token_ids, self._cached
        for stop in range(size, self._most_cached(sequence) + 1, size):
            block = cached.get((link, tuple(token_ids[stop - size : stop])))
            if block is None:
                break
            hits.append(block)
            link = self._link_of[block]
        num_cached = len(hits)
        if self.slots is not None:
            links = [self._link_of[block] for block in hits]
            count = self.slots.longest(links)
            hits, link = hits[:count], links[count - 1] if count else sequence.cache_salt
        return _Prefix(hits, link, num_cached)

    def _most_cached(self, sequence: Sequence) -> int:
        """Return the most leading tokens of a sequence that may be cached: the last one known is computed."""
        most = len(sequence.token_ids) - 1
        if self._only_prompts:
            most = min(most, sequence.num_prompt_tokens)
        return most

    def _admit_state(
        self,
        slots: StateSlots,
        sequence: Sequence,
        prefix: _Prefix,
        shared: Callable[[int], Iterable[int]],
    ) -> bool:
        """Allocate the slots of a sequence; return whether there were any for it."""
        cuts: set[int] = set()
        unit, size = slots.unit, self.block_size
        num_cached = len(prefix.blocks) * size
        # An equal prompt finds no more blocks than that: its last token is computed.
        stop = self._most_cached(sequence) // unit * unit
        looks_up = self.looks_up(sequence)
        if looks_up:
            cuts = {prefix.num_cached * size // unit * unit, stop, *shared(num_cached)}
        held = slots.admit(
            prefix.link if prefix.blocks and isinstance(prefix.link, int) else None,
            (count for count in cuts if count > num_cached),
        )
        if held is None:
            return False
        sequence.slots = held
        if self._only_prompts and (sequence.deterministic or self._repeats_output):
            held.num_chunked = sequence.num_prompt_tokens
        if looks_up:
            held.last, held.stop = num_cached, stop
            if held.keeps_inside:
                marks = marks_of(
                    sequence.num_tokens, num_cached, stop, slots.mark_unit, slots.num_free
                )
                held.marks = [count for count in marks if count not in cuts]
            else:
                held.interval = interval_of(sequence.num_tokens)
            if held.is_pending:
                self._pending[sequence] = None
        return True

    def _enter(self, key: Key, block: int) -> int:
        """Add a full block to the prefix cache; return the link of its content.

        If another block has the same content, the cache keeps the owned one, which is freed later.
        """
        twin = self._cached.get(key)
        if twin is None:
            self._num_links += 1
            link = self._num_links
        elif self._references[twin]:
            return self._link_of[twin]
        else:
            del self._idle[twin]
            link = self._remove(twin)  # which keeps its snapshot
            self._empty.release(twin)
        self._cached[key] = block
        self._key_of[block] = key
        self._link_of[block] = link
        return link

    def _remove(self, block: int) -> int:
        """Remove a block from the prefix cache; return the link it had."""
        del self._cached[self._key_of.pop(block)]
        return self._link_of.pop(block)

    def _forget(self, block: int) -> None:
        """Remove a block and its content's snapshot from the prefix cache."""
        link = self._remove(block)
        if self.slots is not None:
            self.slots.forget(link)

    def _evict(self, block: int) -> None:
        """Make an idle block empty."""
        del self._idle[block]
        self._forget(block)
        self._empty.release(block)

    def _extend(self, table: list[int], count: int) -> None:
        """Append `count` free blocks to a block table."""
        empty = self._empty
        for _ in range(count - empty.num_free):
            self._evict(next(iter(self._idle)))
        while count > 0:
            start = table[-1] + 1 if table else -1
            size, offset = empty.size_from(start), 0
            if not size:
                start, size, offset = self._open_place(count)
            num_taken = min(count, size - offset)
            empty.take(start, offset, num_taken)
            first = start + offset
            for block in range(first, first + num_taken):
                self._references[block] = 1
            table.extend(range(first, first + num_taken))
            count -= num_taken

    def _open_place(self, count: int) -> tuple[int, int, int]:
        """Choose a run of empty blocks for `count` blocks: its start, its size, and the offset of the first block."""
        empty, idle = self._empty, self._idle
        start, stop = empty.largest()
        while stop - start < count and idle and empty.num_free < self._num_reserved:
            self._evict(next(iter(idle)))
            start, stop = empty.largest()
        size = stop - start
        is_growing_into = start > 0 and self._references[start - 1] > 0
        return start, size, max(0, size - count) // 2 if is_growing_into else 0
