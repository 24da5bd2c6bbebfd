"""The masks of grammars on a GPU: page-locked memory that is copied while the device computes the logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.sampling.mask import HostMasks


class DeviceMasks(HostMasks):
    """Masks by slot, in page-locked memory of the host and in memory of a device.

    The copy has a stream of its own: it starts at once, while kernels that were launched before still run. Only kernels
    launched after `send` wait for it.

    Args:
        num_words: words of a mask.
        device: a CUDA device.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        super().__init__(num_words)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._source = self._target = torch.empty((0, num_words), dtype=torch.int32, device=device)
        self._sent: torch.cuda.Event | None = None
        self._read: torch.cuda.Event | None = None

    def _allocate(self, num_slots: int) -> npt.NDArray[np.int32]:
        self.wait()
        shape = num_slots, self.words.shape[1]
        self._source = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self._target = torch.zeros(shape, dtype=torch.int32, device=self._device)
        # Filled by the current stream; the memory of the last target is not used again before its kernels have run.
        self.note_read()
        words: npt.NDArray[np.int32] = self._source.numpy()
        return words

    def wait(self) -> None:
        """Wait until the last copy has read `words`."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_words: int) -> Tensor:
        """Start to copy the masks; return them, [S, num_words] int32 contiguous, for kernels that are launched next.

        Args:
            num_words: leading words of each mask.
        """
        if self._read is not None:
            self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            self._target.copy_(self._source, non_blocking=True)
        self._sent = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(self._sent)
        return self._target[:, :num_words].contiguous()

    def note_read(self) -> None:
        """Note that the kernels which read the masks are launched: the next copy comes after them."""
        self._read = torch.cuda.current_stream(self._device).record_event()
