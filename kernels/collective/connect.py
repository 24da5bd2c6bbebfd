"""Chooses how the ranks of a host communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.collective.nccl import NCCLCommunicator
from kernels.collective.shared_memory import SharedMemoryCommunicator

if TYPE_CHECKING:
    import torch

    from kernels.collective.communicator import Communicator
    from kernels.collective.endpoint import RankEndpoint


def connect(endpoint: RankEndpoint, device: torch.device) -> Communicator:
    """Return the communicator of a rank; all ranks call this at the same time.

    Args:
        endpoint: of this rank. Its descriptors stay the caller's, and open as long as the communicator is used.
        device: of the tensors; a GPU of its own for each rank.

    Raises:
        OSError: the operating system refuses.
        RankLostError: a rank has ended.
    """
    if device.type == "cpu":
        return SharedMemoryCommunicator(endpoint)
    return NCCLCommunicator(endpoint, device)
