"""Chooses the engine process of a request: by the prefix of its prompt or its adapter, within bounds on loads.

Pure bookkeeping, without sockets and clocks. An index of each engine holds what its prefix cache probably holds: the
blocks of the prompts that were sent to it; and the adapters that it probably has. They decide speed only, never
results: an engine computes or reads what it lacks.

Source of the rule: the cache-aware policy of sgl-router, with other bounds (docs/decisions/0036-data-parallel.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final

MIN_MATCH: Final = 0.3
"""Share of the prompt's tokens that an engine must hold for the prompt to follow its prefix."""
MAX_GAP: Final = 8
"""Requests that the engine with the prefix may have more than the least loaded one."""
MAX_RATIO: Final = 1.5
"""How many times as many; a prompt leaves the engine with its prefix only if both bounds are exceeded."""


class PrefixIndex:
    """Which leading blocks of prompts an engine has computed, as hashes; at most `capacity`.

    The hash of a block includes those of all blocks before it. The least recently used block is dropped first; a block
    counts as used after those that follow it, so that no block is left whose predecessor is missing.

    A collision of hashes makes a match too long, which costs time and changes no result.

    Args:
        capacity: blocks of the engine's KV cache; with 0, nothing is kept.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[int]) -> int:
        """Return how many leading keys are in the index."""
        blocks = self._blocks
        if not keys or keys[0] not in blocks:  # the usual case of a new prompt
            return 0
        low, high = 1, len(keys)
        while low < high:  # a key is present only if all keys before it are
            middle = (low + high + 1) // 2
            if keys[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, keys: Sequence[int]) -> None:
        """Note the blocks of a prompt, of which the first `capacity` fit."""
        blocks = self._blocks
        for key in reversed(keys[: self._capacity]):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)


def block_keys(token_ids: Sequence[int], block_size: int, part: Hashable) -> list[int]:
    """Return a hash for each full block of a prompt, of the block and all before it.

    Args:
        token_ids: of the prompt.
        block_size: tokens in a block.
        part: of the prefix cache; prompts of different parts share no blocks.
    """
    keys: list[int] = []
    key = hash(part)
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = hash((key, *token_ids[end - block_size : end]))
        keys.append(key)
    return keys


class RecentAdapters:
    """The adapters that an engine probably has: the last `capacity` that requests for it have chosen.

    Args:
        capacity: adapters that it holds; with 0, none is kept.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digest: str) -> None:
        """Note that a request has an adapter."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._capacity:
            self._digests.popitem(last=False)


class Router:
    """Chooses engines for requests, and remembers which prompts and adapters it has sent where.

    A prompt goes to the engine with its longest known prefix, if that has `MIN_MATCH` of its tokens and the engine is
    not overloaded: `MAX_GAP` requests and `MAX_RATIO` times more than the least loaded one. Else it goes to the least
    loaded one of those that have its adapter, unless that is overloaded, and else to the least loaded one of all. Of
    equal engines the one with the fewest adapters is chosen if the request has one, then that with the fewest blocks in
    its index, then the first. The same calls lead to the same choices.

    Args:
        num_engines: the engines, numbered from 0. None has a prefix cache until `begin`.
        block_size: tokens in a block of their KV caches.
        max_gap, max_ratio: bounds on the difference of loads.
    """

    def __init__(
        self,
        num_engines: int,
        block_size: int,
        max_gap: int = MAX_GAP,
        max_ratio: float = MAX_RATIO,
    ) -> None:
        self._indexes = [PrefixIndex() for _ in range(num_engines)]
        self._adapters = [RecentAdapters() for _ in range(num_engines)]
        self._block_size = block_size
        self._max_gap = max_gap
        self._max_ratio = max_ratio

    def begin(self, engine: int, num_blocks: int = 0, num_adapters: int = 0) -> None:
        """Forget what an engine has: its process has ended, or a new one is ready.

        Args:
            engine: its number.
            num_blocks: of its KV cache; 0 if it keeps no prefixes.
            num_adapters: that it holds.
        """
        self._indexes[engine] = PrefixIndex(num_blocks)
        self._adapters[engine] = RecentAdapters(num_adapters)

    def choose(
        self,
        token_ids: Sequence[int],
        part: Hashable,
        loads: Sequence[int],
        ready: Collection[int],
        adapter: str | None = None,
    ) -> int:
        """Choose the engine of a request, which the caller sends to it.

        Args:
            token_ids: the prompt.
            part: see `block_keys`.
            loads: requests in flight of each engine.
            ready: the engines to choose from, at least one.
            adapter: digest of the request's adapter; None for none.
        """
        keys = block_keys(token_ids, self._block_size, part)
        matches = {engine: self._indexes[engine].match(keys) for engine in ready}

        def by_load(engine: int) -> tuple[int, int, int, int]:
            num_adapters = 0 if adapter is None else len(self._adapters[engine])
            return loads[engine], num_adapters, len(self._indexes[engine]), engine

        chosen = min(ready, key=lambda engine: (-matches[engine], *by_load(engine)))
        least = min(ready, key=by_load)
        matched = matches[chosen] * self._block_size
        if matched < MIN_MATCH * len(token_ids) or self._overloaded(loads[chosen], loads[least]):
            having = [it for it in ready if adapter is not None and adapter in self._adapters[it]]
            chosen = min(having, key=by_load, default=least)
            if self._overloaded(loads[chosen], loads[least]):
                chosen = least
        self._indexes[chosen].add(keys)
        if adapter is not None:
            self._adapters[chosen].add(adapter)
        return chosen

    def _overloaded(self, load: int, least: int) -> bool:
        return load - least > self._max_gap and load > self._max_ratio * least
