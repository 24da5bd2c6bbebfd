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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from model.helper_process.command import module_command

ENGINE_COMMAND = module_command("server.engine.link.engine_process.process")
"""Starts an engine process."""


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""End the service: Ctrl-C, what starts services, the end of a terminal, and what ends other HTTP servers in order."""

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those of them that a terminal sends to all processes of a command."""

DUMP_SECONDS = 1.0
"""Enough for a process to write the stacks of its threads."""


KILLED_SECONDS = 5.0
"""A killed process that still exists after this time waits for a device that does not answer."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return `ENDING_SIGNALS`, without SIGHUP if it was ignored when this process started, as by `nohup`."""
    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(it for it in ENDING_SIGNALS if it is not signal.SIGHUP or not hangup_ignored)


def ignore_ending_signals(*others: signal.Signals) -> None:
    """Leave it to the parent when this process ends: the signals often go to the whole process group.

    Args:
        others: further signals to ignore.
    """
    for number in (*ENDING_SIGNALS, *others):
        signal.signal(number, signal.SIG_IGN)


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
    """Block `TERMINAL_SIGNALS` in this thread and in processes that it starts; here they are delivered when it ends.

    They go to the whole process group, and would otherwise end a process during its imports, with a traceback or a core
    dump. The parent decides when a child ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
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

    It starts with `TERMINAL_SIGNALS` blocked. It ends when that input is closed, before or after the configuration, and
    therefore does not outlive this process.

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


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it has started, which may be stopped, so that they would not notice its end."""
    others = descendants(process.pid)
    process.kill()
    for pid in others:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children and of theirs; none where the system does not list processes."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name of the program, in parentheses, may contain anything.
            _, parent, *_ = (entry / "stat").read_text("latin-1").rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for it in found:  # grows while it is iterated over
        found += children.get(it, ())
    return found[1:]


def end(process: LinkedProcess) -> None:
    """Kill a process if it still runs, wait for its end and close its standard input, and `link` if nobody uses it.

    A process that cannot be killed, because it waits for a device that does not answer, is left after a time.
    """
    if process.poll() is None:
        kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
    process.link.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the configuration was still in the buffer
        process.stdin.close()
