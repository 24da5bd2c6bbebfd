"""Collects the facts about this machine. Nothing here raises because something is missing: that is a finding."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import constants

from model.device.cpus import usable_cpus
from model.device.host_memory import free_host_bytes, total_host_bytes
from server.cli.doctor.facts import GPU, Folder, Machine, Software
from server.cli.listening import listen
from server.cli.nvidia import read_driver
from server.engine.core.start_checks import StartupError

if TYPE_CHECKING:
    from server.cli.settings import Settings

_PROGRAM: Final = "#include <Python.h>\n#include <stdlib.h>\n"
_COMPILE_SECONDS: Final = 30


def inspect(settings: Settings) -> Machine:
    """Collect the facts for a service with these settings."""
    software, gpus = _import_torch()
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processors = usable_cpus()
    return Machine(
        software=software,
        driver=read_driver(),
        gpus=gpus,
        compiler_problem=compiler_problem(_triton_compiler()),
        models=read_folder(Path(constants.HF_HUB_CACHE)),
        kernels=_kernel_cache(),
        temporary=read_folder(Path(tempfile.gettempdir()), count=False),
        listen_problem=_listen_problem(settings.host, settings.port),
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        processors=processors.logical,
        processors_text=str(processors),
        free_memory=free_host_bytes(),
        total_memory=total_host_bytes(),
    )


def compiler_problem(compiler: str | None) -> str:
    """Return why this C compiler cannot compile a program for Python; empty if it can.

    Args:
        compiler: path of the compiler; None for the first of gcc and clang.
    """
    command = compiler or shutil.which("gcc") or shutil.which("clang")
    if command is None:
        return "neither gcc nor clang is installed"
    headers = sysconfig.get_path("include")
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that Triton runs too
            [command, f"-I{headers}", "-fsyntax-only", "-x", "c", "-"],
            input=_PROGRAM,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command}: {error}"
    if done.returncode:
        first = (done.stderr.strip() or "failed").splitlines()[0]
        return f"{command}: {first}"
    return ""


def read_folder(path: Path, *, count: bool = True) -> Folder:
    """Describe a folder; it need not exist yet.

    Args:
        path: of the folder.
        count: whether to add up the sizes of its files.
    """
    existing = next(it for it in (path, *path.absolute().parents) if it.exists())
    problem = ""
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    system = os.statvfs(existing)
    return Folder(
        path=path,
        problem=problem,
        used_bytes=_size(path) if count else None,
        free_bytes=system.f_bavail * system.f_frsize,
        may_execute=not system.f_flag & getattr(os, "ST_NOEXEC", 0),
    )


def _size(path: Path) -> int:
    """Return the bytes of all files below a folder; links do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                status = Path(folder, name).lstat()
            except OSError:  # removed meanwhile
                continue
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _import_torch() -> tuple[Software, tuple[GPU, ...]]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    python = platform.python_version()
    try:
        import torch  # noqa: PLC0415 - may fail

        from kernels.cpu.library import load  # noqa: PLC0415 - imports torch
    except (ImportError, OSError) as error:
        return Software(python, None, str(error), triton=triton), ()
    library = load()
    cuda = torch.version.cuda
    software = Software(
        python=python,
        torch=torch.__version__,
        cuda=None if cuda is None else _version(cuda),
        triton=triton,
        cpu_library=library if isinstance(library, str) else "",
    )
    return software, _gpus()


def _gpus() -> tuple[GPU, ...]:
    import torch  # noqa: PLC0415 - has been imported before

    from kernels.arch import detect  # noqa: PLC0415 - imports torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        arch = detect(f"cuda:{index}")
        free, total = torch.cuda.mem_get_info(index)
        found.append(GPU(str(arch), arch.has_triton, arch.is_tested, free, total))
    return tuple(found)


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [*text.split("."), "0"]
    return int(major), int(minor)


def _triton_compiler() -> str | None:
    try:
        from triton import knobs  # noqa: PLC0415 - only installed for GPUs
    except ImportError:
        return None
    compiler: str | None = knobs.build.cc
    return compiler


def _kernel_cache() -> Folder | None:
    try:
        from triton import knobs  # noqa: PLC0415 - only installed for GPUs
    except ImportError:
        return None
    return read_folder(Path(knobs.cache.dir))


def _listen_problem(host: str, port: int) -> str:
    try:
        for opened in listen(host, port):
            opened.close()
    except StartupError as error:
        return str(error)
    return ""
