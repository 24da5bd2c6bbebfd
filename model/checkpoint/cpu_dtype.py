"""The parts of the choice of a dtype on a CPU that do not need PyTorch, which this module does not import."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.device.cpus import read_sysctl

if TYPE_CHECKING:
    from model.checkpoint.config import ModelConfig

# Above this a CPU step is bound by reading weights, and float32 needs twice the memory, which a laptop may not have.
_LARGE_PARAMETERS: Final = 200_000_000


def prefers_bfloat16_on_cpu(config: ModelConfig) -> bool:
    """Whether dtype "auto" is bfloat16 on a CPU that has bfloat16 instructions; on others it is float32."""
    return config.dtype == "bfloat16" and config.network.num_parameters > _LARGE_PARAMETERS


def arm_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is an Arm processor with instructions for bfloat16 (FEAT_BF16): Apple's from the M2 on, Graviton 3.

    Args:
        cpuinfo: Linux's description of the processors.
    """
    if platform.machine().lower() not in ("arm64", "aarch64"):
        return False
    if sys.platform == "darwin":
        return read_sysctl("hw.optional.arm.FEAT_BF16") == 1
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    features = [line.partition(":")[2].split() for line in lines if line.startswith("Features")]
    return bool(features) and all("bf16" in it for it in features)
