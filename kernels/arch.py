"""Describes processors for kernel selection: their properties, a catalogue of known ones, and detection.

This is the only file that queries the device, and the only one that compares compute capabilities. Other
files read a named capability of a `GPUArch`, or give it a set of compute capabilities. PyTorch is imported by the
functions that query the device, so that plans of absent GPUs and the command line do without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kernels.errors import UnsupportedDeviceError

if TYPE_CHECKING:
    import torch

_KIB = 1024

TURING: Final = frozenset({75})
AMPERE: Final = frozenset({80, 86, 87})
ADA: Final = frozenset({89})
HOPPER: Final = frozenset({90})
BLACKWELL: Final = frozenset({100, 103, 120, 121})
"""sm_110 is not among them, see `_NOT_ASSEMBLED`."""
TENSOR_MEMORY: Final = frozenset({100, 103})
"""The data-centre GPUs of Blackwell, which have tcgen05 and tensor memory."""

NOT_ALLOWED: Final = "unmeasured kernels are not allowed"
NEVER_RUN: Final = f"never run, and {NOT_ALLOWED}"
"""Reasons against kernels that no GPU has timed, or run, as long as the operator does not allow them."""

TENSOR_CORES: Final = AMPERE | ADA | HOPPER | BLACKWELL
"""Where Triton's `tl.dot` uses tensor cores; it does not on Turing."""
TRITON: Final = TURING | TENSOR_CORES
"""Where Triton kernels without `tl.dot` run."""
FP8_INSTRUCTIONS: Final = ADA | HOPPER | BLACKWELL
"""Where instructions convert float8_e4m3fn, and the library multiplies it."""

_NOT_ASSEMBLED: Final = frozenset({110})
"""Supported by PyTorch, but unknown to ptxas 12.9, which Triton 3.6.0 bundles: no Triton kernel runs there."""
_TESTED: Final = frozenset({0, 90})
"""Where the tests have run: on a CPU, an H100 and an H200. Kernels for others are only compiled and interpreted."""


