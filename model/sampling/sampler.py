"""Samples the tokens of a step from its logits, each row with its own parameters.

Invariant: the token of a row and its log-probabilities depend, bit for bit, on that row's logits and `SamplingRow`
alone, not on the other rows, their number or their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels.sampling.registry import TRITON
from kernels.sampling.tokens import has_kernels
from kernels.selection import VectorSpec
from model.device.transfer import Download
from model.sampling.device import DeviceTokens, SampleTables
from model.sampling.host import HostSampler
from model.sampling.mask import RowMasks
from model.sampling.parameters import SampledToken
from model.sampling.rows import SamplingRow

SAMPLERS: Final = (TRITON, VectorSpec("host_sampling", "model.sampling.host:HostSampler"))
"""What samples the tokens of a step, most preferred row first."""


class PendingTokens(Protocol):
    """The sampled tokens of some rows, which the device may not have computed yet."""

    @property
    def tokens(self) -> Tensor:
        """[M] int64 on the logits' device, valid ids."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next step can be launched on `tokens` before the host has read them."""

    def result(self) -> list[SampledToken]:
        """Wait for the tokens and return M of them in the order of the rows."""


class HostTokens:
    """Tokens that were sampled on the host."""

    feeds_next = True

    def __init__(self, sampled: list[SampledToken]) -> None:
        self._sampled = sampled

    @property
    def tokens(self) -> Tensor:
        """[M] int64; 0 for a row without a token."""
        return torch.tensor([token.token_id or 0 for token in self._sampled])

    def result(self) -> list[SampledToken]:
        """M tokens in the order of the rows."""
        return self._sampled


class CopiedTokens:
    """Tokens that the host samples from a copy of the logits: on GPUs without sampling kernels, as those before sm_80.

    Args:
        logits: as for `Sampler.begin`.
        sample: samples a row's token from each row of logits on the host.

    Attributes:
        tokens: [M] int64 zeros; the next step gets its tokens from the host.
    """

    feeds_next = False

    def __init__(self, logits: Tensor, sample: Callable[[Tensor], list[SampledToken]]) -> None:
        self.tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self._logits, self._sample = Download(logits), sample

    def result(self) -> list[SampledToken]:
        """M tokens in the order of the rows."""
        return self._sample(self._logits.read())


class Sampler:
    """Samples tokens from logits. Keeps only scratch memory between calls; not thread-safe."""

    def __init__(self) -> None:
        self._host = HostSampler()

    def forward(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Choose one token for each row and wait for them.

        Args:
            logits: [M, V], float32, bfloat16 or float16. Not changed.
            rows: M rows.

        Returns:
            M tokens in the order of the rows. A row with a NaN or a plus infinity among its logits, or without a token
            that can be sampled, has `error` set; the others are what they would be without it.
        """
        return self.begin(logits, rows).result() if rows else []

    def plan(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleTables | None:
        """Return what can be prepared before the rows are sampled; None if that is nothing."""
        on_device = logits.device.type != "cpu" and has_kernels(logits.device)
        return SampleTables(rows, logits.shape[1]) if on_device else None

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        of_grammars: RowMasks | None = None,
        prepared: SampleTables | None = None,
    ) -> PendingTokens:
        """Choose one token for each row without waiting for the device.

        Args:
            logits: as for `forward`.
            rows: M >= 1 rows.
            of_grammars: the masks of their grammars; None if no row has one.
            prepared: the result of `plan` for the same rows; None to prepare now.
        """
        assert len(rows) == len(logits), (logits.shape, len(rows))
        logits = logits.detach()

        def sample(logits: Tensor) -> list[SampledToken]:
            return self._host.sample(logits.float().contiguous(), rows, of_grammars)

        if logits.device.type == "cpu":
            return HostTokens(sample(logits))
        if not has_kernels(logits.device):
            return CopiedTokens(logits, sample)
        return DeviceTokens(logits.contiguous(), rows, of_grammars, prepared)
