"""The attention kernels as rows of data, most preferred first.

A new kernel is a row here and a file in `kernels/attention/`. Nothing else decides what runs where.
"""

from __future__ import annotations

from kernels.plan import DTYPES, KernelSpec, Phase

_ANY_GPU = (0, 999)

REGISTRY: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="torch_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.torch_prefill:TorchPrefill",
        dtypes=frozenset(DTYPES),
        cpu=True,
        sm=_ANY_GPU,
        note="PyTorch row: the kernel of the CPU, the fallback of every GPU",
    ),
    KernelSpec(
        name="torch_decode",
        phase=Phase.DECODE,
        target="kernels.attention.torch_decode:TorchDecode",
        dtypes=frozenset(DTYPES),
        cpu=True,
        sm=_ANY_GPU,
        note="PyTorch row: the kernel of the CPU, the fallback of every GPU",
    ),
)
