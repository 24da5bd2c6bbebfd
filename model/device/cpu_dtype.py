"""The part of the choice of a dtype on a CPU that depends on the model only. Does not import PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from model.checkpoint.config import ModelConfig

# Above this a CPU step is bound by reading weights, and float32 needs twice the memory, which a laptop may not have.
_LARGE_PARAMETERS: Final = 200_000_000


def prefers_bfloat16_on_cpu(config: ModelConfig) -> bool:
    """Whether dtype "auto" is bfloat16 on a CPU that has bfloat16 instructions; on others it is float32."""
    return config.dtype == "bfloat16" and config.num_parameters > _LARGE_PARAMETERS
