"""Records device computations so that they can be replayed without launching each kernel separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

Replay: TypeAlias = Callable[[], object]
"""Queues a recorded computation again, on the same memory."""


class Recorder(Protocol):
    """Makes replays; all replays of one recorder share the memory of their intermediate results."""

    def record(self, compute: Callable[[], object]) -> Replay:
        """Record a computation.

        Args:
            compute: must launch the same kernels on the same memory whatever its tensors contain, and must not
                synchronize with the device. The tensors that it reads and writes must outlive the replay.
        """


class CudaGraphs:
    """Records CUDA graphs. Not thread-safe; all replays must run on the same stream, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], object]) -> Replay:
        """Run the computation once for first-use compilation and allocation, then capture a second run.

        `torch.cuda.graph` does the same, but first empties PyTorch's memory cache, which a service needs for its
        largest step.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            compute()
            # In this mode the CUDA calls of other threads, such as freeing memory, do not invalidate the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
