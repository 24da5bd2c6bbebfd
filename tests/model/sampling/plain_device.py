"""The device sampler on the CPU: the rules of its kernels in plain NumPy take their place."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

from model.sampling.device import DeviceTokens
from tests.kernels.sampling import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from model.sampling.parameters import SampledToken
    from model.sampling.rows import SamplingRow


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample as `DeviceTokens` does."""
    with mock.patch("model.sampling.device.sample_tokens", plain.sample_tokens):
        return DeviceTokens(logits.detach().contiguous(), rows).result()
