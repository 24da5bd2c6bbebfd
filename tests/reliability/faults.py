"""What `chaos` does to a service: signals, exhausted resources, clock steps, hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.reliability.exchange import HOST, encode_post
from tests.reliability.load import wait_until
from tests.reliability.malformed import malformed_requests
from tests.reliability.processes import Role, open_descriptors

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from tests.reliability.load import Faults
    from tests.reliability.managed_service import ManagedService

# A process that was killed is started again, which for the engine takes as long as a start.
_RECOVERY_SECONDS = 120.0
# The harness notices a connection that a kill closed only once its event loop runs.
_CLOSING_SECONDS = 2.0
_SPARE_DESCRIPTORS = 3
_BLOCK = bytes(1 << 20)


class NotPossibleError(Exception):
    """This machine does not allow the fault; the text says why."""


@dataclass
class Target:
    """A service under load, and what the faults need.

    Attributes:
        service: the service.
        faults: where the faults note what they explain.
        rng: chooses processes.
        seconds: how long a fault that can be undone lasts.
        hang_seconds: after which the service replaces a process that hangs.
        small_disk: whether the service's folder is a file system of its own.
        clock_file: contains the offset of the service's clock; None if it cannot be changed.
    """

    service: ManagedService
    faults: Faults
    rng: random.Random
    seconds: float
    hang_seconds: float
    small_disk: bool = False
    clock_file: Path | None = None

    def pick(self, role: Role) -> int:
        """Return one of the processes with a role; the parent if no process has it."""
        found = self.service.processes(role) or self.service.processes(Role.PARENT)
        return self.rng.choice(found).pid

    async def until_served(self, seconds: float = _RECOVERY_SECONDS) -> str:
        """Wait for a 200 of /health; return a sentence about it."""
        waited = await wait_until(lambda: bool(self.service.get("/health")), seconds)
        return "NOT SERVED AGAIN" if waited is None else f"served again after {waited:.1f} s"


async def _kill(target: Target, role: Role) -> str:
    pid = target.pick(role)
    with target.faults.during(target.faults.losses, target.faults.delays):
        with target.faults.during(target.faults.closures):
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_CLOSING_SECONDS)
        return await target.until_served()


async def kill_engine(target: Target) -> str:
    """SIGKILL the engine process."""
    pid = target.pick(Role.ENGINE)
    with target.faults.during(target.faults.losses, target.faults.delays):
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.5)
        return await target.until_served()


async def kill_front_end(target: Target) -> str:
    """SIGKILL one front end."""
    return await _kill(target, Role.FRONT_END)


async def kill_parent(target: Target) -> str:
    """SIGKILL the parent, which ends the service; start it again."""
    faults = target.faults
    children = target.service.pids()[1:]
    with faults.during(faults.closures, faults.losses, faults.delays):
        target.service.process.kill()
        target.service.process.wait()
        ended = await wait_until(lambda: not any(map(_runs, children)), 10)
        target.service.start()
        await asyncio.sleep(0.5)
        result = await target.until_served()
    orphans = "ORPHANS REMAIN" if ended is None else f"children ended after {ended:.1f} s"
    return f"{orphans}, {result}"


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def terminate(target: Target) -> str:
    """SIGTERM under load, as in a rolling update; start the service again."""
    faults = target.faults
    with faults.during(faults.goodbyes):
        began = time.monotonic()
        code = await asyncio.to_thread(target.service.stop)
        seconds = time.monotonic() - began
        with faults.during(faults.delays):
            target.service.start()
            await asyncio.sleep(0.5)
            result = await target.until_served()
    return f"exit status {code} after {seconds:.1f} s, {result}"


async def _pause(target: Target, pids: list[int]) -> str:
    began = set(target.service.pids())
    with target.faults.during(target.faults.delays):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(target.seconds)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        result = await target.until_served()
    await asyncio.sleep(1)
    gone = began - set(target.service.pids())
    return f"{result}, {len(gone)} processes replaced"


async def pause_engine(target: Target) -> str:
    """SIGSTOP the engine process, SIGCONT it later."""
    return await _pause(target, [target.pick(Role.ENGINE)])


async def pause_front_end(target: Target) -> str:
    """SIGSTOP one front end, SIGCONT it later."""
    return await _pause(target, [target.pick(Role.FRONT_END)])


async def pause_parent(target: Target) -> str:
    """SIGSTOP the parent, which is also the hub, SIGCONT it later."""
    return await _pause(target, [target.service.process.pid])


async def pause_all(target: Target) -> str:
    """SIGSTOP every process, as a frozen container; SIGCONT them later."""
    return await _pause(target, target.service.pids())


async def _freeze(target: Target, role: Role) -> str:
    """SIGSTOP a process for good; the service must replace it by itself."""
    pid = target.pick(role)
    faults = target.faults
    with faults.during(faults.losses, faults.delays, faults.closures):
        os.kill(pid, signal.SIGSTOP)
        gone = await wait_until(lambda: not _runs(pid), 3 * target.hang_seconds + 10)
        if gone is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.5)  # until the parent has noticed
        result = await target.until_served()
    return f"{'NOT REPLACED' if gone is None else f'replaced after {gone:.1f} s'}, {result}"


async def freeze_engine(target: Target) -> str:
    """SIGSTOP the engine process for good."""
    return await _freeze(target, Role.ENGINE)


async def freeze_front_end(target: Target) -> str:
    """SIGSTOP one front end for good."""
    if not target.service.processes(Role.FRONT_END):
        raise NotPossibleError("a single front end is the parent, which nothing watches")
    return await _freeze(target, Role.FRONT_END)


async def full_disk(target: Target) -> str:
    """Fill the disk of the log and of the temporary files, and kill the engine meanwhile."""
    filler = target.service.folder / "filler"
    pids = target.service.pids()
    try:
        if target.small_disk:
            _fill(filler)
        else:  # the same for each process: a write to a file fails
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await asyncio.sleep(target.seconds / 2)
        killed = await kill_engine(target)
        await asyncio.sleep(target.seconds / 2)
    finally:
        filler.unlink(missing_ok=True)
        for pid in () if target.small_disk else target.service.pids():
            with contextlib.suppress(ProcessLookupError):
                unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    means = "a full tmpfs" if target.small_disk else "RLIMIT_FSIZE"
    return f"{means}; engine killed meanwhile: {killed}; after: {await target.until_served()}"


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(_BLOCK):
            pass
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(b"0" * 64):
            pass


async def no_descriptors(target: Target) -> str:
    """Take away the front ends' free file descriptors, and connect all the same."""
    owners = target.service.processes(Role.FRONT_END) or target.service.processes(Role.PARENT)
    limits = {}
    sockets: list[socket.socket] = []
    with target.faults.during(target.faults.delays, target.faults.closures):
        for owner in owners:
            used = open_descriptors([owner.pid])
            low = used + _SPARE_DESCRIPTORS
            limits[owner.pid] = resource.prlimit(owner.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(owner.pid, resource.RLIMIT_NOFILE, (low, limits[owner.pid][1]))
        try:
            sockets += [_connect(target) for _ in range(50)]
            await asyncio.sleep(target.seconds)
        finally:
            for pid, before in limits.items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            for one in sockets:
                one.close()
        result = await target.until_served()
    survived = sum(map(_runs, limits))
    return f"{survived} of {len(limits)} processes survived, {result}"


def _connect(target: Target, receive_buffer: int | None = None) -> socket.socket:
    one = socket.socket()
    if receive_buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        one.connect((HOST, target.service.port))
    return one


async def clock_steps(target: Target) -> str:
    """Step the service's wall clock an hour ahead, a day back, and to the right time again."""
    if target.clock_file is None:
        raise NotPossibleError("libfaketime is not installed")
    for offset in ("+3600", "-86400", "+0"):
        target.clock_file.write_text(offset)
        await asyncio.sleep(target.seconds)
    return await target.until_served()


async def idle_clients(target: Target, count: int = 2000) -> str:
    """Open connections that send nothing, more than a process may have descriptors."""
    faults = target.faults
    before = set(target.service.pids())
    # A service that is full may refuse or close connections, but must go on answering on those that it has accepted.
    with faults.during(faults.delays, faults.closures):
        sockets = []
        for i in range(count):
            sockets.append(_connect(target))
            if i % 50 == 49:
                await asyncio.sleep(0.02)
        began = time.monotonic()
        during = await target.until_served(30)
        await asyncio.sleep(max(0.0, target.seconds - (time.monotonic() - began)))
        for one in sockets:
            one.close()
        after = await target.until_served()
    gone = before - set(target.service.pids())
    return f"with {count} connections: {during}; after: {after}; {len(gone)} processes replaced"


async def slow_clients(target: Target, count: int = 200) -> str:
    """Read streams not at all, and send bodies a byte at a time."""
    body = {"inputs": "x = 1\n", "parameters": {"max_new_tokens": 1500, "ignore_eos": True}}
    request = encode_post("/generate_stream", body)
    loop = asyncio.get_running_loop()
    sockets = [_connect(target, receive_buffer=4096) for _ in range(count)]
    await asyncio.sleep(1)
    for one in sockets[: count // 2]:
        with contextlib.suppress(OSError):
            await asyncio.wait_for(loop.sock_sendall(one, request), 1)
    began, position = time.monotonic(), 0
    while time.monotonic() - began < target.seconds:
        for one in sockets[count // 2 :]:
            with contextlib.suppress(OSError):
                one.send(request[position : position + 1])
        position += 1
        await asyncio.sleep(0.5)
    during = await target.until_served(30)
    for one in sockets:
        one.close()
    return f"meanwhile: {during}; after: {await target.until_served()}"


async def malformed_traffic(target: Target, count: int = 300) -> str:
    """Send what is not HTTP, not JSON, or not what the API expects."""
    answered = 0
    for data in malformed_requests(target.rng, count):
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(HOST, target.service.port)
            try:
                writer.write(data)
                answered += bool(await asyncio.wait_for(reader.read(100), 0.2))
            finally:
                writer.transport.abort()
    return f"{count} sent, {answered} answered at once, {await target.until_served()}"


FAULTS: dict[str, Callable[[Target], Awaitable[str]]] = {
    "kill-engine": kill_engine,
    "kill-front-end": kill_front_end,
    "pause-front-end": pause_front_end,
    "malformed-traffic": malformed_traffic,
    "slow-clients": slow_clients,
    "idle-clients": idle_clients,
    "pause-engine": pause_engine,
    "pause-parent": pause_parent,
    "pause-all": pause_all,
    "kill-parent": kill_parent,
    "terminate": terminate,
    "full-disk": full_disk,
    "no-descriptors": no_descriptors,
    "clock-steps": clock_steps,
    "freeze-engine": freeze_engine,
    "freeze-front-end": freeze_front_end,
}


def mount_small_disk(folder: Path, size: str) -> bool:
    """Mount a small file system of its own on a folder; return whether this user may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def unmount(folder: Path) -> None:
    """Remove what `mount_small_disk` has mounted."""
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def fake_clock(folder: Path) -> tuple[dict[str, str], Path | None]:
    """Return variables that make a service's wall clock follow a file, and the file; None without libfaketime."""
    libraries = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    if (library := next(libraries, None)) is None:
        return {}, None
    file = folder / "clock"
    file.write_text("+0")
    variables = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
        "NO_FAKE_STAT": "1",
    }
    return variables, file
