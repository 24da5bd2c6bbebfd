"""Requirements for the size of the KV cache, and the check of a size that the operator set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

MIB: Final = 2**20
GIB: Final = 2**30
CUDA_BYTES: Final = 768 * MIB
"""Memory that CUDA and PyTorch take in a process beside tensors until the cache is allocated, about: 0.68 GiB on an
H200. It cannot be measured while other processes use the GPU."""


_SNAPSHOTS_PER_SEQUENCE: Final = 4
"""Slots for snapshots that are useful, for each sequence of a step: a conversation needs one or two, and prompts in
between have some."""


class NotEnoughMemoryError(Exception):
    """The KV cache does not fit; the text states the required and the available size."""


class Allowance(NamedTuple):
    """The part of a GPU's memory that an engine may use in all, set by --gpu-memory-utilization.

    Attributes:
        share: of the total memory, more than 0 and at most 1.
        total_bytes: of the GPU.
        held_bytes: that the engine has already, such as weights, without those of CUDA.
    """

    share: float
    total_bytes: int
    held_bytes: int

    @property
    def left_bytes(self) -> int:
        """Bytes that the engine may still allocate; negative if it has more than it may."""
        return int(self.share * self.total_bytes) - self.held_bytes - CUDA_BYTES

    def __str__(self) -> str:
        """State the bytes that are left, for messages."""
        return (
            f"{self.share:.4g} of {self.total_bytes / GIB:.2f} GiB (--gpu-memory-utilization) less "
            f"{self.held_bytes / GIB:.2f} GiB for the weights less {CUDA_BYTES / GIB:.2f} GiB for CUDA"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheDemand:
    """Requirements for the size of the KV cache.

    Attributes:
        requested_tokens: tokens set by the operator; never reduced.
        requested_gib: GiB set by the operator; excludes `requested_tokens`.
        allowance: what the engine may use in all; excludes the other two. The cache has the rest of it.
        useful_tokens: tokens that the engine can use at most; the default size never exceeds them.
        block_size: tokens in a block.
        bytes_per_token: bytes of the keys and values of all layers.
        kept_bytes: bytes that stay free for a step's activations.
        slot_bytes: bytes of a slot for states of fixed size, which the cache has beside its blocks; 0 if no layer has
            such a state.
        num_seqs: slots for running sequences.
        num_drafted: slots for the states after the tokens of drafts.
        requested_snapshots: slots for snapshots of the prefix cache; None for a number by the memory.
    """

    requested_tokens: int | None
    requested_gib: float | None
    useful_tokens: int
    block_size: int
    bytes_per_token: int
    kept_bytes: int = 0
    slot_bytes: int = 0
    num_seqs: int = 0
    num_drafted: int = 0
    requested_snapshots: int | None = 0
    allowance: Allowance | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self.block_size * self.bytes_per_token

    @property
    def num_running_slots(self) -> int:
        """Slots for running sequences and their drafts; 0 if no layer has a state of fixed size."""
        return self.num_seqs + self.num_drafted if self.slot_bytes else 0

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots whose number does not depend on the memory."""
        return self.slot_bytes * (self.num_running_slots + (self.requested_snapshots or 0))

    def num_snapshots(self, num_bytes: int) -> int:
        """Return the slots for snapshots, if their number is free and they may take so many bytes."""
        if self.requested_snapshots is not None or not self.slot_bytes:
            return self.requested_snapshots or 0
        return min(_SNAPSHOTS_PER_SEQUENCE * self.num_seqs, max(0, num_bytes) // self.slot_bytes)

    @property
    def is_explicit(self) -> bool:
        """Whether the operator set the size."""
        return self.requested_tokens is not None or self.requested_gib is not None


class KVCacheSize(NamedTuple):
    """Number of blocks, the reason for it, and slots for snapshots of states of fixed size."""

    num_blocks: int
    why: str
    num_snapshots: int = 0


def requested_size(demand: KVCacheDemand, left: int, stated: str) -> KVCacheSize:
    """Return the size that the operator set.

    Args:
        demand: with a size.
        left: bytes that the cache can use.
        stated: what that is, for the error.

    Raises:
        NotEnoughMemoryError: the size does not fit, or is less than a block.
    """
    if demand.requested_tokens is not None:
        setting, value = "--kv-cache-tokens", f"{demand.requested_tokens} tokens"
        num_blocks = -(-demand.requested_tokens // demand.block_size)
    else:
        assert demand.requested_gib is not None
        setting, value = "--kv-cache-gib", f"{demand.requested_gib:g} GiB"
        num_blocks = int(demand.requested_gib * GIB) // demand.block_bytes
        if num_blocks < 1:
            raise NotEnoughMemoryError(
                f"--kv-cache-gib {demand.requested_gib:g} is less than one block of the KV cache, "
                f"which needs {demand.block_bytes / GIB:.2g} GiB"
            )
    if num_blocks * demand.block_bytes > left:
        raise NotEnoughMemoryError(
            f"a KV cache of {value} needs {num_blocks * demand.block_bytes / MIB:.0f} MiB, "
            f"at most {left / MIB:.0f} MiB can be used: {stated}"
        )
    return KVCacheSize(num_blocks, f"set by {setting}")
