"""Compiles kernels in parallel into Triton's on-disk cache and reports their resources.

Each worker process calls a kernel on tiny tensors and stops before the launch, so that the GPU is free for timing. The
compiled code depends only on constants, dtypes and alignment, which are the same as for large tensors.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.attention_inputs import arch_of, forced, make_inputs, spec_named

if TYPE_CHECKING:
    from benchmarks.attention_shapes import Shape
    from kernels.attention.launch import LaunchConfig

_MAIN_KERNELS = ("prefill", "decode")
_compiled: list[Any] = []
"""The kernels that the current job compiled, in a worker process."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile.

    Attributes:
        kernel: name of the registry row.
        shape: shape of the tensors; its batch, lengths and history do not matter.
        dtype: dtype of the tensors.
        paged: whether keys and values are in a paged cache; packed otherwise.
        launch: launch configuration.
        device: "cuda", or "cpu" for a dry run that compiles nothing.
    """

    kernel: str
    shape: Shape
    dtype: str
    paged: bool
    launch: LaunchConfig
    device: str = "cuda"


class Compiled(NamedTuple):
    """The result of a job.

    Attributes:
        job: the job.
        error: why the kernel cannot run; empty if it can.
        registers: registers per thread.
        spills: 32-bit words per thread that do not fit into registers.
        shared_bytes: shared memory per thread block.
    """

    job: Job
    error: str = ""
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0


def pool(workers: int) -> ProcessPoolExecutor:
    """Start worker processes that compile kernels without launching them."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare)


def compile_job(job: Job) -> Compiled:
    """Compile one kernel; must run in a worker of `pool`."""
    _compiled.clear()
    device = torch.device(job.device)
    try:
        if device.type == "cuda":
            shape = dataclasses.replace(
                job.shape, batch=2, length=64, history=0, lengths=(), shared=0
            )
            inputs = make_inputs(shape, job.dtype, device, paged=job.paged)
            selection = forced(spec_named(job.kernel), arch_of(device), job.launch)
            inputs.run(inputs.plan(selection))
        mains = [kernel for kernel in _compiled if kernel.name in _MAIN_KERNELS]
        for kernel in mains:
            kernel.run  # noqa: B018  # loading the binary checks its resources
        return Compiled(
            job,
            registers=max((kernel.n_regs for kernel in mains), default=0),
            spills=max((kernel.n_spills for kernel in mains), default=0),
            shared_bytes=max((kernel.metadata.shared for kernel in mains), default=0),
        )
    except Exception as error:  # noqa: BLE001  # a configuration that does not compile is a result
        lines = str(error).strip().splitlines() or [""]
        return Compiled(job, error=f"{type(error).__name__}: {lines[0]}")


def _prepare() -> None:
    """Patch Triton so that kernel calls in this process compile without launching."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415  # needs a GPU

    launch = JITFunction.run

    def compile_only(*args: object, **options: object) -> object:
        kernel = launch(*args, **options | {"warmup": True})
        _compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
