"""What `tessera doctor` knows about the machine. Plain data, so that tests can describe any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from server.cli.nvidia import Driver


@dataclass(frozen=True, slots=True)
class Software:
    """What is installed.

    Attributes:
        python: version.
        torch: version of PyTorch; None if it cannot be imported.
        torch_error: why it cannot be imported.
        cuda: version of CUDA that PyTorch was built for, as (major, minor); None for a build for CPUs.
        triton: version; None if it is not installed.
        cpu_library: why there is no C library for this processor; empty if there is one.
    """

    python: str
    torch: str | None
    torch_error: str = ""
    cuda: tuple[int, int] | None = None
    triton: str | None = None
    cpu_library: str = ""


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU that PyTorch can use.

    Attributes:
        name: with its compute capability.
        has_triton: whether compiled kernels run there.
        is_tested: whether the tests have run on such a GPU.
        free_bytes: memory that is free now.
        total_bytes: its memory.
    """

    name: str
    has_triton: bool
    is_tested: bool
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that the service writes to; it may be absent.

    Attributes:
        path: of the folder.
        problem: why nothing can be written there; empty if something can.
        used_bytes: of its files; None if they were not counted.
        free_bytes: of its file system.
        may_execute: whether programs and libraries in it can be run.
    """

    path: Path
    problem: str
    used_bytes: int | None
    free_bytes: int
    may_execute: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """All facts.

    Attributes:
        software: what is installed.
        driver: NVIDIA's driver.
        gpus: GPUs that PyTorch can use.
        compiler_problem: why no C program that includes Python.h can be compiled; empty if one can.
        models: cache of models.
        kernels: cache of compiled kernels; None if Triton is not installed.
        temporary: folder of temporary files, with the sockets and counters that the processes share.
        listen_problem: why the service cannot listen on its address; empty if it can.
        open_files: hard limit of open files; None without a limit.
        processors: logical processors that the service may use.
        processors_text: processors and limits in words.
        free_memory: bytes of main memory that the service can allocate, within the limit of its control group.
        total_memory: bytes of main memory, or that limit.
    """

    software: Software
    driver: Driver
    gpus: tuple[GPU, ...]
    compiler_problem: str
    models: Folder
    kernels: Folder | None
    temporary: Folder
    listen_problem: str
    open_files: int | None
    processors: int
    processors_text: str
    free_memory: int
    total_memory: int
