"""Chooses the size of the KV cache by the free memory, and allocates it.

Works on bytes and blocks only; the caller creates the cache.

    free on the device now
    | kept for a step's activations | share for the cache             | left to others |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from model.device.memory import free_bytes, is_out_of_memory, release_cached
from server.engine.core.memory.kv_demand import (
    GIB,
    MIB,
    KVCacheDemand,
    KVCacheSize,
    NotEnoughMemoryError,
    requested_size,
)
from server.engine.core.memory.state_slots import slots_needed

if TYPE_CHECKING:
    from model.network.state import StateSpec
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineConfig

log = logging.getLogger("tessera.engine")

_Cache = TypeVar("_Cache")

# Share of the free memory that the cache may use by default. Other programs need the memory of a CPU as well; on a GPU,
# the rest lets a second service start on the same device.
SHARE: Final[Mapping[str, float]] = {"cpu": 0.25, "cuda": 0.8}

# Another process may allocate memory after it was measured. Each attempt measures again and halves the share, so that
# two processes that start together and both fail at first both fit in the end.
_ATTEMPTS: Final = 4


def kv_cache_demand(
    config: EngineConfig, limits: SchedulerConfig, state: StateSpec, kept_bytes: int
) -> KVCacheDemand:
    """Return the requirements for the cache of an engine.

    Args:
        config: of the engine.
        limits: of a step.
        state: what a sequence keeps.
        kept_bytes: bytes that stay free for a step's activations.
    """
    blocks_per_sequence = -(-limits.max_model_len // config.block_size)
    return KVCacheDemand(
        requested_tokens=config.kv_cache_tokens,
        requested_gib=config.kv_cache_gib,
        useful_tokens=limits.max_num_seqs * blocks_per_sequence * config.block_size,
        block_size=config.block_size,
        bytes_per_token=state.token_bytes,
        kept_bytes=kept_bytes,
        slots_bytes=num_slots(config, limits) * state.slot_bytes,
    )


def num_slots(config: EngineConfig, limits: SchedulerConfig) -> int:
    """Return the slots of an engine's cache, where layers have a state of fixed size."""
    return slots_needed(limits.max_num_seqs, enable_prefix_caching=config.enable_prefix_caching)


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
    share = SHARE[device.type] if share is None else share
    return size_within(demand, free_bytes(device), share, str(device))


def size_within(demand: KVCacheDemand, free: int, share: float, where: str) -> KVCacheSize:
    """Choose the size of the KV cache on a device with a number of free bytes; the device may be absent.

    Args:
        demand: requirements for the size.
        free: bytes that are free, including those that stay free for activations.
        share: share of the usable memory, 0 to 1, that a default size may use.
        where: name of the device, for messages.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or a single block, does not fit.
    """
    left = max(0, free - demand.kept_bytes - demand.slots_bytes)
    if demand.is_explicit:
        return requested_size(demand, left, _stated(free, demand, where))
    useful = -(-demand.useful_tokens // demand.block_size)
    affordable = int(left * share) // demand.block_bytes
    if affordable < 1:
        raise NotEnoughMemoryError(
            f"one block of the KV cache needs {demand.block_bytes / MIB:.2f} MiB, but "
            f"{share:.0%} of the usable memory is {left * share / MIB:.2f} MiB: "
            f"{_stated(free, demand, where)}"
        )
    if useful <= affordable:
        return KVCacheSize(useful, "enough for all sequences of a step at full length")
    return KVCacheSize(affordable, f"{share:.0%} of {_stated(free, demand, where)}")


def allocate_kv_cache(
    demand: KVCacheDemand,
    device: torch.device,
    allocate: Callable[[int], _Cache],
    num_processes: int = 1,
) -> _Cache:
    """Choose a size and allocate the cache; if another process took the memory first, try a smaller size.

    Args:
        demand: requirements for the size.
        device: the cache's device.
        allocate: creates a cache of the given number of blocks, and anything else that must fit in memory with it.
        num_processes: of engines and ranks of the service; on a CPU they share its memory.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or the last and smallest size, does not fit.
    """
    share = SHARE[device.type] / (num_processes if device.type == "cpu" else 1)
    for attempt in itertools.count():
        size = kv_cache_size(demand, device, share / 2**attempt)
        num_bytes = size.num_blocks * demand.block_bytes + demand.slots_bytes
        tokens = size.num_blocks * demand.block_size
        wanted = f"KV cache of {tokens} tokens, {num_bytes / GIB:.2f} GiB"
        try:
            log.info("%s: %s", wanted, size.why)
            cache = allocate(size.num_blocks)
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


def _stated(free: int, demand: KVCacheDemand, where: str) -> str:
    text = f"{free / GIB:.2f} GiB free on {where}"
    if demand.kept_bytes:
        text += f" less {demand.kept_bytes / GIB:.2f} GiB for the activations of a step"
    if demand.slots_bytes:
        text += f" less {demand.slots_bytes / GIB:.2f} GiB for the states of sequences"
    return text
