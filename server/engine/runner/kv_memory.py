"""Chooses the size of the KV cache by the free memory, and allocates it.

Works on bytes and blocks only; the caller creates the cache.

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

# Share of the free memory that the cache may use by default. Other programs need the memory of a CPU as well; on a GPU,
# the rest lets a second service start on the same device.
_SHARE: Final[Mapping[str, float]] = {"cpu": 0.25, "cuda": 0.8}

# Another process may allocate memory after it was measured. Each attempt measures again and halves the share, so that
# two processes that start together and both fail at first both fit in the end.
_ATTEMPTS: Final = 4

_MIB: Final = 2**20
_GIB: Final = 2**30


class NotEnoughMemoryError(Exception):
    """The KV cache does not fit; the text states the required and the available size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheDemand:
    """Requirements for the size of the KV cache.

    Attributes:
        requested_tokens: tokens set by the operator; never reduced.
        requested_gib: GiB set by the operator; excludes `requested_tokens`.
        useful_tokens: tokens that the engine can use at most; the default size never exceeds them.
        block_size: tokens in a block.
        bytes_per_token: bytes of the keys and values of all layers.
        kept_bytes: bytes that stay free for a step's activations.
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
        """Whether the operator set the size."""
        return self.requested_tokens is not None or self.requested_gib is not None


class KVCacheSize(NamedTuple):
    """Number of blocks, and the reason for it."""

    num_blocks: int
    why: str


def kv_cache_size(
    demand: KVCacheDemand, device: torch.device, share: float | None = None
) -> KVCacheSize:
    """Choose the size of the KV cache.

    Args:
        demand: requirements for the size.
        device: the cache's device.
        share: share of the usable memory, 0 to 1, that a default size may use; None takes the device's default.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or a single block, does not fit in the usable memory.
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
            f"one block of the KV cache needs {demand.block_bytes / _MIB:.2f} MiB, but "
            f"{share:.0%} of the usable memory is {left * share / _MIB:.2f} MiB: "
            f"{_stated(free, demand, device)}"
        )
    if useful <= affordable:
        return KVCacheSize(useful, "enough for all sequences of a step at full length")
    return KVCacheSize(affordable, f"{share:.0%} of {_stated(free, demand, device)}")


def allocate_kv_cache(
    demand: KVCacheDemand, device: torch.device, allocate: Callable[[int], _Cache]
) -> _Cache:
    """Choose a size and allocate the cache; if another process took the memory first, try a smaller size.

    Args:
        demand: requirements for the size.
        device: the cache's device.
        allocate: creates a cache of the given number of blocks, and anything else that must fit in memory with it.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or the last and smallest size, does not fit.
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
        # After the handler: until then, the exception's frames hold the allocated memory.
        release_cached(device)
        failed = f"a {wanted} ({size.why}), could not be allocated: {refusal}"
        if demand.is_explicit or attempt + 1 == _ATTEMPTS:
            raise NotEnoughMemoryError(
                f"{failed}; {free_bytes(device) / _MIB:.0f} MiB are free on {device} now, "
                "another process may have allocated memory meanwhile"
            )
        log.warning("%s; trying a smaller size", failed)
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
    return KVCacheSize(num_blocks, f"set by {setting}")


def _stated(free: int, demand: KVCacheDemand, device: torch.device) -> str:
    text = f"{free / _GIB:.2f} GiB free on {device}"
    if demand.kept_bytes:
        text += f" less {demand.kept_bytes / _GIB:.2f} GiB for the activations of a step"
    return text
