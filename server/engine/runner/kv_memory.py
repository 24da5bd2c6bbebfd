"""How many tokens the KV cache may hold in the memory that is free now, and getting that memory.

Knows bytes and blocks; what a cache or a step is made of comes from the caller.

    free on the device now
    | kept for a step's activations | share for the cache             | left to others |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import torch

from model.device.memory import free_bytes, is_out_of_memory, release_cached

log = logging.getLogger("tessera.engine")

_Cache = TypeVar("_Cache")

# Of the memory that is free, the share the cache may take. A CPU's memory belongs to other programs as well; on a
# GPU the rest lets a second service start beside this one.
_SHARE: Final[Mapping[str, float]] = {"cpu": 0.25, "cuda": 0.8}

# Another process may take between our look and our allocation what we saw: each further attempt looks again and
# takes half of that share, so that two which start together and both fail fit in beside each other.
_ATTEMPTS: Final = 4

_MIB: Final = 2**20
_GIB: Final = 2**30


class NotEnoughMemoryError(Exception):
    """The KV cache does not fit; the text names both sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheDemand:
    """What the cache is wanted for.

    Attributes:
        requested_tokens: what the operator asked for; taken as it is, if it fits.
        requested_gib: the same in GiB; at most one of the two is given.
        useful_tokens: more than the engine could ever fill is not allocated.
        block_size: tokens in a block.
        bytes_per_token: keys and values of all layers, in bytes.
        kept_bytes: of the free memory, what a step needs beside the cache, in bytes.
    """

    requested_tokens: int | None
    requested_gib: float | None
    useful_tokens: int
    block_size: int
    bytes_per_token: int
    kept_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self.block_size * self.bytes_per_token

    @property
    def is_explicit(self) -> bool:
        """Whether the operator asked for a size."""
        return self.requested_tokens is not None or self.requested_gib is not None


class KVCacheSize(NamedTuple):
    """How many blocks, and why so many."""

    num_blocks: int
    why: str


def kv_cache_size(
    demand: KVCacheDemand, device: torch.device, share: float | None = None
) -> KVCacheSize:
    """Choose the size of the KV cache.

    Args:
        demand: what it is for.
        device: where it will be.
        share: of the free memory, what a size that nobody asked for may take, 0 to 1; None takes the device's own.

    Raises:
        NotEnoughMemoryError: the request, or a single block, is larger than what is free.
    """
    share = _SHARE[device.type] if share is None else share
    free = free_bytes(device)
    left = max(0, free - demand.kept_bytes)
    if demand.is_explicit:
        return _requested(demand, left, _stated(free, demand, device))
    useful = -(-demand.useful_tokens // demand.block_size)
    affordable = int(left * share) // demand.block_bytes
    if affordable < 1:
        raise NotEnoughMemoryError(
            f"one block of the KV cache needs {demand.block_bytes / _MIB:.2f} MiB, "
            f"{share:.0%} of what can be used are {left * share / _MIB:.2f} MiB: "
            f"{_stated(free, demand, device)}"
        )
    if useful <= affordable:
        return KVCacheSize(useful, "all that the sequences of a step could fill")
    return KVCacheSize(affordable, f"{share:.0%} of {_stated(free, demand, device)}")


def allocate_kv_cache(
    demand: KVCacheDemand, device: torch.device, allocate: Callable[[int], _Cache]
) -> _Cache:
    """Choose a size and allocate it; where another process was faster, look again and take less.

    Args:
        demand: what it is for.
        device: where it will be.
        allocate: makes a cache of so many blocks, and whatever else must fit beside it.

    Raises:
        NotEnoughMemoryError: what was asked for, or the least that serves, does not fit.
    """
    for attempt in itertools.count():
        size = kv_cache_size(demand, device, _SHARE[device.type] / 2**attempt)
        num_bytes = size.num_blocks * demand.block_bytes
        tokens = size.num_blocks * demand.block_size
        wanted = f"KV cache of {tokens} tokens, {num_bytes / _GIB:.2f} GiB"
        try:
            cache = allocate(size.num_blocks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refusal = str(error).partition("\n")[0]
        else:
            log.info("%s: %s", wanted, size.why)
            return cache
        # Only here, past the handler, have the frames gone that held what was allocated.
        release_cached(device)
        failed = f"a {wanted} ({size.why}), could not be allocated: {refusal}"
        if demand.is_explicit or attempt + 1 == _ATTEMPTS:
            raise NotEnoughMemoryError(
                f"{failed}; {free_bytes(device) / _MIB:.0f} MiB are free on {device} now, "
                "another process may have taken memory meanwhile"
            )
        log.warning("%s; trying less", failed)
    raise AssertionError("unreachable")


def _requested(demand: KVCacheDemand, left: int, stated: str) -> KVCacheSize:
    if demand.requested_tokens is not None:
        setting, value = "--kv-cache-tokens", f"{demand.requested_tokens} tokens"
        num_blocks = -(-demand.requested_tokens // demand.block_size)
    else:
        assert demand.requested_gib is not None
        setting, value = "--kv-cache-gib", f"{demand.requested_gib:g} GiB"
        num_blocks = int(demand.requested_gib * _GIB) // demand.block_bytes
        if num_blocks < 1:
            raise NotEnoughMemoryError(
                f"--kv-cache-gib {demand.requested_gib:g} is less than one block of the KV cache, "
                f"which needs {demand.block_bytes / _GIB:.2g} GiB"
            )
    if num_blocks * demand.block_bytes > left:
        raise NotEnoughMemoryError(
            f"a KV cache of {value} needs {num_blocks * demand.block_bytes / _MIB:.0f} MiB, "
            f"at most {left / _MIB:.0f} MiB can be used: {stated}"
        )
    return KVCacheSize(num_blocks, f"as {setting} asks")


def _stated(free: int, demand: KVCacheDemand, device: torch.device) -> str:
    text = f"{free / _GIB:.2f} GiB free on {device}"
    if demand.kept_bytes:
        text += f" less {demand.kept_bytes / _GIB:.2f} GiB for the activations of a step"
    return text
