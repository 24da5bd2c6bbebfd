"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Before it waits for the previous kernel, such a kernel may do work that does not depend on it, such as loading weights.
Two rules keep a chain of such kernels correct:

- Each program waits before it reads what an earlier kernel wrote and before it writes anything. At least one program
  of each kernel waits, so that the end of a kernel implies the end of all kernels before it.
- Data read before the wait was written before the last launch that was not programmatic.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.arch import GPUArch


def may_depend(arch: GPUArch, device: torch.device) -> bool:
    """Whether a device supports programmatic dependent launch; Triton's interpreter, on CPU tensors, does not."""
    return arch.has_dependent_launch and device.type == "cuda"


def dependent_launch(pdl: bool) -> dict[str, Any]:
    """Return a kernel's launch options and its constant PDL; `pdl` needs `may_depend`."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
