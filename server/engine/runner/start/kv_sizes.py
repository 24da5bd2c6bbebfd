"""The size of the KV cache for a number of free bytes. Imports no PyTorch, since `tessera size` does without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from server.engine.core.memory.kv_demand import (
    GIB,
    MIB,
    Allowance,
    KVCacheDemand,
    KVCacheSize,
    NotEnoughMemoryError,
    requested_size,
)

if TYPE_CHECKING:
    from model.network.state import StateSpec
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineConfig

# Share of the free memory that the cache may use by default. Other programs need the memory of a CPU as well; on a GPU,
# the rest lets a second service start on the same device.
SHARE: Final[Mapping[str, float]] = {"cpu": 0.25, "cuda": 0.8}

_SNAPSHOT_SHARE: Final = 0.25
"""Of the memory for a cache whose size is not set. A snapshot is as large as the keys and values of about 1,500 tokens
(Qwen3.5-0.8B: 18.9 MB and 12 KiB), and a prefix of some thousand tokens is worth one or two."""

# Memory needed in addition to a step's tensors: for recorded steps and for kernels that the driver loads at their first
# use, 0.43 GiB on an H200, and for gaps between tensors of steps of different sizes.
GPU_HEADROOM_BYTES: Final = 512 * MIB

# Memory that NCCL takes on each GPU of a model that several share: 1.27 GiB on two H200.
NCCL_BYTES: Final = 1536 * MIB


def kv_cache_demand(
    config: EngineConfig,
    limits: SchedulerConfig,
    state: StateSpec,
    kept_bytes: int,
    allowance: Allowance | None = None,
) -> KVCacheDemand:
    """Return the requirements for the cache of an engine.

    Args:
        config: of the engine.
        limits: of a step.
        state: what a sequence keeps.
        kept_bytes: bytes that stay free for a step's activations.
        allowance: what the engine may use of a GPU; None if that is not set, and on a CPU.
    """
    if allowance is not None and config.tensor_parallel > 1:
        # Otherwise the memory that the default share leaves has room for it.
        kept_bytes += NCCL_BYTES
    blocks_per_sequence = -(-limits.max_model_len // config.block_size)
    return KVCacheDemand(
        requested_tokens=config.kv_cache_tokens,
        requested_gib=config.kv_cache_gib,
        useful_tokens=limits.max_num_seqs * blocks_per_sequence * config.block_size,
        block_size=config.block_size,
        bytes_per_token=state.token_bytes,
        kept_bytes=kept_bytes,
        slot_bytes=state.slot_bytes,
        num_seqs=limits.max_num_seqs,
        num_drafted=limits.max_queries - 1,
        requested_snapshots=config.state_snapshots if config.enable_prefix_caching else 0,
        allowance=allowance,
    )


def default_share(demand: KVCacheDemand, device_type: str) -> float:
    """Return the share of the usable memory that the cache may use where the operator does not set its size."""
    return SHARE[device_type] if demand.allowance is None else 1.0


def size_within(demand: KVCacheDemand, free: int, share: float, where: str) -> KVCacheSize:
    """Choose the size of the KV cache on a device with a number of free bytes; the device may be absent.

    Args:
        demand: requirements for the size.
        free: bytes that are free, including those that stay free for activations.
        share: share of the usable memory, 0 to 1, that a size may use that is not explicit. A quarter of that, or of
            an explicit size beside it, is for snapshots of states of fixed size, if their number is free.
        where: name of the device, for messages.

    Raises:
        NotEnoughMemoryError: the size set by the operator, or a single block, does not fit.
    """
    usable, stated = free, f"{free / GIB:.2f} GiB free on {where}"
    if demand.allowance is not None:
        if demand.allowance.left_bytes > free:
            stated += f", which is less than {demand.allowance}"
        else:
            usable, stated = demand.allowance.left_bytes, f"{demand.allowance}"
    left = max(0, usable - demand.kept_bytes - demand.slots_bytes)
    stated += _less(demand)
    if demand.is_explicit:
        size = requested_size(demand, left, stated)
        cache = size.num_blocks * demand.block_bytes
        most = min((left - cache) * share, cache * _SNAPSHOT_SHARE)
        return size._replace(num_snapshots=demand.num_snapshots(int(most)))
    useful = -(-demand.useful_tokens // demand.block_size)
    for_cache = int(left * share)
    num_snapshots = demand.num_snapshots(int(for_cache * _SNAPSHOT_SHARE))
    if demand.requested_snapshots is None:
        for_cache -= num_snapshots * demand.slot_bytes
    affordable = for_cache // demand.block_bytes
    if affordable < 1:
        raise NotEnoughMemoryError(
            f"one block of the KV cache needs {demand.block_bytes / MIB:.2f} MiB, but "
            f"{share:.0%} of the usable memory is {left * share / MIB:.2f} MiB: {stated}"
        )
    if useful <= affordable and demand.allowance is None:
        why = "enough for all sequences of a step at full length"
        return KVCacheSize(useful, why, num_snapshots)
    part = "" if share == 1 else f"{share:.0%} of "
    return KVCacheSize(affordable, f"{part}{stated}", num_snapshots)


def _less(demand: KVCacheDemand) -> str:
    text = ""
    if demand.kept_bytes:
        text += f" less {demand.kept_bytes / GIB:.2f} GiB for the activations of a step"
    if demand.slots_bytes:
        text += f" less {demand.slots_bytes / GIB:.2f} GiB for the states of sequences"
    return text
