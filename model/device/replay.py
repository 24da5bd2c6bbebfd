"""Records what a device computes, to have it computed again without launching its kernels one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

Replay: TypeAlias = Callable[[], object]
"""Queues a recorded computation again, on the memory that it was recorded on."""


class Recorder(Protocol):
    """Makes replays that share the memory of what lies between their inputs and results."""

    def record(self, compute: Callable[[], object]) -> Replay:
        """Record a computation.

        Args:
            compute: reads and writes tensors that live as long as the replay, launches the same kernels on the same
                memory whatever these hold, and waits for nothing.
        """


class CudaGraphs:
    """Records CUDA graphs; not for two threads, and replays follow one another on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], object]) -> Replay:
        """Compute once for what is compiled or allocated at the first use, then once to be recorded.

        `torch.cuda.graph` would do the same, but first gives back the memory that a service holds for its largest
        step.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            compute()
            # Other threads, as one that frees memory, must not break the recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
