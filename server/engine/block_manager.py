"""Who owns which block of the KV cache, and which blocks' content can serve another sequence.

It knows token ids and block numbers, not tensors, and decides nothing about the order of service.
"""

from __future__ import annotations

from server.engine.sequence import Sequence


class BlockManager:
    """Owns the blocks of the KV cache: reference counts, prefix cache, placement.

    The scheduler alone calls it, from one thread.

    Invariants (`check_invariants`): every block is either owned or free; a block has as many
    references as sequences list it; only blocks of the prefix cache have several owners.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns, those with reusable content included."""
        raise NotImplementedError

    @property
    def num_idle_cached_blocks(self) -> int:
        """Free blocks whose content can still serve a sequence."""
        raise NotImplementedError

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks of its whole known context and of one more token.

        Returns:
            False, with nothing changed, where the free blocks do not suffice.
        """
        raise NotImplementedError

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend a sequence's block table to hold `num_tokens` tokens.

        Returns:
            False, with nothing changed, where the free blocks do not suffice.
        """
        raise NotImplementedError

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Offer a sequence's blocks that are full and computed to later sequences."""
        raise NotImplementedError

    def free(self, sequence: Sequence, discard_cached: bool = False) -> None:
        """Take all blocks from a sequence."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Assert that the books balance."""
        raise NotImplementedError
