"""Records what a device computes, to have it computed again without launching its kernels one by one.

Knows streams and memory pools, nothing of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Replay(NamedTuple):
    """A recorded computation.

    Attributes:
        run: queues all of it again, on the memory that it was recorded on.
        result: where its results are after that; those that `compute` allocated, until the next `run` of any replay
            of the same recorder.
    """

    run: Callable[[], object]
    result: tuple[Tensor, ...]


class Recorder(Protocol):
    """Makes replays that share the memory of what lies between their inputs and results."""

    def record(self, compute: Callable[[], tuple[Tensor, ...]]) -> Replay:
        """Record a computation.

        Args:
            compute: reads tensors that live as long as the replay, launches the same kernels on the same memory
                whatever these hold, and waits for nothing.
        """


class CudaGraphs:
    """Records CUDA graphs; not for two threads, and replays follow one another on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], tuple[Tensor, ...]]) -> Replay:
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
                result = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return Replay(graph.replay, result)
