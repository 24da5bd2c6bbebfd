"""Who owns which block of the KV cache, and which blocks' content can serve another sequence.

It knows token ids and block numbers, not tensors, and decides nothing about the order of service.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from server.engine.core.free_blocks import FreeBlocks
from server.engine.core.sequence import Sequence

Link: TypeAlias = int | str | None
"""Names one content of the leading blocks of a sequence: a number, or the cache salt for no block at all."""

Key: TypeAlias = tuple[Link, tuple[int, ...]]
"""One more full block: what it follows, and its token ids."""


class BlockManager:
    """Owns the blocks of the KV cache: reference counts, prefix cache, placement.

    A block is *owned* (in one or more block tables), *idle* (in none, but its content is in the
    prefix cache) or *empty*. Sequences share a block only while it is full and all its keys and
    values are computed, so it is never written again and need not be copied.

    Prefix cache: a content is found by (link of what precedes it, its token ids). A link is a
    number given once to one content and never again, so an equal key means an equal prefix from the
    first token on: the dictionary's hash only finds the entry, its comparison of the key decides.
    Idle blocks are evicted in the order in which they were freed, and a sequence frees its last
    block first, so a prefix outlives what builds on it.

    Placement: attention on a CPU reads neighbouring blocks without copying. A block table grows
    into the empty block after its last one; otherwise it goes on in the largest empty stretch, in
    its middle where an owned block lies before it, since that block's sequence may grow this way.

    Only the scheduler calls it, from one thread.

    Invariants (`check_invariants`): owned + idle + empty blocks are all blocks; a block has as many
    references as block tables name it, and these agree on every token up to its end.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens of one block.
        enable_prefix_caching: whether full blocks can serve later sequences.
        contiguity_reserve: share of the pool, in [0, 1). While fewer blocks than that are empty,
            idle ones are evicted before there is need, until the sequence at hand fits in one
            stretch. 0 evicts only what is needed and lets block tables scatter once all blocks
            have been used: right for kernels that do not care.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        contiguity_reserve: float = 0.0,
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

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns: empty and idle ones."""
        return self._empty.num_free + len(self._idle)

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that no sequence owns and whose content can still serve one."""
        return len(self._idle)

    @property
    def owners(self) -> AbstractSet[Sequence]:
        """The sequences that own blocks."""
        return self._owners

    def looks_up(self, sequence: Sequence) -> bool:
        """Whether the prefix cache is asked for a sequence's leading tokens."""
        return self.enable_prefix_caching and not sequence.sampling.prompt_logprobs

    def admit(self, sequence: Sequence, num_spare: int = 0) -> bool:
        """Give a sequence the blocks of all its known tokens and of one more.

        Blocks with its leading tokens come from the prefix cache, save that its last known token
        is always left to compute; `num_computed_tokens` then says how far they reach.

        Args:
            sequence: one that owns no block.
            num_spare: blocks that must stay free.

        Returns:
            False, with nothing changed, where too few blocks are free.
        """
        hits, link = self._find_prefix(sequence)
        references = self._references
        num_new = sequence.num_tokens // self.block_size + 1 - len(hits)
        num_idle_hits = sum(not references[block] for block in hits)
        if num_new + num_idle_hits + num_spare > self.num_free_blocks:
            return False
        for block in hits:
            if not references[block]:
                del self._idle[block]
            references[block] += 1
        sequence.block_table = hits
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_linked_blocks = len(hits)
        sequence.prefix_link = link
        self._owners.add(sequence)
        self._extend(hits, num_new)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthen the block table of an admitted sequence so that it holds `num_tokens` tokens.

        Returns:
            False, with nothing changed, where too few blocks are free.
        """
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if num_new > self.num_free_blocks:
            return False
        self._extend(sequence.block_table, num_new)
        return True

    def cache_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Enter the blocks that have been filled since the last call.

        Args:
            sequence: an admitted one.
            num_tokens: its leading tokens whose ids are known and which are computed.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(sequence.num_linked_blocks, num_tokens // size):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.prefix_link = self._enter(
                (sequence.prefix_link, tokens), sequence.block_table[index]
            )
            sequence.num_linked_blocks += 1

    def free(self, sequence: Sequence, discard_cached: bool = False) -> None:
        """Take all blocks from an admitted sequence.

        Args:
            sequence: keeps its tokens; none of them counts as computed any more.
            discard_cached: whether no block of it may serve another sequence again, because its
                keys or values may be broken. Sequences that share one now keep it.
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
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def check_invariants(self) -> None:
        """Assert that the books balance. Takes time in proportion to the pool and the tokens."""
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

    def _check_sequence(self, sequence: Sequence) -> None:
        table = sequence.block_table
        assert len(set(table)) == len(table), f"{sequence} owns a block twice"
        assert sequence.num_computed_tokens <= len(table) * self.block_size
        assert sequence.num_linked_blocks * self.block_size <= sequence.num_computed_tokens
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

    def _find_prefix(self, sequence: Sequence) -> tuple[list[int], Link]:
        """Cached blocks with the sequence's leading tokens, and the link of their content."""
        hits: list[int] = []
        link: Link = sequence.cache_salt
        if not self.looks_up(sequence):
            return hits, link
        size, token_ids, cached = self.block_size, sequence.token_ids, self._cached
        for stop in range(size, len(token_ids), size):
            block = cached.get((link, tuple(token_ids[stop - size : stop])))
            if block is None:
                break
            hits.append(block)
            link = self._link_of[block]
        return hits, link

    def _enter(self, key: Key, block: int) -> int:
        """Enter a full block under its key; returns the link of its content.

        Of two blocks with one content the cache keeps the owned one: it is the last to be freed.
        """
        twin = self._cached.get(key)
        if twin is None:
            self._num_links += 1
            link = self._num_links
        elif self._references[twin]:
            return self._link_of[twin]
        else:
            link = self._evict(twin)
        self._cached[key] = block
        self._key_of[block] = key
        self._link_of[block] = link
        return link

    def _forget(self, block: int) -> int:
        """Take a block's content out of the prefix cache; returns the link it had."""
        del self._cached[self._key_of.pop(block)]
        return self._link_of.pop(block)

    def _evict(self, block: int) -> int:
        """Make an idle block empty; returns the link its content had."""
        del self._idle[block]
        link = self._forget(block)
        self._empty.release(block)
        return link

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
        """Where a new run of `count` blocks goes: a stretch's start, its size, the run's offset."""
        empty, idle = self._empty, self._idle
        start, stop = empty.largest()
        while stop - start < count and idle and empty.num_free < self._num_reserved:
            self._evict(next(iter(idle)))
            start, stop = empty.largest()
        size = stop - start
        is_growing_into = start > 0 and self._references[start - 1] > 0
        return start, size, max(0, size - count) // 2 if is_growing_into else 0
