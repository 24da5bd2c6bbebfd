"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

A kernel launched so may do what does not depend on the one before, as loading weights, until it waits for it.
The rules that keep a chain of such kernels right:

- Each kernel that is launched so waits, in each of its programs that reads what an earlier kernel wrote or that
  writes anything, before it does. At least one of its programs waits, so the end of one kernel is the end of all
  before it.
- What is read before the wait was written before the last launch that was not programmatic.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.arch import GPUArch


def may_depend(arch: GPUArch, device: torch.device) -> bool:
    """Whether kernels on a device may be launched so; Triton's interpreter, on CPU tensors, cannot."""
    return arch.has_dependent_launch and device.type == "cuda"


def dependent_launch(pdl: bool) -> dict[str, Any]:
    """Return a kernel's launch options and its constant PDL, which only some GPUs take (`may_depend`)."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
