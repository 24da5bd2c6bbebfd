"""The masks of grammars on a GPU: copied while the device computes the logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.sampling.mask import HostMasks


class DeviceMasks(HostMasks):
    """Masks by slot, in memory of the host that is page-locked here, and in memory of a device.

    The copy has a stream of its own: it starts at once, while kernels that were launched before still run. Only kernels
    launched after `send` wait for it.

    Args:
        words: [S, num_words] int32 contiguous.
        device: a CUDA device.
    """

    def __init__(self, words: npt.NDArray[np.int32], device: torch.device) -> None:
        super().__init__(words)
        self._device = device
        with torch.cuda.device(device):
            # Without the lock, which an operating system may refuse, a copy blocks the host.
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(words.ctypes.data, words.nbytes, 0)
        self._source = torch.from_numpy(words)
        self._target = torch.zeros(words.shape, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: torch.cuda.Event | None = None
        self._read = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Wait until the last copy has read `words`."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_words: int) -> Tensor:
        """Start to copy the masks; return them, [S, num_words] int32 contiguous, for kernels that are launched next.

        Args:
            num_words: leading words of each mask.
        """
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            self._target.copy_(self._source, non_blocking=True)
        self._sent = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(self._sent)
        return self._target[:, :num_words].contiguous()

    def note_read(self) -> None:
        """Note that the kernels which read the masks are launched: the next copy comes after them."""
        self._read = torch.cuda.current_stream(self._device).record_event()
