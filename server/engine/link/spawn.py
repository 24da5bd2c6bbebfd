"""Starts processes that read their configuration from standard input later.

A command starts the engine process before it imports anything else: the process imports PyTorch meanwhile, which takes
longer than reading the settings. For this reason the module has almost no imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of ours.

    `python -m` alone would import from the working directory first, where anybody may have put a `json.py`.
    """
    return (sys.executable, "-P", "-m", module)


ENGINE_COMMAND = module_command("server.engine.link.engine_process.process")
"""Starts an engine process."""


DUMP_SECONDS = 1.0
"""Enough for a process to write the stacks of its threads."""


def use_safe_path() -> None:
    """Keep the working directory out of the module path of all processes that this one starts.

    They inherit two variables: PYTHONSAFEPATH, and PYTHONPATH with the folder of this source tree. The second is needed
    where the packages are not installed, or where another copy of them is; an installed package is found without it.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    folder = Path(__file__).resolve().parents[__name__.count(".")]  # of the outermost package
    if folder.name not in ("site-packages", "dist-packages"):
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        folders = dict.fromkeys([str(folder), *filter(None, others)])
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def gpu_variables(number: int) -> dict[str, str]:
    """Return the variables with which a process sees only one of the GPUs that this process sees.

    Args:
        number: of the GPU, from 0, in this process's order.
    """
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    return {name: visible.split(",")[number].strip() if visible else str(number)}


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in processes that it starts; here it is delivered when the block ends.

    An interrupt often goes to the whole process group, and would otherwise end a process during its imports, with a
    traceback. The parent decides when a child ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LinkedProcess(subprocess.Popen[bytes]):
    """A process with a pipe as its standard input and a pair of connected sockets, one for each side.

    The sockets have no name, so no other process can connect to them, and nothing in the file system is needed.

    Attributes:
        link: socket of this process. Who talks to the other one detaches its descriptor; `end` closes it otherwise.
        link_descriptor: of the other process's socket, in that process.

    Args:
        command: program and arguments.
        pass_fds: file descriptors that the process inherits.
        variables: its environment.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(
        self, command: Sequence[str], pass_fds: Iterable[int], variables: Mapping[str, str]
    ) -> None:
        self.link, theirs = socket.socketpair()
        self.link_descriptor = theirs.fileno()
        fds = (*pass_fds, self.link_descriptor)
        try:
            with theirs:
                super().__init__(command, stdin=subprocess.PIPE, pass_fds=fds, env=variables)
        except BaseException:
            self.link.close()
            raise

    def __exit__(self, *exception: object) -> None:
        """Wait for the end, as `subprocess.Popen` does."""
        self.link.close()
        super().__exit__(*exception)  # type: ignore[arg-type]  # passed on as they come


def spawn(
    command: Sequence[str] = ENGINE_COMMAND,
    pass_fds: Iterable[int] = (),
    environment: Mapping[str, str] | None = None,
) -> LinkedProcess:
    """Start a process that reads its configuration, one line of JSON, from its standard input.

    It starts with SIGINT blocked. It ends when that input is closed, before or after the configuration, and therefore
    does not outlive this process.

    Args:
        command: program and arguments.
        pass_fds: file descriptors that the process inherits.
        environment: variables of the process that differ from those of this one.

    Raises:
        OSError: the operating system refuses.
    """
    use_safe_path()
    variables = os.environ | dict(environment or {})
    with interrupts_blocked():
        return LinkedProcess(command, pass_fds, variables)


def ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Make one of our processes write the stacks of its threads to the log; see `dump_stacks_on_signal`."""
    if hasattr(signal, "SIGUSR1"):
        process.send_signal(signal.SIGUSR1)


def end(process: LinkedProcess) -> None:
    """Kill a process if it still runs, wait for its end and close its standard input, and `link` if nobody uses it."""
    if process.poll() is None:
        process.kill()
        process.wait()
    process.link.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the configuration was still in the buffer
        process.stdin.close()
