"""Chooses the size of the KV cache by the free memory, and allocates it.

Works on bytes and blocks only; the caller creates the cache.

    free on the device now
    | kept for a step's activations | share for the cache             | left to others |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from model.device.memory import free_bytes, is_out_of_memory, release_cached
from server.engine.core.memory.kv_demand import (
    GIB,
    MIB,
    KVCacheDemand,
    KVCacheSize,
    NotEnoughMemoryError,
)
from server.engine.runner.start.kv_sizes import default_share, size_within

log = logging.getLogger("tessera.engine")

_Cache = TypeVar("_Cache")

# Another process may allocate memory after it was measured. Each attempt measures again and halves the share, so that
# two processes that start together and both fail at first both fit in the end.
_ATTEMPTS: Final = 4


def kv_cache_size(
    demand: KVCacheDemand, device: torch.device, share: float | None = None
) -> KVCacheSize:
    """Choose the size of the KV cache.

    Args:
        demand: requirements for the size.
        device: the cache's device.
        share: share of the usable memory, 0 to 1, that a size may use that is not explicit; None takes the default.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or a single block, does not fit in the usable memory.
    """
    share = default_share(demand, device.type) if share is None else share
    return size_within(demand, free_bytes(device), share, str(device))


def slots_text(demand: KVCacheDemand, num_snapshots: int) -> str:
    """Describe the slots for states of fixed size."""
    count = demand.num_running_slots + num_snapshots
    return (
        f"states of fixed size take {count * demand.slot_bytes / GIB:.2f} GiB of that: {demand.num_seqs} for running "
        f"sequences, {demand.num_drafted} for drafts (--max-draft-tokens) and {num_snapshots} for snapshots of the "
        "prefix cache (--state-snapshots), "
        f"{demand.slot_bytes / MIB:.2f} MiB each"
    )


def allocate_kv_cache(
    demand: KVCacheDemand,
    device: torch.device,
    allocate: Callable[[int, int], _Cache],
    num_processes: int = 1,
) -> _Cache:
    """Choose a size and allocate the cache; if another process took the memory first, try a smaller size.

    Args:
        demand: requirements for the size.
        device: the cache's device.
        allocate: creates a cache of the given numbers of blocks and slots, and anything else that must fit in memory
            with it.
        num_processes: of engines and ranks of the service; on a CPU they share its memory.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or the last and smallest size, does not fit.
    """
    share = default_share(demand, device.type) / (num_processes if device.type == "cpu" else 1)
    for attempt in itertools.count():
        size = kv_cache_size(demand, device, share / 2**attempt)
        num_slots = demand.num_running_slots + size.num_snapshots
        num_bytes = size.num_blocks * demand.block_bytes + num_slots * demand.slot_bytes
        tokens = size.num_blocks * demand.block_size
        wanted = f"KV cache of {tokens} tokens, {num_bytes / GIB:.2f} GiB"
        try:
            log.info("%s: %s", wanted, size.why)
            if demand.slot_bytes:
                log.info("%s", slots_text(demand, size.num_snapshots))
            cache = allocate(size.num_blocks, num_slots)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refusal = str(error).partition("\n")[0]
        else:
            return cache
        # After the handler: until then, the exception's frames hold the allocated memory.
        release_cached(device)
        failed = f"a {wanted} ({size.why}), could not be allocated: {refusal}"
        if demand.is_explicit or attempt + 1 == _ATTEMPTS:
            raise NotEnoughMemoryError(
                f"{failed}; {free_bytes(device) / MIB:.0f} MiB are free on {device} now, "
                "another process may have allocated memory meanwhile"
            )
        log.warning("%s; trying a smaller size", failed)
    raise AssertionError("unreachable")
