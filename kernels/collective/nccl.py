"""Collective operations of ranks on the GPUs of a host: NCCL, and memory that the GPUs read of each other."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from kernels.collective.communicator import OrderedSum, repeated
from kernels.collective.shared_memory import SharedMemoryCommunicator
from kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.collective.endpoint import RankEndpoint
    from kernels.collective.one_shot import OneShotSum

_logger = logging.getLogger(__name__)

# PyTorch 2.13 renamed it; 2.11 has only the old name.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class NCCLCommunicator(OrderedSum):
    """Communicates by NCCL, or by a launch for small tensors; tensors on the CPU go through shared memory.

    Args:
        endpoint: of this rank. Its descriptors stay the caller's, and open as long as this object is used.
        device: a GPU of its own for each rank.

    Raises:
        OSError: the operating system refuses.
        RankLostError: a rank has ended.
        KernelError: this host has no usable loopback interface.
    """

    def __init__(self, endpoint: RankEndpoint, device: torch.device) -> None:
        _check_loopback()
        self.rank, self.size = endpoint.rank, endpoint.size
        self._host = SharedMemoryCommunicator(endpoint)
        # The file has no name, and this descriptor of it is never closed: NCCL connects the ranks when they first
        # communicate, and the store opens the file once more as it is deleted, ending the process if it cannot.
        path = f"/proc/self/fd/{os.dup(endpoint.store)}"
        store = distributed.FileStore(path, self.size)  # type: ignore[attr-defined]  # not in `__all__`
        distributed.init_process_group("nccl", store=store, rank=self.rank, world_size=self.size)
        self._one_shot = _one_shot(self._host, device)
        self.fuses_norm = self._one_shot is not None

    def summands(self, x: Tensor) -> Tensor:
        """See `Communicator.summands`; the sum if one launch can compute it, which is for small tensors."""
        if self._one_shot is None or self._detached or not self._one_shot.supports(x):
            return self.all_gather(x)
        return self._one_shot(x)[None]

    def add_and_normalize(
        self, parts: Tensor, hidden: Tensor, weight: Tensor, eps: float, *, pdl: bool
    ) -> Tensor | None:
        """See `Communicator.add_and_normalize`; for small tensors."""
        if self._one_shot is None or self._detached or not self._one_shot.normalizes(hidden):
            return None
        return self._one_shot.add_and_normalize(parts, hidden, weight, eps, pdl=pdl)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        if self._detached:
            return repeated(x, self.size)
        if x.device.type == "cpu":
            return self._host.all_gather(x)
        out = x.new_empty(self.size, *x.shape)
        _gather(out.flatten(0, 1), x.contiguous())
        return out

    def broadcast(self, x: Tensor) -> None:
        """See `Communicator.broadcast`."""
        if not self._detached:
            distributed.broadcast(x, 0)

    def minimum(self, number: int) -> int:
        """See `Communicator.minimum`."""
        return self._host.minimum(number)


def _check_loopback() -> None:
    """Raise a `KernelError` if NCCL is to listen on the loopback interface, and that is down."""
    if os.environ.get("NCCL_SOCKET_IFNAME") != "=lo":
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise KernelError(
                f"NCCL needs the loopback interface, which cannot be used ({error.strerror}): ip link set lo up, or "
                "NCCL_SOCKET_IFNAME=INTERFACE"
            ) from error


def _one_shot(host: SharedMemoryCommunicator, device: torch.device) -> OneShotSum | None:
    """Return the all-reduce in one launch if all ranks have it; else log why this one has not, and return None."""
    from kernels.collective.one_shot import OneShotSum  # noqa: PLC0415 - a host without a GPU may have no Triton

    found = None
    try:
        with _private_temporary_folder(host):
            found = OneShotSum(host.rank, host.size, device)
    except (ImportError, RuntimeError) as error:
        _logger.warning(
            "rank %d sums by NCCL, which is slower for small steps: %s", host.rank, error
        )
    most_warps = host.minimum(found.most_warps if found else 0)
    if found:
        found.most_warps = most_warps
    return found if most_warps else None


@contextlib.contextmanager
def _private_temporary_folder(host: SharedMemoryCommunicator) -> Iterator[None]:
    """Set a folder of mode 0700 as the one for temporary files, the same on all ranks; it is removed at the end.

    PyTorch exchanges the memory of GPUs over sockets that it names there by the process id. In a folder of all users,
    others could take those names or send to them.

    Raises:
        OSError: rank 0 cannot make the folder; the other ranks lose it then.
    """
    with contextlib.ExitStack() as stack:
        name = b""
        if not host.rank:
            name = os.fsencode(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-")))
        length = torch.tensor([len(name)])
        host.broadcast(length)
        folder = torch.zeros(int(length), dtype=torch.uint8)
        if not host.rank:
            folder = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        host.broadcast(folder)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = os.fsdecode(folder.numpy().tobytes())
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
            host.minimum(0)  # all ranks have left it