@dataclasses.dataclass(frozen=True, slots=True)
class GPUArch:
    """The properties of one processor that kernel selection uses.

    Attributes:
        key: short name, as in `CATALOGUE`; "cpu" for the host.
        name: the vendor's name.
        sm: compute capability as major * 10 + minor; 0 for a CPU.
        num_sms: streaming multiprocessors; for a CPU, logical cores.
        shared_memory_bytes: most shared memory of a thread block; 0 for a CPU.
        memory_bandwidth_gbs: peak of the main memory in 10^9 bytes per second; 0 if not known.
        half_tflops: peak of matrix products of 16-bit floats with float32 accumulation, without
            sparsity, in 10^12 operations per second; 0 if not known.
        float32_tflops: peak of float32 arithmetic outside the tensor cores, in the same unit.
        fp8_tflops: as `half_tflops`, for products of 8-bit floats; 0 where the processor has none.
        memory_mib: main memory in MiB; 0 for a CPU.
    """

    key: str
    name: str
    sm: int
    num_sms: int
    shared_memory_bytes: int
    memory_bandwidth_gbs: int
    half_tflops: float
    float32_tflops: float
    fp8_tflops: float = 0.0
    memory_mib: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host processor."""
        return self.sm == 0

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 is multiplied by the hardware rather than emulated; True for a CPU."""
        return self.is_cpu or self.sm >= 80

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels without matrix products run here."""
        return self.sm in TRITON

    @property
    def has_triton_tensor_cores(self) -> bool:
        """Whether Triton kernels run here with matrix products on the tensor cores."""
        return self.sm in TENSOR_CORES

    @property
    def has_fp8_conversion(self) -> bool:
        """Whether instructions convert float8_e4m3fn to and from wider floats."""
        return self.sm in FP8_INSTRUCTIONS

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it still runs (`kernels.gpu.dependent_launch`)."""
        return self.sm in HOPPER | BLACKWELL

    @property
    def is_tested(self) -> bool:
        """Whether the tests have run on a processor of this compute capability."""
        return self.sm in _TESTED

    @property
    def tuning_order(self) -> tuple[int, ...]:
        """Compute capabilities whose launch configurations apply here: its own, then the nearest lower ones.

        They have the same major number, so their code runs here and their limit of shared memory is no higher.
        """
        lower = (sm for sm in TRITON if sm // 10 == self.sm // 10 and sm < self.sm)
        return (self.sm, *sorted(lower, reverse=True))

    def unsupported(self, needed: frozenset[int], note: str = "") -> tuple[str, ...]:
        """List why code for some compute capabilities does not run here; empty if it does.

        Args:
            needed: the compute capabilities that the code is for.
            note: what the others lack, for the reason.
        """
        if self.sm in needed:
            return ()
        if self.is_cpu:
            return ("needs a GPU",)
        *most, last = (f"sm_{sm}" for sm in sorted(needed))
        listed = f"{', '.join(most)} or {last}" if most else last
        reason = f"needs {listed}, this is sm_{self.sm}"
        if self.sm in _NOT_ASSEMBLED:
            return (f"{reason}, which the ptxas 12.9 bundled with Triton 3.6.0 cannot assemble",)
        return (f"{reason} ({note})" if note else reason,)

    def peak_tflops(self, dtype: str) -> float:
        """Return the peak for a dtype by its name, in 10^12 operations per second; 0 if not known."""
        if dtype == "bfloat16" and not self.has_bfloat16:
            return 0.0
        peaks = {"float32": self.float32_tflops, "float8_e4m3fn": self.fp8_tflops}
        return peaks.get(dtype, self.half_tflops)

    def __str__(self) -> str:
        """Return a name for logs, such as `H100 (sm_90)`."""
        return self.name if self.is_cpu else f"{self.name} (sm_{self.sm})"


CPU = GPUArch("cpu", "CPU", 0, os.cpu_count() or 1, 0, 0, 0.0, 0.0)

_KNOWN: Final = (
    CPU,
    GPUArch("t4", "NVIDIA T4", 75, 40, 64 * _KIB, 320, 65.0, 8.1, 0.0, 15_360),
    GPUArch("a100", "NVIDIA A100 80GB", 80, 108, 163 * _KIB, 2039, 312.0, 19.5, 0.0, 81_920),
    GPUArch("a10", "NVIDIA A10", 86, 72, 99 * _KIB, 600, 125.0, 31.2, 0.0, 23_028),
    GPUArch("l4", "NVIDIA L4", 89, 58, 99 * _KIB, 300, 121.0, 30.3, 242.5, 23_034),
    GPUArch("rtx4090", "NVIDIA GeForce RTX 4090", 89, 128, 99 * _KIB, 1008, 165.2, 82.6, 330.3, 24_564),
    GPUArch("h100", "NVIDIA H100 80GB HBM3", 90, 132, 227 * _KIB, 3352, 989.4, 66.9, 1978.9, 81_559),
    GPUArch("h200", "NVIDIA H200", 90, 132, 227 * _KIB, 4800, 989.4, 66.9, 1978.9, 143_771),
    GPUArch("b200", "NVIDIA B200", 100, 148, 227 * _KIB, 7700, 2250.0, 75.0, 4500.0, 183_359),
    GPUArch("rtx5090", "NVIDIA GeForce RTX 5090", 120, 170, 99 * _KIB, 1792, 209.5, 104.8, 419.0, 32_607),
)  # fmt: skip
CATALOGUE: Mapping[str, GPUArch] = MappingProxyType({arch.key: arch for arch in _KNOWN})
"""Known processors, for tests and for plans on a host without the device.

The A100 and H100 are the SXM modules. The T4's tensor cores multiply float16 only.

Source: the vendor's data sheets for SM counts, bandwidths and peaks: T4, A100, A10, L4 (tensor figures
halved, the sheet counts sparsity), H100, H200, HGX B200 (halved too); the white papers "NVIDIA Ada
GPU Architecture" and "NVIDIA RTX Blackwell GPU Architecture" for the GeForce cards, with float32
accumulation; FP8 from the same. Memory as nvidia-smi reports it. The shared memory limits are those of
the compute capability in the CUDA C++ Programming Guide, "Technical Specifications".
"""


_MORE: Final = (
    GPUArch("a100-40gb", "NVIDIA A100-SXM4-40GB", 80, 108, 163 * _KIB, 1555, 312.0, 19.5, 0.0, 40_960),
    GPUArch("a100-pcie", "NVIDIA A100 80GB PCIe", 80, 108, 163 * _KIB, 1935, 312.0, 19.5, 0.0, 81_920),
    GPUArch("a30", "NVIDIA A30", 80, 56, 163 * _KIB, 933, 165.0, 10.3, 0.0, 24_576),
    GPUArch("a10g", "NVIDIA A10G", 86, 80, 99 * _KIB, 600, 70.0, 31.5, 0.0, 23_028),
    GPUArch("a40", "NVIDIA A40", 86, 84, 99 * _KIB, 696, 149.7, 37.4, 0.0, 46_068),
    GPUArch("rtxa6000", "NVIDIA RTX A6000", 86, 84, 99 * _KIB, 768, 154.8, 38.7, 0.0, 49_140),
    GPUArch("rtxa5000", "NVIDIA RTX A5000", 86, 64, 99 * _KIB, 768, 111.1, 27.8, 0.0, 24_564),
    GPUArch("rtxa4000", "NVIDIA RTX A4000", 86, 48, 99 * _KIB, 448, 76.7, 19.2, 0.0, 16_376),
    GPUArch("rtx3080", "NVIDIA GeForce RTX 3080", 86, 68, 99 * _KIB, 760, 59.5, 29.8, 0.0, 10_240),
    GPUArch("rtx3090", "NVIDIA GeForce RTX 3090", 86, 82, 99 * _KIB, 936, 71.0, 35.6, 0.0, 24_576),
    GPUArch("rtx3090ti", "NVIDIA GeForce RTX 3090 Ti", 86, 84, 99 * _KIB, 1008, 80.0, 40.0, 0.0, 24_564),
    GPUArch("l40", "NVIDIA L40", 89, 142, 99 * _KIB, 864, 181.0, 90.5, 362.1, 46_068),
    GPUArch("l40s", "NVIDIA L40S", 89, 142, 99 * _KIB, 864, 362.0, 91.6, 733.0, 46_068),
    GPUArch("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 89, 142, 99 * _KIB, 960, 364.2, 91.1, 728.5, 49_140),
    GPUArch("rtx4080", "NVIDIA GeForce RTX 4080", 89, 76, 99 * _KIB, 717, 97.5, 48.7, 194.9, 16_376),
    GPUArch("h100-pcie", "NVIDIA H100 PCIe", 90, 114, 227 * _KIB, 2039, 756.0, 51.0, 1513.0, 81_559),
    GPUArch("h100-nvl", "NVIDIA H100 NVL", 90, 132, 227 * _KIB, 3938, 835.0, 60.0, 1671.0, 95_830),
    GPUArch("h800", "NVIDIA H800", 90, 132, 227 * _KIB, 3352, 989.4, 66.9, 1978.9, 81_559),
    GPUArch("h20", "NVIDIA H20", 90, 78, 227 * _KIB, 4000, 148.0, 44.0, 296.0, 97_871),
    GPUArch("gh200", "NVIDIA GH200 480GB", 90, 132, 227 * _KIB, 4000, 989.4, 66.9, 1978.9, 97_871),
    GPUArch("gb200", "NVIDIA GB200", 100, 152, 227 * _KIB, 8000, 2500.0, 80.0, 5000.0, 189_471),
    GPUArch("b300", "NVIDIA B300", 103, 148, 227 * _KIB, 8000, 2250.0, 75.0, 4500.0, 275_040),
    GPUArch("rtx5080", "NVIDIA GeForce RTX 5080", 120, 84, 99 * _KIB, 960, 112.6, 56.3, 225.1, 16_303),
    GPUArch("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell", 120, 188, 99 * _KIB, 1792, 503.8, 126.0, 1007.6, 97_887),
)  # fmt: skip
PROCESSORS: Mapping[str, GPUArch] = MappingProxyType({arch.key: arch for arch in (*_KNOWN, *_MORE)})
"""The processors of `CATALOGUE` and other GPUs, for plans and for the peaks of the GPU that is present.

Except the B300, they differ from those of the catalogue in SMs, memory and peaks only, so tests go through the
catalogue. The sources are the same, and the data sheets of the RTX A6000, L40S, GH200 (with 96 GB of HBM3), HGX B300
and GB200 NVL72, and the white paper "NVIDIA RTX PRO Blackwell GPU Architecture".
"""


def known_processors(name: str) -> tuple[GPUArch, ...]:
    """Return the processor with a key such as "h100", or those with a compute capability: of `CATALOGUE` if it has any.

    Args:
        name: a key of `PROCESSORS`, or a compute capability such as "sm_90"; `kernels.processor_names` reads others.
    """
    if name in PROCESSORS:
        return (PROCESSORS[name],)
    usual, known = (
        tuple(arch for arch in table.values() if name == f"sm_{arch.sm}")
        for table in (CATALOGUE, PROCESSORS)
    )
    return usual or known


_OTHER_MODELS = frozenset({"40GB", "D", "LAPTOP", "MIG", "NVL", "PCIE"})
"""Words in a driver's device name of models that share a name in `CATALOGUE` but have other peaks."""


_described: GPUArch | None = None


@contextlib.contextmanager
def described_as(arch: GPUArch) -> Iterator[None]:
    """Let `detect` describe every GPU as `arch`, without asking the driver; for code that runs without the GPU."""
    global _described  # noqa: PLW0603 - `detect` has no other argument to pass it by
    before, _described = _described, arch
    try:
        yield
    finally:
        _described = before


def detect(device: torch.device | str | None = None) -> GPUArch:
    """Describe a device.

    Args:
        device: the device to describe; None takes the current GPU if there is one, else the CPU.

    Returns:
        The properties that the driver reports. It does not report bandwidth and peaks: they come from
        `PROCESSORS` for a GPU with an entry of this name and number of SMs, and are 0 for others.

    Raises:
        UnsupportedDeviceError: the GPU is an AMD GPU.
    """
    import torch  # noqa: PLC0415 - see the module's docstring

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type != "cuda":
        return _detect_cpu()
    if _described is not None:
        return _described
    index = resolved.index if resolved.index is not None else torch.cuda.current_device()
    return _detect_gpu(index)


@functools.cache
def _detect_cpu() -> GPUArch:
    return dataclasses.replace(CPU, name=platform.processor() or platform.machine() or CPU.name)


@functools.cache
def _detect_gpu(index: int) -> GPUArch:
    import torch  # noqa: PLC0415 - see the module's docstring

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        raise UnsupportedDeviceError(
            f"{properties.name} is an AMD GPU (PyTorch for ROCm {torch.version.hip}); the kernels are for "
            "NVIDIA GPUs and for CPUs"
        )
    known = _find_known(properties.name, properties.multi_processor_count)
    return GPUArch(
        key=known.key if known else properties.name.lower().replace(" ", "-"),
        name=properties.name,
        sm=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # absent from torch's stub
        memory_bandwidth_gbs=known.memory_bandwidth_gbs if known else 0,
        half_tflops=known.half_tflops if known else 0.0,
        float32_tflops=known.float32_tflops if known else 0.0,
        fp8_tflops=known.fp8_tflops if known else 0.0,
        memory_mib=properties.total_memory // 2**20,
    )


def _find_known(name: str, num_sms: int) -> GPUArch | None:
    """Find the processor of a driver's device name: the one of this name, or the catalogue's whose key is a word of it.

    A partition of a GPU, or a smaller model of the same name, has another number of SMs.
    """
    for arch in PROCESSORS.values():
        if (arch.name, arch.num_sms) == (name, num_sms):
            return arch
    words = set(name.upper().replace("-", " ").split())
    for arch in CATALOGUE.values():
        wanted = arch.key.upper().removeprefix("RTX")
        if not arch.is_cpu and wanted in words and arch.num_sms == num_sms:
            return None if words & _OTHER_MODELS else arch
    return None


@functools.cache
def has_bfloat16_gemm() -> bool:
    """Whether the CPU multiplies bfloat16 matrices at least as fast as float32 ones."""
    from kernels.torch_private import onednn_has_bfloat16  # noqa: PLC0415 - as above

    return onednn_has_bfloat16()
