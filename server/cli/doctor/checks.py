"""The checks of `tessera doctor`: functions of facts, without side effects."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from server.engine.core.memory.kv_demand import GIB, MIB
from server.http.transport.connections import MAX_CONNECTIONS, RESERVED_DESCRIPTORS

if TYPE_CHECKING:
    from server.cli.doctor.facts import Folder, Machine
    from server.cli.settings import Settings

# The oldest driver that runs programs built for a major version of CUDA.
# Source: CUDA Toolkit Release Notes, "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
# Compatibility".
_OLDEST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
_MODEL_SPACE: Final = 10 * GIB
_KERNEL_SPACE: Final = GIB
_TEMPORARY_SPACE: Final = 16 * MIB
_LITTLE_MEMORY: Final = 2 * GIB
# The service's own files, libraries and sockets, with a few connections.
_FEWEST_FILES: Final = 2 * RESERVED_DESCRIPTORS


class Status(enum.Enum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Check(NamedTuple):
    """The result of a check.

    Attributes:
        name: what was checked.
        status: what was found.
        finding: the facts.
        advice: what to do; empty if all is well.
    """

    name: str
    status: Status
    finding: str
    advice: str = ""


def check(machine: Machine, settings: Settings) -> list[Check]:
    """Run all checks for a service with these settings."""
    needs_gpu = settings.device == "cuda"
    uses_gpu = settings.device != "cpu" and machine.driver.has_device
    checks = [_software(machine), _driver(machine, settings)]
    if settings.device != "cpu":
        checks += _gpus(machine)
    checks += [
        _compiler(machine, uses_gpu=uses_gpu or needs_gpu),
        _folder("models", machine.models, _MODEL_SPACE, "set HF_HOME"),
    ]
    if machine.kernels is not None and (uses_gpu or needs_gpu):
        checks.append(_kernels(machine.kernels))
    return [
        *checks,
        # Has the sockets and the memory that the processes share; the service does not use /dev/shm.
        _folder("temporary files", machine.temporary, _TEMPORARY_SPACE, "set TMPDIR"),
        _port(machine, settings),
        _open_files(machine),
        _processors(machine),
        _memory(machine),
    ]


def _software(machine: Machine) -> Check:
    name, it = "software", machine.software
    if it.torch is None:
        return Check(
            name, Status.ERROR, f"PyTorch cannot be imported: {it.torch_error}", "install it again"
        )
    found = f"Python {it.python}, PyTorch {it.torch}, " + (
        "no Triton" if it.triton is None else f"Triton {it.triton}"
    )
    if it.cuda is not None and it.triton is None:
        advice = "install triton (pip install 'tessera[gpu]'); without it a GPU runs PyTorch's attention only"
        return Check(name, Status.WARNING, found, advice)
    if it.cpu_library:
        return Check(
            name, Status.WARNING, f"{found}; {it.cpu_library}", "a CPU runs PyTorch's slower steps"
        )
    return Check(name, Status.OK, found)


def _driver(machine: Machine, settings: Settings) -> Check:
    name, driver, torch = "driver", machine.driver, machine.software
    if settings.device == "cpu":
        return Check(name, Status.OK, "not needed with --device cpu")
    if driver.cuda is None:
        return _no_driver(machine, settings)
    version = f"driver {driver.version}" if driver.version else "the driver"
    found = f"{version} supports CUDA {_text(driver.cuda)}"
    if torch.cuda is None:
        advice = "install a build for CUDA (`make setup TORCH=cuda`)"
        return Check(name, _unusable(settings), f"{found}, but PyTorch is built for CPUs", advice)
    found += f", PyTorch {torch.torch} is built for CUDA {_text(torch.cuda)}"
    if driver.cuda[0] < torch.cuda[0]:
        oldest = _OLDEST_DRIVER.get(torch.cuda[0])
        wanted = "a newer driver" if oldest is None else f"driver {oldest} or newer"
        advice = f"install {wanted}, or PyTorch for CUDA {driver.cuda[0]} (docs/operations.md)"
        return Check(name, Status.ERROR, found, advice)
    return Check(name, Status.OK, found)


def _no_driver(machine: Machine, settings: Settings) -> Check:
    name = "driver"
    if machine.driver.has_device:
        advice = (
            "install NVIDIA's driver; in a container, use the NVIDIA Container Toolkit with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        found = "there is a GPU, but not the driver's library libcuda.so.1"
        return Check(name, _unusable(settings), found, advice)
    if settings.device == "auto":
        return Check(name, Status.OK, "no NVIDIA GPU: the service runs on the CPU")
    advice = "a container sees one with `docker run --gpus all`; or use --device cpu"
    return Check(name, Status.ERROR, "no NVIDIA GPU", advice)


def _unusable(settings: Settings) -> Status:
    """Return how bad it is that a GPU cannot be used; with --device auto the service runs on the CPU."""
    return Status.ERROR if settings.device == "cuda" else Status.WARNING


def _gpus(machine: Machine) -> list[Check]:
    name, driver, cuda = "GPU", machine.driver.cuda, machine.software.cuda
    works = driver is not None and cuda is not None and driver[0] >= cuda[0]
    if works and not machine.gpus:
        return [
            Check(
                name,
                Status.ERROR,
                "the driver is there, but PyTorch finds no GPU",
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            )
        ]
    checks = []
    for gpu in machine.gpus:
        found = f"{gpu.name}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        status, advice = Status.OK, ""
        if not gpu.has_triton:
            status, advice = Status.WARNING, "compiled kernels do not run there, PyTorch's do"
        elif gpu.free_bytes < gpu.total_bytes / 2:
            status, advice = Status.WARNING, "other programs use its memory; see `nvidia-smi`"
        elif not gpu.is_tested:
            found += "; the kernels are compiled for it, but were never run on one"
        checks.append(Check(name, status, found, advice))
    return checks


def _compiler(machine: Machine, *, uses_gpu: bool) -> Check:
    name = "C compiler"
    if not machine.compiler_problem:
        return Check(name, Status.OK, "compiles programs for Python")
    if not uses_gpu:
        return Check(name, Status.OK, f"{machine.compiler_problem}; not needed without a GPU")
    return Check(
        name,
        Status.ERROR,
        machine.compiler_problem,
        "Triton compiles the launch of each kernel: install gcc, libc6-dev and python3-dev",
    )


def _folder(name: str, folder: Folder, least: int, advice: str) -> Check:
    if folder.problem:
        found = f"{folder.path}: {folder.problem}"
        return Check(name, Status.ERROR, found, f"make it writable for this user, or {advice}")
    used = "" if folder.used_bytes is None else f"{folder.used_bytes / GIB:.1f} GiB used, "
    found = f"{folder.path}: {used}{folder.free_bytes / GIB:.1f} GiB free"
    if folder.free_bytes < least:
        return Check(name, Status.WARNING, found, f"make space, or {advice}")
    return Check(name, Status.OK, found)


def _kernels(folder: Folder) -> Check:
    name, advice = "compiled kernels", "set TRITON_CACHE_DIR"
    if not folder.problem and not folder.may_execute:
        return Check(
            name, Status.ERROR, f"{folder.path}: mounted noexec", f"mount it exec, or {advice}"
        )
    return _folder(name, folder, _KERNEL_SPACE, advice)


def _port(machine: Machine, settings: Settings) -> Check:
    if machine.listen_problem:
        advice = "end the program that listens there, or use another --port"
        return Check("port", Status.ERROR, machine.listen_problem, advice)
    return Check("port", Status.OK, f"{settings.host} port {settings.port} is free")


def _open_files(machine: Machine) -> Check:
    name, limit = "open files", machine.open_files
    if limit is None or limit >= MAX_CONNECTIONS + RESERVED_DESCRIPTORS:
        return Check(name, Status.OK, "no limit" if limit is None else f"at most {limit}")
    found = f"at most {limit}, so a front end accepts less than {MAX_CONNECTIONS} connections"
    advice = "raise the hard limit: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or --ulimit nofile of Docker"
    status = Status.ERROR if limit < _FEWEST_FILES else Status.WARNING
    return Check(name, status, found, advice)


def _processors(machine: Machine) -> Check:
    if machine.processors < 2:
        advice = "engine and front end share it; give the service two"
        return Check("processors", Status.WARNING, machine.processors_text, advice)
    return Check("processors", Status.OK, machine.processors_text)


def _memory(machine: Machine) -> Check:
    found = f"{machine.free_memory / GIB:.1f} of {machine.total_memory / GIB:.1f} GiB free"
    if machine.free_memory < _LITTLE_MEMORY:
        advice = "end other programs, or raise the limit of the container"
        return Check("memory", Status.WARNING, found, advice)
    return Check("memory", Status.OK, found)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
