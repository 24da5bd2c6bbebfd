"""How many tokens the KV cache may hold in the memory that is free now."""

from __future__ import annotations

import torch

from model.memory import free_bytes

# Of the memory that is free, the share the cache may take. A CPU's memory belongs to other programs as well.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9


class NotEnoughMemoryError(Exception):
    """The KV cache does not fit; the text names both sizes in MiB."""


def kv_cache_blocks(
    *,
    requested_tokens: int | None,
    useful_tokens: int,
    block_size: int,
    bytes_per_token: int,
    device: torch.device,
) -> int:
    """Number of blocks of the KV cache.

    Args:
        requested_tokens: what the operator asked for; taken as it is, if it fits.
        useful_tokens: more than the engine could ever fill is not allocated.
        block_size: tokens in a block.
        bytes_per_token: keys and values of all layers, in bytes.
        device: where the cache will be.

    Raises:
        NotEnoughMemoryError: the request, or a single block, is larger than what is free.
    """
    free = free_bytes(device)
    block_bytes = block_size * bytes_per_token
    if requested_tokens is not None:
        num_blocks = -(-requested_tokens // block_size)
        if num_blocks * block_bytes > free:
            raise NotEnoughMemoryError(
                f"a KV cache of {requested_tokens} tokens needs {num_blocks * block_bytes / 2**20:.0f} MiB, "
                f"free on {device} are {free / 2**20:.0f} MiB"
            )
        return num_blocks
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    num_blocks = min(-(-useful_tokens // block_size), int(free * share) // block_bytes)
    if num_blocks < 1:
        raise NotEnoughMemoryError(
            f"one block of the KV cache needs {block_bytes / 2**20:.2f} MiB, "
            f"{share:.0%} of what is free on {device} are {free * share / 2**20:.2f} MiB"
        )
    return num_blocks
